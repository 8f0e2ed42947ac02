"""The delta rule as one exact token-mixing matrix, erasing included."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_ssm.ops.arguments import bind_axes
from hooked_ssm.ops.delta_rule.chunks import Chunks, cut
from hooked_ssm.ops.delta_rule.finite import require_finite
from hooked_ssm.ops.output import core_dtype
from hooked_ssm.shapes import Pattern


def delta_rule_pattern(
    q: Float[Tensor, "batch pos head d_key"],
    k: Float[Tensor, "batch pos head d_key"],
    beta: Float[Tensor, "batch pos head"],
    log_decay: Float[Tensor, "batch pos head"] | None = None,
    *,
    scale: float | None = None,
) -> Pattern:
    """Return the matrix with pattern @ v = y, from zero initial state.

    pattern[t, s] = scale q[t]^T A[t] A[t-1] .. A[s+1] k[s] beta[s] for s <= t, exactly 0 above,
    with A[r] = (I - beta[r] k[r] k[r]^T) exp(g[r])

    All at once: (scale q k^T, decayed, times beta) times the inverse of the unit lower-triangular
    matrix I + M of the README. O(pos^2) memory.

    Args:
        q, k: Queries; keys of at most unit norm. [batch, pos, head, d_key]
        beta: Write strength in [0, 2], one per head: with one per value channel every channel has
            its own pattern, so fold the channels into heads first. [batch, pos, head]
        log_decay: g <= 0; None for the plain delta rule. [batch, pos, head]
        scale: d_key ** -0.5 if None.
    Returns:
        float32 (float64 if any input is). [batch, head, query_pos, key_pos]
    Raises:
        ShapeError: Shapes that do not fit.
        DivergedError: The result is not finite (keys too long, or NaN among the inputs).
    """
    per_head = "batch pos head"
    bind_axes(
        "delta_rule_pattern",
        {
            "k": (k, f"{per_head} d_key"),
            "q": (q, f"{per_head} d_key"),
            "beta": (beta, per_head),
            "log_decay": (log_decay, per_head),
        },
    )
    given = [x for x in (q, k, beta, log_decay) if x is not None]
    core = core_dtype(*given)
    q = q.to(core) * (q.shape[-1] ** -0.5 if scale is None else scale)
    log_decay = None if log_decay is None else log_decay.to(core)
    length = q.shape[1]
    chunks = Chunks.of(k.to(core), beta.to(core).unsqueeze(-1), log_decay, length)
    pattern = torch.linalg.solve_triangular(
        chunks.weights(chunks.k),
        chunks.weights(cut(q, length)),
        upper=False,
        left=False,
        unitriangular=True,
    )
    require_finite("delta_rule_pattern", pattern, k, beta)
    return pattern.squeeze(2).tril()

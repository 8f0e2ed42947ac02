"""Gated linear attention: linear attention whose every key channel decays by itself."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from hooked_ssm.ops.arguments import bind_axes
from hooked_ssm.ops.decayed_pattern import decayed_pattern
from hooked_ssm.ops.dispatch import Backends, Impl
from hooked_ssm.ops.gla.cpu import gla_cpu
from hooked_ssm.ops.gla.reference import gla_reference
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype
from hooked_ssm.shapes import Pattern

BACKENDS = Backends("gla", gla_reference, gla_cpu, "hooked_ssm.ops.gla.triton:gla_triton")


def gla(
    q: Float[Tensor, "batch pos head d_key"],
    k: Float[Tensor, "batch pos head d_key"],
    v: Float[Tensor, "batch pos head d_head"],
    log_decay: Float[Tensor, "batch pos head d_key"],
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "batch head d_key d_head"] | None = None,
    return_states: StatesWanted = False,
    impl: Impl = "auto",
) -> ScanOutput:
    """Run gated linear attention and return outputs, states and the final state.

    S[t] = diag(exp(log_decay[t])) S[t-1] + k[t] v[t]^T;   y[t] = scale S[t]^T q[t]

    Args:
        log_decay: Any size: huge decays stay finite, and -inf forgets everything before t exactly.
        scale: Multiplies q only; d_key^-0.5 if None, as in fla.
        initial_state: S[-1]; zeros if None.
        return_states: False, True for every position, or the positions wanted.
    Returns:
        states[:, t] is S *after* token t, [batch, wanted, head, d_key, d_head]; float32, or float64
        if q, k, v or log_decay is.
    Raises:
        ShapeError: Sizes, devices or dtypes do not fit, or a position lies outside the sequence.
        KernelUnavailableError: impl="triton" where it cannot run.
    Source: Yang et al. 2023; the output reads the updated state.
    """
    sizes = bind_axes(
        "gla",
        {
            "q": (q, "batch pos head d_key"),
            "k": (k, "batch pos head d_key"),
            "v": (v, "batch pos head d_head"),
            "log_decay": (log_decay, "batch pos head d_key"),
            "initial_state": (initial_state, "batch head d_key d_head"),
        },
    )
    scale = sizes["d_key"] ** -0.5 if scale is None else scale
    run = BACKENDS.pick(impl, q.device)
    return run(q, k, v, log_decay, scale, initial_state, return_states)


def gla_pattern(
    q: Float[Tensor, "batch pos head d_key"],
    k: Float[Tensor, "batch pos head d_key"],
    log_decay: Float[Tensor, "batch pos head d_key"],
    *,
    scale: float | None = None,
) -> Pattern:
    """Return the token-mixing matrix of `gla`, whose output from a zero state is pattern @ v.

    pattern[t, s] = scale sum over f of q[t, f] k[s, f] exp(sum over s < u <= t of log_decay[u, f])

    Zero above the diagonal; float32 (float64).

    Raises:
        ShapeError: Sizes do not fit.
    """
    axes = "batch pos head d_key"
    arguments = {"q": (q, axes), "k": (k, axes), "log_decay": (log_decay, axes)}
    sizes = bind_axes("gla_pattern", arguments)
    scale = sizes["d_key"] ** -0.5 if scale is None else scale
    dtype = core_dtype(q, k, log_decay)
    q, k, log_decay = (x.to(dtype).transpose(1, 2) for x in (q, k, log_decay))
    return decayed_pattern(q * scale, k, log_decay)


__all__ = ["BACKENDS", "gla", "gla_pattern"]

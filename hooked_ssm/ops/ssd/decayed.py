"""Linear attention with one decay per head and position: the core of Mamba-2."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.arguments import bind_axes
from hooked_ssm.ops.decayed_pattern import decayed_pattern
from hooked_ssm.ops.dispatch import Backends, Impl
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype
from hooked_ssm.ops.ssd.cpu import decayed_linear_attention_cpu
from hooked_ssm.ops.ssd.reference import decayed_linear_attention_reference
from hooked_ssm.shapes import Pattern

DECAYED_BACKENDS = Backends(
    "decayed_linear_attention",
    decayed_linear_attention_reference,
    decayed_linear_attention_cpu,
    "hooked_ssm.ops.ssd.triton:decayed_linear_attention_triton",
)


def check_groups(op: str, heads: int, groups: int) -> None:
    """Raise ShapeError unless every group has the same number of heads."""
    if groups < 1 or heads % groups:
        raise ShapeError(
            f"{op}: {heads} heads cannot share {groups} groups evenly; wanted a number of groups "
            "that divides the number of heads"
        )


def decayed_linear_attention(
    q: Float[Tensor, "batch pos group feature"],
    k: Float[Tensor, "batch pos group feature"],
    v: Float[Tensor, "batch pos head d_head"],
    log_decay: Float[Tensor, "batch pos head"],
    *,
    initial_state: Float[Tensor, "batch head feature d_head"] | None = None,
    return_states: StatesWanted = False,
    impl: Impl = "auto",
) -> ScanOutput:
    """Run linear attention whose state decays by one factor per head and position.

    S[t] = exp(log_decay[t]) S[t-1] + k[t] v[t]^T;   y[t] = S[t]^T q[t]

    Args:
        q, k: Head h reads those of group h // (heads / groups); one group per head is the usual
            linear attention.
        log_decay: Any size: huge decays stay finite, and -inf forgets everything before t exactly.
        initial_state: S[-1]; zeros if None.
        return_states: False, True for every position, or the positions wanted.
    Returns:
        states[:, t] is S *after* token t, [batch, wanted, head, feature, d_head]; float32, or
        float64 if q, k, v or log_decay is.
    Raises:
        ShapeError: Sizes, devices or dtypes do not fit, heads do not divide into groups, or a
            position lies outside the sequence.
        KernelUnavailableError: impl="triton" where it cannot run.
    """
    sizes = bind_axes(
        "decayed_linear_attention",
        {
            "q": (q, "batch pos group feature"),
            "k": (k, "batch pos group feature"),
            "v": (v, "batch pos head d_head"),
            "log_decay": (log_decay, "batch pos head"),
            "initial_state": (initial_state, "batch head feature d_head"),
        },
    )
    check_groups("decayed_linear_attention", sizes["head"], sizes["group"])
    run = DECAYED_BACKENDS.pick(impl, q.device)
    return run(q, k, v, log_decay, initial_state, return_states)


def decayed_linear_attention_pattern(
    q: Float[Tensor, "batch pos group feature"],
    k: Float[Tensor, "batch pos group feature"],
    log_decay: Float[Tensor, "batch pos head"],
) -> Pattern:
    """Return the token-mixing matrix: q[t] . k[s] exp(sum over s < u <= t of log_decay[u]).

    `einsum("bhqk,bkhd->bqhd", pattern, v)` is the output from a zero initial state. Zero above the
    diagonal; float32 (float64).

    Raises:
        ShapeError: Sizes do not fit.
    """
    sizes = bind_axes(
        "decayed_linear_attention_pattern",
        {
            "q": (q, "batch pos group feature"),
            "k": (k, "batch pos group feature"),
            "log_decay": (log_decay, "batch pos head"),
        },
    )
    check_groups("decayed_linear_attention_pattern", sizes["head"], sizes["group"])
    dtype = core_dtype(q, k, log_decay)
    q, k = (x.to(dtype).transpose(1, 2).unsqueeze(2) for x in (q, k))  # [b group 1 pos feature]
    decay = log_decay.to(dtype).transpose(1, 2).unflatten(1, (sizes["group"], -1))
    return decayed_pattern(q, k, decay[..., None]).flatten(1, 2)

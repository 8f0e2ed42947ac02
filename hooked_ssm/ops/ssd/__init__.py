"""Mamba-2's state space dual, and the decayed linear attention that it is."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from hooked_ssm.ops.arguments import bind_axes
from hooked_ssm.ops.dispatch import Backends, Impl
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype
from hooked_ssm.ops.ssd.cpu import ssd_cpu
from hooked_ssm.ops.ssd.decayed import (
    DECAYED_BACKENDS,
    check_groups,
    decayed_linear_attention,
    decayed_linear_attention_pattern,
)
from hooked_ssm.ops.ssd.reference import ssd_reference
from hooked_ssm.shapes import Pattern

BACKENDS = Backends("ssd", ssd_reference, ssd_cpu, "hooked_ssm.ops.ssd.triton:ssd_triton")


def ssd(
    x: Float[Tensor, "batch pos head d_head"],
    dt: Float[Tensor, "batch pos head"],
    A: Float[Tensor, " head"],
    B: Float[Tensor, "batch pos group d_state"],
    C: Float[Tensor, "batch pos group d_state"],
    *,
    initial_state: Float[Tensor, "batch head d_head d_state"] | None = None,
    return_states: StatesWanted = False,
    impl: Impl = "auto",
) -> ScanOutput:
    """Run the Mamba-2 recurrence and return outputs, states and the final state.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T;   y[t] = h[t] C[t]

    The skip D x and the gate are the mixer's. `decayed_linear_attention` is the same recurrence
    with decay, key (B), value (dt x) and query (C) given separately; its state is transposed.

    Args:
        dt: Step size after bias, softplus and limits.
        A: Below zero in Mamba-2 (-exp(A_log)); any value runs.
        B, C: Head h reads those of group h // (heads / groups).
        initial_state: h[-1]; zeros if None.
        return_states: False, True for every position, or the positions wanted.
    Returns:
        states[:, t] is h *after* token t, [batch, wanted, head, d_head, d_state]; float32, or
        float64 if any of x, dt, A, B, C is.
    Raises:
        ShapeError: Sizes, devices or dtypes do not fit, heads do not divide into groups, or a
            position lies outside the sequence.
        KernelUnavailableError: impl="triton" where it cannot run.
    Source: Dao & Gu 2024.
    """
    sizes = bind_axes(
        "ssd",
        {
            "x": (x, "batch pos head d_head"),
            "dt": (dt, "batch pos head"),
            "A": (A, "head"),
            "B": (B, "batch pos group d_state"),
            "C": (C, "batch pos group d_state"),
            "initial_state": (initial_state, "batch head d_head d_state"),
        },
    )
    check_groups("ssd", sizes["head"], sizes["group"])
    return BACKENDS.pick(impl, x.device)(x, dt, A, B, C, initial_state, return_states)


def ssd_pattern(
    dt: Float[Tensor, "batch pos head"],
    A: Float[Tensor, " head"],
    B: Float[Tensor, "batch pos group d_state"],
    C: Float[Tensor, "batch pos group d_state"],
) -> Pattern:
    """Return the token-mixing matrix: C[t] . B[s] exp(A sum over s < u <= t of dt[u]) dt[s].

    `einsum("bhqk,bkhd->bqhd", pattern, x)` is the output from a zero initial state. Zero above the
    diagonal; float32 (float64).

    Raises:
        ShapeError: Sizes do not fit.
    """
    bind_axes("ssd_pattern", {"dt": (dt, "batch pos head"), "A": (A, "head")})
    dtype = core_dtype(dt, A, B, C)
    dt = dt.to(dtype)
    return decayed_linear_attention_pattern(C, B, dt * A.to(dtype)) * dt.mT[:, :, None, :]


__all__ = [
    "BACKENDS",
    "DECAYED_BACKENDS",
    "decayed_linear_attention",
    "decayed_linear_attention_pattern",
    "ssd",
    "ssd_pattern",
]

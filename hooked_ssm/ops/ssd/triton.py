"""Mamba-2's recurrence by the Triton kernels of `ops/matrix_state_kernels.py`."""

from __future__ import annotations

from torch import Tensor

from hooked_ssm.ops.matrix_state_triton import matrix_state_scan
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype


def ssd_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run it as linear attention with q = C, k = B, v = dt x, and turn the states around."""
    dtype = core_dtype(x, dt, A, B, C)
    dt = dt.to(dtype)
    out = decayed_linear_attention_triton(
        C,
        B,
        dt[..., None] * x.to(dtype),
        dt * A.to(dtype),
        None if initial_state is None else initial_state.mT,
        return_states,
    )
    states = None if out.states is None else out.states.mT
    return ScanOutput(out.y.to(x.dtype), states, out.final_state.mT)


def decayed_linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run the kernels with a decay per head; as `decayed_linear_attention_reference`."""
    return matrix_state_scan(
        q, k, v, log_decay=log_decay, initial_state=initial_state, return_states=return_states
    )

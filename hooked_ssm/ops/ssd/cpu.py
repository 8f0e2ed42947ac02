"""Mamba-2's recurrence in chunks; torch code for any device."""

from __future__ import annotations

from torch import Tensor

from hooked_ssm.ops.chunked import chunked_linear_attention
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype


def ssd_cpu(
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
    out = decayed_linear_attention_cpu(
        C.to(dtype),
        B.to(dtype),
        dt[..., None] * x.to(dtype),
        dt * A.to(dtype),
        None if initial_state is None else initial_state.mT,
        return_states,
    )
    states = None if out.states is None else out.states.mT
    return ScanOutput(out.y.to(x.dtype), states, out.final_state.mT)


def decayed_linear_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run `chunked_linear_attention` with a decay per head in float32 (float64)."""
    dtype = core_dtype(q, k, v, log_decay)
    start = None if initial_state is None else initial_state.to(dtype)
    out = chunked_linear_attention(
        q.to(dtype), k.to(dtype), v.to(dtype), log_decay.to(dtype), start, return_states
    )
    return out._replace(y=out.y.to(v.dtype))

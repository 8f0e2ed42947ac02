"""Gated linear attention in chunks; torch code for any device."""

from __future__ import annotations

from torch import Tensor

from hooked_ssm.ops.chunked import chunked_linear_attention
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype


def gla_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run `chunked_linear_attention` with a decay per key channel in float32 (float64)."""
    dtype = core_dtype(q, k, v, log_decay)
    out = chunked_linear_attention(
        q.to(dtype) * scale,
        k.to(dtype),
        v.to(dtype),
        log_decay.to(dtype),
        None if initial_state is None else initial_state.to(dtype),
        return_states,
    )
    return out._replace(y=out.y.to(v.dtype))

"""Linear attention in chunks; torch code for any device."""

from __future__ import annotations

from torch import Tensor

from hooked_ssm.ops.chunked import chunked_linear_attention
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype


def linear_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run `chunked_linear_attention` without decay in float32 (float64)."""
    dtype = core_dtype(q, k, v)
    start = None if initial_state is None else initial_state.to(dtype)
    out = chunked_linear_attention(
        q.to(dtype), k.to(dtype), v.to(dtype), None, start, return_states
    )
    return out._replace(y=out.y.to(v.dtype))

"""Linear attention by the Triton kernels of `ops/matrix_state_kernels.py`."""

from __future__ import annotations

from torch import Tensor

from hooked_ssm.ops.matrix_state_triton import matrix_state_scan
from hooked_ssm.ops.output import ScanOutput, StatesWanted


def linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run the kernels without decay; arguments as in `linear_attention_reference`."""
    return matrix_state_scan(q, k, v, initial_state=initial_state, return_states=return_states)

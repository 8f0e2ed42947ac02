"""Gated linear attention by the Triton kernels of `ops/matrix_state_kernels.py`."""

from __future__ import annotations

from torch import Tensor

from hooked_ssm.ops.matrix_state_triton import matrix_state_scan
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype


def gla_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run the kernels with a decay per key channel; arguments as in `gla_reference`."""
    return matrix_state_scan(
        q.to(core_dtype(q, k, v, log_decay)) * scale,
        k,
        v,
        log_decay=log_decay,
        initial_state=initial_state,
        return_states=return_states,
    )

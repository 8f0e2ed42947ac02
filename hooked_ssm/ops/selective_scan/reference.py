"""The selective scan as the plain recurrence: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype, gather_states


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Loop over the tokens. Arguments as in `selective_scan`, with B, C [batch, pos, group, n]."""
    core = core_dtype(x, dt, A, B, C)
    A = A.to(core)
    state = (
        x.new_zeros(x.shape[0], *A.shape, dtype=core) if initial_state is None else initial_state
    )
    state = state.to(core)
    per_group = x.shape[2] // B.shape[2]
    outputs, states = [], []
    for x_t, dt_t, B_t, C_t in zip(
        x.to(core).unbind(1),
        dt.to(core).unbind(1),
        B.to(core).unbind(1),
        C.to(core).unbind(1),
        strict=True,
    ):
        B_t = B_t.repeat_interleave(per_group, dim=1)  # [batch, d_inner, n]
        C_t = C_t.repeat_interleave(per_group, dim=1)
        decay = torch.exp(dt_t[..., None] * A)
        state = decay * state + (dt_t * x_t)[..., None] * B_t
        outputs.append((state * C_t).sum(-1))
        states.append(state)
    y = torch.stack(outputs, dim=1).to(x.dtype)
    return ScanOutput(y, gather_states(states, return_states), state)

"""The diagonal SSM as its plain recurrence, token by token: the specification.

    x[t] = dA x[t-1] + dB u[t];   y[t] = 2 Re sum_n C[n] x[t, n]

The parameters are complex, [channel, mode], and act alike on all axes between channel and mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hooked_ssm.ops.output import ScanOutput, StatesWanted, gather_states


def diagonal_ssm_reference(
    u: Tensor,
    dA: Tensor,
    dB: Tensor,
    C: Tensor,
    initial_state: Tensor,
    return_states: StatesWanted,
) -> ScanOutput:
    """u [batch, pos, channel, *inner], initial state [batch, channel, *inner, mode]."""
    between = (1,) * (u.ndim - 3)
    dA, dB, C = (x.reshape(x.shape[0], *between, x.shape[1]) for x in (dA, dB, C))
    x, states = initial_state, []
    for u_t in u.unbind(1):
        x = dA * x + dB * u_t.unsqueeze(-1)
        states.append(x)
    y = torch.stack([2 * (C * x).sum(-1).real for x in states], dim=1)
    return ScanOutput(y, gather_states(states, return_states), x)

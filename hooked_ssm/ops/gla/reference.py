"""Gated linear attention, one token at a time: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype, gather_states


def gla_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """S[t] = diag(exp(log_decay[t])) S[t-1] + k[t] v[t]^T; y[t] = scale S[t]^T q[t]."""
    dtype = core_dtype(q, k, v, log_decay)
    batch, _, heads, d_key = k.shape
    state = (
        v.new_zeros(batch, heads, d_key, v.shape[3], dtype=dtype)
        if initial_state is None
        else initial_state.to(dtype)
    )
    outputs, states = [], []
    tokens = zip(*(x.to(dtype).unbind(1) for x in (q, k, v, log_decay)), strict=True)
    for q_t, k_t, v_t, log_decay_t in tokens:
        state = log_decay_t.exp()[..., None] * state + k_t[..., :, None] * v_t[..., None, :]
        outputs.append(torch.einsum("bhf,bhfd->bhd", scale * q_t, state))
        states.append(state)
    y = torch.stack(outputs, dim=1).to(v.dtype)
    return ScanOutput(y, gather_states(states, return_states), state)

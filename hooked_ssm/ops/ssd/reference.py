"""Mamba-2's recurrence, one token at a time: the specification, in both of its notations."""

from __future__ import annotations

import torch
from torch import Tensor

from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype, gather_states


def ssd_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T; y[t] = h[t] C[t]."""
    dtype = core_dtype(x, dt, A, B, C)
    batch, _, heads, d_head = x.shape
    heads_per_group = heads // B.shape[2]
    state = (
        x.new_zeros(batch, heads, d_head, B.shape[3], dtype=dtype)
        if initial_state is None
        else initial_state.to(dtype)
    )
    outputs, states = [], []
    for x_t, dt_t, B_t, C_t in zip(*(i.to(dtype).unbind(1) for i in (x, dt, B, C)), strict=True):
        B_t = B_t.repeat_interleave(heads_per_group, dim=1)  # [batch, head, d_state]
        C_t = C_t.repeat_interleave(heads_per_group, dim=1)
        decay = torch.exp(dt_t * A.to(dtype))
        write = (dt_t[..., None] * x_t)[..., :, None] * B_t[..., None, :]
        state = decay[..., None, None] * state + write
        outputs.append(torch.einsum("bhdn,bhn->bhd", state, C_t))
        states.append(state)
    y = torch.stack(outputs, dim=1).to(x.dtype)
    return ScanOutput(y, gather_states(states, return_states), state)


def decayed_linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """S[t] = exp(log_decay[t]) S[t-1] + k[t] v[t]^T; y[t] = S[t]^T q[t]."""
    dtype = core_dtype(q, k, v, log_decay)
    batch, _, heads, d_head = v.shape
    heads_per_group = heads // k.shape[2]
    state = (
        v.new_zeros(batch, heads, k.shape[3], d_head, dtype=dtype)
        if initial_state is None
        else initial_state.to(dtype)
    )
    outputs, states = [], []
    tokens = zip(*(i.to(dtype).unbind(1) for i in (q, k, v, log_decay)), strict=True)
    for q_t, k_t, v_t, log_decay_t in tokens:
        q_t = q_t.repeat_interleave(heads_per_group, dim=1)  # [batch, head, feature]
        k_t = k_t.repeat_interleave(heads_per_group, dim=1)
        state = log_decay_t.exp()[..., None, None] * state + k_t[..., None] * v_t[..., None, :]
        outputs.append(torch.einsum("bhf,bhfd->bhd", q_t, state))
        states.append(state)
    y = torch.stack(outputs, dim=1).to(v.dtype)
    return ScanOutput(y, gather_states(states, return_states), state)

"""The delta rule as its plain recurrence, token by token: the specification.

    S' = exp(g[t]) S[t-1]                     decay (g = 0 for the plain delta rule)
    e[t] = v[t] - S'^T k[t]                   prediction error
    S[t] = S' + beta[t] k[t] e[t]^T           write
    y[t] = scale S[t]^T q[t]                  read, after the write

Here beta is [batch, pos, head, 1 or d_head], all tensors share one dtype, and the initial state is
given. Positions go by `unbind`, since indexing `a[:, t]` makes the backward pass quadratic.
Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length" (plain); Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks" (decay).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_ssm.ops.output import ScanOutput, StatesWanted, gather_states


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor,
    return_states: StatesWanted,
) -> ScanOutput:
    """Outputs, states [batch, pos, head, d_key, d_head] and final state."""
    states = [state for _, state in _steps(k, v, beta, log_decay, initial_state)]
    return _read(q, states, scale, return_states)


def prediction_error(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, initial_state: Tensor
) -> Tensor:
    """e[t] for every position. [batch, pos, head, d_head]"""
    return torch.stack([e for e, _ in _steps(k, v, beta, log_decay, initial_state)], dim=1)


def delta_rule_given_error(
    q: Tensor,
    k: Tensor,
    error: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor,
    return_states: StatesWanted,
) -> ScanOutput:
    """As `delta_rule`, with e[t] given instead of computed."""
    state, states = initial_state, []
    tokens = zip(k.unbind(1), error.unbind(1), beta.unbind(1), _decays(log_decay, k), strict=True)
    for key, e, rate, decay in tokens:
        state = decay * state + _outer(key, rate * e)
        states.append(state)
    return _read(q, states, scale, return_states)


def delta_rule_from_writes(
    k: Tensor, beta: Tensor, log_decay: Tensor | None, write: Tensor, initial_state: Tensor
) -> Tensor:
    """S[t] = (I - beta k k^T) exp(g) S[t-1] + write[t]. [batch, pos, head, d_key, d_head]"""
    state, states = initial_state, []
    tokens = zip(k.unbind(1), write.unbind(1), beta.unbind(1), _decays(log_decay, k), strict=True)
    for key, added, rate, decay in tokens:
        state = decay * state
        state = state - _outer(key, rate * _recall(key, state)) + added
        states.append(state)
    return torch.stack(states, dim=1)


def _steps(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The error at, and the state after, each token."""
    tokens = zip(k.unbind(1), v.unbind(1), beta.unbind(1), _decays(log_decay, k), strict=True)
    for key, value, rate, decay in tokens:
        state = decay * state
        error = value - _recall(key, state)
        state = state + _outer(key, rate * error)
        yield error, state


def _read(q: Tensor, states: list[Tensor], scale: float, return_states: StatesWanted) -> ScanOutput:
    y = [_recall(query, state) * scale for query, state in zip(q.unbind(1), states, strict=True)]
    return ScanOutput(torch.stack(y, dim=1), gather_states(states, return_states), states[-1])


def _decays(log_decay: Tensor | None, k: Tensor) -> list[float] | list[Tensor]:
    """The factor on the state at each token: 1, or exp(g). [batch, head, 1, 1]"""
    if log_decay is None:
        return [1.0] * k.shape[1]
    return list(log_decay.exp()[..., None, None].unbind(1))


def _outer(key: Tensor, value: Tensor) -> Tensor:
    return key.unsqueeze(-1) * value.unsqueeze(-2)


def _recall(key: Tensor, state: Tensor) -> Tensor:
    """S^T k. [batch, head, d_head]"""
    return (key.unsqueeze(-1) * state).sum(-2)

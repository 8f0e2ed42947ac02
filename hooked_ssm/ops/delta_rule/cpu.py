"""The delta rule in chunks: one triangular system per chunk, and a short loop over the chunks.

Torch code, for any device. README.md derives it; every function has its twin in reference.py, with
the same arguments (beta [batch, pos, head, 1 or d_head], one dtype, the initial state given).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hooked_ssm.ops.chunked import chunked_linear_attention
from hooked_ssm.ops.delta_rule.chunks import Chunks, chunk_size, cut, join
from hooked_ssm.ops.delta_rule.per_value import one_head_per_value
from hooked_ssm.ops.output import ScanOutput, StatesWanted

CHUNK = 64
"""Most positions per chunk: larger ones cost more arithmetic, smaller ones more steps."""


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
    """Outputs, states and final state; see reference.delta_rule."""
    error = prediction_error(k, v, beta, log_decay, initial_state)
    return delta_rule_given_error(q, k, error, beta, log_decay, scale, initial_state, return_states)


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
    """Linear attention with the values beta error; see reference.delta_rule_given_error."""
    return chunked_linear_attention(
        q * scale, k, beta * error, log_decay, initial_state, return_states
    )


@one_head_per_value
def prediction_error(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, initial_state: Tensor
) -> Tensor:
    """Solve for the errors, chunk by chunk; see reference.prediction_error."""
    size = chunk_size(k.shape[1], CHUNK)
    error, _ = _errors(Chunks.of(k, beta, log_decay, size), cut(v, size), initial_state)
    return join(error, k.shape[1])


@one_head_per_value
def delta_rule_from_writes(
    k: Tensor, beta: Tensor, log_decay: Tensor | None, write: Tensor, initial_state: Tensor
) -> Tensor:
    """Every state, given what is added at each token; see reference.delta_rule_from_writes."""
    size = chunk_size(k.shape[1], CHUNK)
    chunks = Chunks.of(k, beta, log_decay, size)
    write = cut(write, size)
    added = (chunks.within @ write.flatten(-2)).unflatten(-1, write.shape[-2:])
    # what the key recalls of this chunk's earlier writes: `added` less the token's own
    recalled = (chunks.k.unsqueeze(-2) @ (added - write)).squeeze(-2)
    error, carries = _errors(chunks, -recalled, initial_state, added[..., -1, :, :])
    keys = (chunks.beta.unsqueeze(-1) * chunks.k).unsqueeze(-1)
    decay = write.new_ones(1, 1, 1, size) if log_decay is None else cut(log_decay, size).exp()
    steps = (write, keys, error.unsqueeze(-2), decay[..., None, None])
    state, states = carries, []
    for added_t, key, error_t, decay_t in zip(*(x.unbind(3) for x in steps), strict=True):
        state = torch.addcmul(torch.addcmul(added_t, decay_t, state), key, error_t)
        states.append(state)
    return join(torch.stack(states, dim=3), k.shape[1])


def _errors(
    chunks: Chunks, value: Tensor, state: Tensor, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Solve for the errors, chunk by chunk.

    Args:
        value: Values. [b, h, n, c, d_head]
        state: Before the first chunk. [b, h, d_key, d_head]
        added: What else each chunk adds to the state. [b, h, n, d_key, d_head]
    Returns:
        The errors, and the state before each chunk. [b, h, n, d_key, d_head]
    """
    right = torch.cat([value, chunks.since_start * chunks.k], dim=-1)
    own, seen = chunks.solve(right).split([value.shape[-1], chunks.k.shape[-1]], dim=-1)
    # the state after a chunk is affine in the state before it: one product per step of the loop
    from_own = chunks.writes(own) if added is None else chunks.writes(own) + added
    from_seen = chunks.writes(seen)
    carries = [state]
    for own_write, seen_write, whole in zip(
        from_own.unbind(2)[:-1], from_seen.unbind(2)[:-1], chunks.whole.unbind(2)[:-1], strict=True
    ):
        state = whole * state + own_write - seen_write @ state
        carries.append(state)
    before = torch.stack(carries, dim=2)
    return own - seen @ before, before

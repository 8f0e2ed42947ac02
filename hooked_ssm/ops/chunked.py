"""Linear attention with no decay, a decay per head or one per key channel, in chunks.

    S[t] = exp(log_decay[t]) S[t-1] + k[t] v[t]^T;   y[t] = S[t]^T q[t]

Inside a chunk the output is pattern @ v; what came before it is one state per chunk. So the work is
matrix products, and only pos / chunk states exist at a time. States at chosen positions come from
a second pass over the keys and values, cut at those positions: one state each. Plain torch code;
gradients are autograd's.

Inside this file: chunk axis n (absent before the cut), group g (heads that share q and k), heads
per group r, position in the chunk l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm.ops.causal import causal_product
from hooked_ssm.ops.decayed_pattern import decayed_pattern, sums_from_start, sums_to_end
from hooked_ssm.ops.output import ScanOutput, StatesWanted, wanted_positions

CHUNK = 64


def chunked_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run the recurrence above in chunks; everything in one dtype, that of the core.

    Args:
        q, k: Head h reads those of group h // (heads / groups). [batch, pos, group, feature]
        v: [batch, pos, head, d_head]
        log_decay: [batch, pos, head], or [batch, pos, head, feature] with as many groups as heads.
        initial_state: [batch, head, feature, d_head]
    """
    batch, length, groups, features = q.shape
    n_chunks = -(-length // CHUNK)
    every = _Tokens.of(q, k, v, log_decay)
    chunks = every.in_chunks(n_chunks, -(-length // n_chunks))
    state = (
        v.new_zeros(batch, v.shape[2], features, v.shape[3])
        if initial_state is None
        else initial_state
    ).unflatten(1, (groups, -1))
    starts, final_state = chunks.states_between(state)
    y = causal_product(decayed_pattern(chunks.q, chunks.k, chunks.log_decay), chunks.v)
    if n_chunks > 1 or initial_state is not None:  # else it would add zeros
        y = y + chunks.read(starts)
    y = y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :length]
    states = None
    if return_states is not False:
        wanted = wanted_positions(return_states, length)
        if 2 * len(set(wanted)) < length:
            states = every.states_at(wanted, state)
        else:
            states = chunks.all_states(starts)[:, :length]
            if wanted != list(range(length)):
                states = states[:, wanted]
        states = states.flatten(2, 3)
    return ScanOutput(y, states, final_state.flatten(1, 2))


@dataclass(frozen=True)
class _Tokens:
    """Queries, keys, values and log decays of a run of tokens, laid out for matrix products.

    q, k [b n g 1 l f]; v [b n g r l d]; log_decay None, [b n g r l 1] or [b n g 1 l f].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> _Tokens:
        """Take the op's own layout apart into groups; no chunk axis yet."""
        groups = q.shape[2]
        if log_decay is not None and log_decay.ndim == 3:
            log_decay = log_decay[..., None]

        def by_group(x: Tensor) -> Tensor:
            return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)

        decay = None if log_decay is None else by_group(log_decay)
        return cls(by_group(q), by_group(k), by_group(v), decay)

    def in_chunks(self, n_chunks: int, chunk: int) -> _Tokens:
        """Pad with tokens that write nothing and keep the state, and cut into equal chunks."""
        padding = n_chunks * chunk - self.q.shape[-2]

        def cut(x: Tensor) -> Tensor:
            padded = F.pad(x, (0, 0, 0, padding)) if padding else x
            return padded.unflatten(-2, (n_chunks, chunk)).movedim(-3, 1)

        decay = None if self.log_decay is None else cut(self.log_decay)
        return _Tokens(cut(self.q), cut(self.k), cut(self.v), decay)

    @property
    def _per_channel(self) -> bool:
        return self.log_decay is not None and self.log_decay.shape[-1] > 1

    def written(self) -> Tensor:
        """What these tokens leave in the state at their end, from zero. [b n g r f d]"""
        k, v = self.k, self.v
        if self.log_decay is not None:
            decay = sums_to_end(self.log_decay).exp()
            k, v = (k * decay, v) if self._per_channel else (k, v * decay)
        return torch.einsum("...glf,...grld->...grfd", k.squeeze(-3), v)

    def kept(self) -> Tensor | None:
        """The share of the state before them that is left at their end. [b n g r|1 f|1 1]"""
        return None if self.log_decay is None else self.log_decay.sum(-2).exp()[..., None]

    def read(self, state: Tensor) -> Tensor:
        """What the state before these tokens adds to their outputs. [b n g r l d]"""
        decay = None if self.log_decay is None else sums_from_start(self.log_decay).exp()
        q = self.q * decay if self._per_channel else self.q
        y = torch.einsum("...glf,...grfd->...grld", q.squeeze(-3), state)
        return y if decay is None or self._per_channel else y * decay

    def advance(self, state: Tensor) -> Tensor:
        """The state after these tokens, from the one before them."""
        return _next(state, self.kept(), self.written())

    def states_between(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The state before each chunk, [b n g r f d], and the one after the last."""
        written = self.written().unbind(1)
        decay = self.kept()
        kept = [None] * len(written) if decay is None else list(decay.unbind(1))
        starts = []
        for kept_n, written_n in zip(kept, written, strict=True):
            starts.append(state)
            state = _next(state, kept_n, written_n)
        return torch.stack(starts, dim=1), state

    def states_at(self, positions: list[int], state: Tensor) -> Tensor:
        """States after these tokens only, cutting the run there. [b wanted g r f d]"""
        ends = sorted(set(positions))
        lengths = [end - before for before, end in zip([-1, *ends], ends, strict=False)]
        rest = self.q.shape[-2] - sum(lengths)

        def cut(x: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * len(ends) if x is None else x.split([*lengths, rest], dim=-2)[:-1]

        pieces = zip(*map(cut, (self.q, self.k, self.v, self.log_decay)), strict=True)
        after = {}
        for end, piece in zip(ends, pieces, strict=True):
            after[end] = state = _Tokens(*piece).advance(state)
        if not positions:
            return state.unsqueeze(1)[:, :0]
        return torch.stack([after[t] for t in positions], dim=1)

    def all_states(self, starts: Tensor) -> Tensor:
        """The state after every token, stepping through all chunks at once. [b n*l g r f d]"""
        decay = None if self.log_decay is None else self.log_decay.exp()[..., None]
        decays = [None] * self.q.shape[-2] if decay is None else decay.unbind(-3)
        state, states = starts, []
        for k_t, v_t, decay_t in zip(self.k.unbind(-2), self.v.unbind(-2), decays, strict=True):
            state = _next(state, decay_t, k_t[..., :, None] * v_t[..., None, :])
            states.append(state)
        return torch.stack(states, dim=2).flatten(1, 2)


def _next(state: Tensor, kept: Tensor | None, written: Tensor) -> Tensor:
    return state + written if kept is None else torch.addcmul(written, state, kept)

"""One layer's recurrence as a loop over its cached inputs, editable at every place: an oracle.

    h[t] = decay[t] * h[t-1] - erased[t] + write[t];   y[t] = read(h[t])

It sees only cached activations and the names of their axes, none of the library's scans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hooked_ssm import HookedModel

LETTERS = {"batch": "b", "pos": "p", "head": "h", "d_head": "d", "d_key": "f", "d_inner": "e"}
LETTERS |= {"d_state": "n", "feature": "F", "d_head_and_one": "D"}


@dataclass
class Edits:
    """What is added where, by position: to writes, carries (propagating) and states (one read)."""

    write: dict[int, Tensor] = field(default_factory=dict)
    carry: dict[int, Tensor] = field(default_factory=dict)
    state: dict[int, Tensor] = field(default_factory=dict)
    decay_factor: dict[int, float] = field(default_factory=dict)


class Naive:
    """The recurrence of layer 0, from a cache of everything."""

    def __init__(self, model: HookedModel, cache: dict[str, Tensor]):
        self.mixer = model.blocks[0].mixer
        self.cache = {
            name.removeprefix("blocks.0.mixer."): value
            for name, value in cache.items()
            if name.startswith("blocks.0.mixer.")
        }
        self.axes = {role: s.axes for s in self.mixer.specs.values() for role in s.roles}

    def role(self, role: str) -> Tensor:
        """The cached activation with a role."""
        return self.cache[self.mixer.hook_for(role)]

    def states(self, edits: Edits) -> tuple[Tensor, Tensor]:
        """States as read and as handed on, at every position. [batch, pos, *state] each"""
        write = self.role("write")
        decay = self._decay()
        h = torch.zeros_like(write[:, 0])
        read, carried = [], []
        for t in range(write.shape[1]):
            kept = decay[:, t] * edits.decay_factor.get(t, 1.0) * h
            h = kept - self._erased(kept, t) + write[:, t] + edits.write.get(t, 0)
            h = h + edits.carry.get(t, 0)
            carried.append(h)
            read.append(h + edits.state.get(t, 0))
        return torch.stack(read, 1), torch.stack(carried, 1)

    def mixed(self, edits: Edits | None = None) -> Tensor:
        """What the layer mixes under these edits, shaped as its hook with the role "mixed"."""
        states, _ = self.states(edits or Edits())
        return READ.get(type(self.mixer).__name__, read_by_axes)(self, states)

    def _decay(self) -> Tensor:
        """The decay with an axis of size one wherever it lacks one of the state's."""
        state = self.axes["state"]
        if "decay" not in self.axes:
            return torch.ones([1, self.role("write").shape[1], *[1] * (len(state) - 2)])
        decay, missing = self.role("decay"), [a not in self.axes["decay"] for a in state]
        for i, lacks in enumerate(missing):
            decay = decay.unsqueeze(i) if lacks else decay
        return decay

    def _erased(self, kept: Tensor, t: int) -> Tensor | float:
        """What the delta rule takes out before it writes: beta k (k^T S)."""
        if "hook_delta" not in self.cache:
            return 0.0
        k, beta = self.cache["hook_k_normed"][:, t], self.cache["hook_beta"][:, t]
        recalled = torch.einsum("bhf,bhfd->bhd", k, kept)
        return beta[..., None, None] * torch.einsum("bhf,bhd->bhfd", k, recalled)


def read_by_axes(naive: Naive, states: Tensor) -> Tensor:
    """query . state over the axes that the mixed values lack."""
    query, state = (naive.axes[role] for role in ("query", "state"))
    out = [a for a in state if a not in query or a in naive.axes["mixed"]]
    letters = ["".join(LETTERS[a] for a in axes) for axes in (query, state, out)]
    return torch.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", naive.role("query"), states)


def read_scaled(naive: Naive, states: Tensor) -> Tensor:
    """Reads of linear attention and its relatives are divided by sqrt(d_key)."""
    heads = states.shape[2]
    q = naive.role("query") / naive.role("query").shape[-1] ** 0.5
    states = states.repeat_interleave(q.shape[2] // heads, dim=2)
    return torch.einsum("bphf,bphfd->bphd", q, states)


def read_normalised(naive: Naive, states: Tensor) -> Tensor:
    """Based divides by its last value column."""
    y = read_by_axes(naive, states)
    return y[..., :-1] / (y[..., -1:] + naive.mixer.options.eps)


def read_grouped(naive: Naive, states: Tensor) -> Tensor:
    """Mamba-2's heads share C by group."""
    C = naive.role("query")
    C = C.repeat_interleave(states.shape[2] // C.shape[2], dim=2)
    return torch.einsum("bphn,bphdn->bphd", C, states)


def read_real_part(naive: Naive, states: Tensor) -> Tensor:
    """H3 reads twice the real part of its modes, and the skip past them."""
    ssm = naive.mixer.ssm
    outer = torch.einsum("bphi,bphj->bphij", naive.role("key"), naive.role("value"))
    mixed = 2 * torch.einsum("bphijn,hn->bphij", states, ssm.discrete().C).real
    mixed = mixed + ssm.D.view(-1, 1, 1) * outer
    return torch.einsum("bphi,bphij->bphj", naive.role("query"), mixed)


READ: dict[str, Callable[[Naive, Tensor], Tensor]] = {
    "Based": read_normalised,
    "Mamba2": read_grouped,
    "DeltaNet": read_scaled,
    "GatedDeltaNet": read_scaled,
    "GLA": read_scaled,
    "H3": read_real_part,
}

"""The diagonal SSM in chunks of real matrix products; README.md derives it.

Torch code, for any device. Axes: h channel, w all that shares its parameters (batch times the inner
axes), n chunk, c position in the chunk, m mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm.ops.causal import causal_product
from hooked_ssm.ops.diagonal_ssm.kernels import as_complex, as_reals, powers, read_weights
from hooked_ssm.ops.long_conv import toeplitz
from hooked_ssm.ops.output import ScanOutput, StatesWanted, wanted_positions

CHUNK = 64
"""Most positions per chunk: larger ones cost more arithmetic, smaller ones more steps."""


def diagonal_ssm_cpu(
    u: Tensor,
    dA: Tensor,
    dB: Tensor,
    C: Tensor,
    initial_state: Tensor,
    return_states: StatesWanted,
) -> ScanOutput:
    """Outputs, states and final state; see reference.diagonal_ssm_reference."""
    batch, length, channels, *inner = u.shape
    size = -(-length // -(-length // CHUNK))
    flat = u.reshape(batch, length, channels, -1).permute(2, 0, 3, 1).flatten(1, 2)
    state = initial_state.reshape(batch, channels, flat.shape[1] // batch, -1)
    run = _Run.of(flat, state.transpose(0, 1).flatten(1, 2), dA, dB, size)

    def outer(x: Tensor) -> Tensor:
        """[h, w, pos, ...] -> [batch, pos, channel, *inner, ...]"""
        x = x.unflatten(1, (batch, -1)).permute(1, 3, 0, 2, *range(4, x.ndim + 1))
        return x.reshape(*x.shape[:3], *inner, *x.shape[4:])

    states = None
    if return_states is not False:
        positions = wanted_positions(return_states, length)
        # a few gather the inputs before them in their chunk; for many, or where that would take
        # more memory than every state, every state is made and the wanted ones are picked
        few = len(positions) * max(size / (2 * dA.shape[-1]), 2) <= length
        if few:
            states = outer(run.states_at(positions))
        else:
            every = run.every_state(batch)[:, :length]
            every = every if positions == list(range(length)) else every[:, positions]
            states = every.unflatten(3, inner) if inner else every.squeeze(3)
    y = run.outputs(dB, C).flatten(2)[..., :length]
    # the last chunk may be padded, and padding would go on decaying the state
    final = outer(run.states_at([length - 1])).squeeze(1)
    return ScanOutput(outer(y), states, final)


@dataclass(frozen=True)
class _Run:
    """A sequence in chunks, padded with zeros at its end.

    Attributes:
        u: Inputs. [h, w, n, c]
        starts: The state before each chunk. [h, w, n, m]
        powers: dA^0 .. dA^c. [h, c + 1, m]
        writes: dA^(c-1-s) dB, what input s of a chunk leaves at its end, as reals. [h, c, 2 m]
    """

    u: Tensor
    starts: Tensor
    powers: Tensor
    writes: Tensor

    @classmethod
    def of(cls, u: Tensor, state: Tensor, dA: Tensor, dB: Tensor, size: int) -> _Run:
        """From [h, w, pos] and the state before it [h, w, m]."""
        u = F.pad(u, (0, -u.shape[-1] % size)).unflatten(-1, (-1, size))
        decays = powers(dA, size + 1)
        writes = as_reals((decays[:, :size] * dB.unsqueeze(1)).flip(1))
        ends = as_complex((u[:, :, :-1].flatten(1, 2) @ writes).unflatten(1, (u.shape[1], -1)))
        whole = decays[:, -1].unsqueeze(1)
        starts = [state]
        for end in ends.unbind(2):
            state = torch.addcmul(end, whole, state)
            starts.append(state)
        return cls(u, torch.stack(starts, dim=2), decays, writes)

    def outputs(self, dB: Tensor, C: Tensor) -> Tensor:
        """Each chunk convolved, plus what it reads of the state before it. [h, w, n, c]"""
        size = self.u.shape[-1]
        reads = read_weights(self.powers * C.unsqueeze(1))  # [h, c + 1, 2 m]
        filter = (reads[:, :size] @ as_reals(dB).unsqueeze(-1)).squeeze(-1)
        own = causal_product(toeplitz(filter, size), self.u.flatten(1, 2).mT).mT
        before = as_reals(self.starts).flatten(1, 2) @ reads[:, 1:].mT
        return (own + before).view_as(self.u)

    def states_at(self, positions: list[int]) -> Tensor:
        """The states after a few positions, each from the chunk it lies in. [h, w, wanted, m]"""
        size = self.u.shape[-1]
        t = torch.tensor(positions, dtype=torch.long, device=self.u.device)
        chunk, row = t // size, t % size
        sources = row.unsqueeze(-1) + torch.arange(1 - size, 1, device=t.device)  # the last: t
        inputs = self.u[:, :, chunk.unsqueeze(-1), sources.clamp(min=0)] * (sources >= 0)
        own = (inputs.flatten(1, 2) @ self.writes).unflatten(1, (self.u.shape[1], -1))
        kept = self.powers[:, row + 1].unsqueeze(1) * self.starts[:, :, chunk]
        return as_complex(own) + kept

    def every_state(self, batch: int) -> Tensor:
        """The state after every position, padded ones included, one step in all chunks at once.

        Returns:
            [batch, pos, h, inner, m], inner axes in one
        """
        dA, dB = (x.unsqueeze(1) for x in (self.powers[:, 1], as_complex(self.writes[:, -1])))
        u = self.u.unflatten(1, (batch, -1)).permute(1, 3, 4, 0, 2).unsqueeze(-1)
        x = self.starts.unflatten(1, (batch, -1)).permute(1, 3, 0, 2, 4).contiguous()
        states = []
        for u_t in u.contiguous().unbind(2):
            x = torch.addcmul(u_t * dB, dA, x)
            states.append(x)
        return torch.stack(states, dim=2).flatten(1, 2)

"""What the Triton paths share: starting a kernel, sizes of tiles, where wanted states go.

No triton is imported here, so that the sizes can be read without it.

All kernels number their programs along one axis (the others end at 65,535) and compute offsets in
64 bits, starting from that number. Every tensor they are given is contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hooked_ssm.ops.output import StatesWanted, wanted_positions

CHUNK = 32
"""Tokens between two kept states; the backward pass runs the tokens between them again."""


def launch(kernel: Any, programs: int, *args: Any, num_warps: int, **constants: Any) -> None:
    """Run so many programs of a kernel; the first argument is a tensor and fixes the device."""
    with torch.cuda.device_of(args[0]):
        kernel[(programs,)](*args, num_warps=num_warps, **constants)


def power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least `size`: what a side of a tile has to be."""
    return 1 << (size - 1).bit_length()


def warps_for(elements: int, per_thread: int) -> int:
    """Warps of 32 threads that hold so many elements each, 1 to 8 of them."""
    return min(max(elements // (32 * per_thread), 1), 8)


class Slots:
    """Where the kernel puts the state after each position.

    A position asked for twice is stored once, in its place among the sorted positions.

    Attributes:
        count: States stored.
        of_position: The slot of each position, -1 where none is wanted; None if none is at all.
            int64 [pos]
    """

    def __init__(self, return_states: StatesWanted, length: int, device: torch.device):
        self._wanted = wanted_positions(return_states, length)
        self._given = return_states is not False
        self._order = sorted(set(self._wanted))
        self.count = len(self._order)
        self.of_position: Tensor | None = None
        if self.count:
            slots = torch.full((length,), -1, dtype=torch.int64)
            slots[self._order] = torch.arange(self.count)
            self.of_position = slots.to(device)

    def in_order(self, states: Tensor) -> Tensor | None:
        """The stored states in the order asked for. [batch, wanted, ...]"""
        if not self._given:
            return None
        if self._wanted == self._order:
            return states
        return states[:, [self._order.index(t) for t in self._wanted]]


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """Each tensor in row-major order; None stays None."""
    return [None if t is None else t.contiguous() for t in tensors]

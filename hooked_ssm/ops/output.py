"""What every scan returns, and which of its states were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hooked_ssm.errors import ShapeError

StatesWanted = bool | Sequence[int]


class ScanOutput(NamedTuple):
    """Outputs of a recurrence.

    Attributes:
        y: What is read at each position, in the dtype of the values. [batch, pos, ...]
        states: The state *after* the token at each wanted position, in the order asked for; None
            if none was wanted. float32 (float64 for float64 inputs). [batch, wanted, ...]
        final_state: The state after the last token. [batch, ...]
    """

    y: Tensor
    states: Tensor | None
    final_state: Tensor


def wanted_positions(return_states: StatesWanted, length: int) -> list[int]:
    """Return the positions whose states are wanted, each in 0..length-1 (negative ones count back).

    Raises:
        ShapeError: A position lies outside the sequence.

    Examples:
        >>> wanted_positions([0, -1], length=5)
        [0, 4]
    """
    if isinstance(return_states, bool):
        return list(range(length)) if return_states else []
    positions = [int(t) for t in return_states]
    for t in positions:
        if not -length <= t < length:
            raise ShapeError(
                f"states wanted at position {t}, but the sequence has positions 0..{length - 1}"
            )
    return [t % length for t in positions]


def gather_states(states: list[Tensor], return_states: StatesWanted) -> Tensor | None:
    """Stack the wanted ones of a list of per-position states. [batch, wanted, ...]"""
    if return_states is False:
        return None
    wanted = [states[t] for t in wanted_positions(return_states, len(states))]
    if not wanted:  # an empty list of positions
        return states[0].new_empty(states[0].shape[0], 0, *states[0].shape[1:])
    return torch.stack(wanted, dim=1)


def core_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype the recurrence runs in: float64 if any input is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32

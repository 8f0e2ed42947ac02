"""The first-order recurrence with explicit decays and writes; used where somebody edits those."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_ssm.errors import ShapeError


def linear_scan(
    decay: Float[Tensor, "#batch pos *gate"],
    write: Float[Tensor, "batch pos *state"],
    initial_state: Float[Tensor, "batch *state"] | None = None,
) -> Float[Tensor, "batch pos *state"]:
    """Return all states of a recurrence given what it forgets and what it adds.

    h[t] = decay[t] * h[t-1] + write[t]

    Args:
        decay: Multiplies the carried state; broadcasts against it. [batch|1, pos, ...]
        write: Is added. [batch, pos, *state]
        initial_state: h[-1]; zeros if None. [batch, *state]

    Returns:
        states[:, t] is h after token t. [batch, pos, *state]

    Raises:
        ShapeError: The lengths differ.
    """
    if decay.shape[1] != write.shape[1]:
        raise ShapeError(
            f"decay has {decay.shape[1]} positions, write {write.shape[1]}; they must agree"
        )
    state = initial_state
    states = []
    for a, b in zip(decay.unbind(1), write.unbind(1), strict=True):
        state = b if state is None else a * state + b
        states.append(state)
    return torch.stack(states, dim=1)

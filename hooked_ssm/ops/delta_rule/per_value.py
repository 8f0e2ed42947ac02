"""A beta per value channel: each channel is then a delta rule, so a head, of its own.

Its triangular system differs from its neighbours', so the work and memory are d_head times
those of one beta per head: as much as all the states.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from torch import Tensor

_PER_HEAD = ("k", "log_decay")
"""Arguments without a value axis; in all others it is the last one."""


def one_head_per_value(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let an op written for one beta per head take one per value channel as well.

    The op takes its arguments by position, and returns [batch, pos, head, .., d_head].
    """
    names = list(inspect.signature(op).parameters)

    @functools.wraps(op)
    def run(*args: Tensor | None) -> Tensor:
        arguments = dict(zip(names, args, strict=True))
        d_head = arguments["beta"].shape[-1]
        if d_head == 1:
            return op(*args)
        folded = [_fold(name, value, d_head) for name, value in arguments.items()]
        return _unfold(op(*folded), d_head)

    return run


def _fold(name: str, value: Tensor | None, d_head: int) -> Tensor | None:
    if value is None:
        return None
    if name in _PER_HEAD:
        return value.repeat_interleave(d_head, dim=2)
    head = 1 if name == "initial_state" else 2
    return value.movedim(-1, head + 1).flatten(head, head + 1).unsqueeze(-1)


def _unfold(result: Tensor, d_head: int) -> Tensor:
    return result.squeeze(-1).unflatten(2, (-1, d_head)).movedim(3, -1)

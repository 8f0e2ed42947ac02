"""Vectorised draws that tasks share: uniform numbers, distinct numbers, tokens not yet present."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.errors import TaskError
from hooked_ssm.shapes import PerDocument, Tokens


def absent_tokens(tokens: Tokens, kind: range, generator: torch.Generator) -> PerDocument:
    """Draw for each row a token of `kind` that does not stand in it, uniformly.

    A rank among the absent tokens is drawn, then moved past every present token at or below it;
    so one draw is enough whatever the document holds.

    Raises:
        TaskError: A row holds every token of the kind.
    """
    inside = (tokens >= kind.start) & (tokens < kind.stop)
    present = torch.where(inside, tokens - kind.start, len(kind)).sort(dim=1).values
    first = torch.ones_like(present, dtype=torch.bool)
    first[:, 1:] = present[:, 1:] != present[:, :-1]
    first &= present < len(kind)
    absent = len(kind) - first.sum(dim=1)
    if bool((absent == 0).any()):
        raise TaskError(
            f"no token is left to put in: {int((absent == 0).sum())} documents hold all "
            f"{len(kind)} tokens of the kind to be corrupted; use a task with a larger vocabulary"
        )
    rank = (uniform((len(tokens),), generator).to(tokens.device) * absent).long()
    for column, counts in zip(present.unbind(1), first.unbind(1), strict=True):
        rank += counts & (column <= rank)
    return rank + kind.start


def uniform(shape: Sequence[int], generator: torch.Generator) -> Float[Tensor, ...]:
    """Draw from [0, 1) in float64, so that scaling by a vocabulary and truncating is fair."""
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)


def draw_distinct(
    n: int, count: int, size: int, generator: torch.Generator
) -> Int[Tensor, "row drawn"]:
    """Draw n rows of `count` distinct numbers of 0..size-1, each order equally likely.

    Floyd's method, one step for all rows at once: step i draws from 0..size-count+i, and a number
    already taken is replaced by the largest. It costs n * count**2 and never builds [n, size].
    Where almost all numbers are wanted anyway, the rows are sorted instead.

    Source: Bentley & Floyd 1987, "A sample of brilliance".
    """
    if size <= 4 * count:
        return uniform((n, size), generator).argsort(dim=1)[:, :count]
    taken = torch.full((n, count), -1, device=generator.device)
    for i in range(count):
        top = size - count + i
        draw = torch.randint(top + 1, (n, 1), generator=generator, device=generator.device)
        taken[:, i : i + 1] = draw.where(~(taken == draw).any(dim=1, keepdim=True), top)
    # Floyd's sets are uniform, but their order is not
    return taken.gather(1, uniform((n, count), generator).argsort(dim=1))

"""Training streams: an endless supply of batches that resumes exactly.

Every draw has a seed of its own, made from the stream's seed and a counter, so a stream's state is
a few integers that JSON can hold, and batch 1000 is the same whether or not training was resumed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hooked_ssm.checks import Count, checked_as
from hooked_ssm.errors import TaskError
from hooked_ssm.rules import is_integer, shown
from hooked_ssm.shapes import PerDocument
from hooked_ssm.tasks.base import IGNORE_INDEX, PAD, Split, Task, TaskBatch
from hooked_ssm.tasks.holdout import stir

_CHUNK = 4096  # documents drawn at once: bounds the padding held in memory


class TaskStream(Protocol):
    """What the trainer needs of a source of batches."""

    def next(self, batch_size: int) -> TaskBatch: ...

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Stream:
    """Endless fresh documents of a task.

    Args:
        task: The task to draw from.
        seed: Two streams of one seed and one sequence of batch sizes are equal.
        split: The split to draw from.
    """

    @checked_as(TaskError)
    def __init__(self, task: Task, seed: int, split: Split = "train") -> None:
        self.task, self.seed, self.split = task, seed, split
        self._batches = 0

    @checked_as(TaskError)
    def next(self, batch_size: Count) -> TaskBatch:
        """Draw the next batch."""
        generator = _generator(self.seed, self._batches)
        batch = self.task.sample(batch_size, self.split, generator=generator)
        self._batches += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return what `load_state_dict` needs to go on from here."""
        return {"seed": self.seed, "batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the stream with this state stood.

        Raises:
            TaskError: The state is damaged, or belongs to a stream with other settings.
        """
        _check_state(state, {"seed": self.seed}, {"batches": sys.maxsize})
        self._batches = int(state["batches"])


class FixedSet:
    """A fixed set of documents, passed over again and again in a new order each time.

    The paper trains on 100,032 documents seen 16 or 32 times. A batch that crosses the end of a
    pass takes the rest from the next one, so batches are always full.

    Args:
        task: The task to draw the documents from, once.
        size: Number of documents.
        seed: Decides the documents and their orders.
        split: The split to draw from.

    Raises:
        TaskError: size < 1.
    """

    @checked_as(TaskError)
    def __init__(self, task: Task, size: Count, seed: int, split: Split = "train") -> None:
        self.task, self.size, self.seed, self.split = task, size, seed, split
        generator = _generator(seed, 0)
        self._documents = _Packed(
            [
                task.sample(min(_CHUNK, size - start), split, generator=generator)
                for start in range(0, size, _CHUNK)
            ]
        )
        self._pass, self._used = 0, 0
        self._order = self._draw_order()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Tensor) -> TaskBatch:
        """Return the documents with these numbers, padded to the longest among them."""
        return self._documents.gather(index)

    @checked_as(TaskError)
    def next(self, batch_size: Count) -> TaskBatch:
        """Return the next documents of this pass, and of the following ones if it ends."""
        taken = []
        while batch_size > 0:
            if self._used == self.size:
                self._pass, self._used = self._pass + 1, 0
                self._order = self._draw_order()
            part = self._order[self._used : self._used + batch_size]
            self._used += len(part)
            batch_size -= len(part)
            taken.append(part)
        return self[torch.cat(taken)]

    def state_dict(self) -> dict[str, int]:
        """Return what `load_state_dict` needs to go on from here."""
        return {"seed": self.seed, "size": self.size, "pass": self._pass, "used": self._used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the set with this state stood.

        Raises:
            TaskError: The state is damaged, or belongs to a set with other settings.
        """
        counters = {"pass": sys.maxsize, "used": self.size}
        _check_state(state, {"seed": self.seed, "size": self.size}, counters)
        self._pass, self._used = int(state["pass"]), int(state["used"])
        self._order = self._draw_order()

    def _draw_order(self) -> Tensor:
        return torch.randperm(self.size, generator=_generator(self.seed, 1 + self._pass))


class _Packed:
    """Documents without their padding: one long row of tokens and where each document starts."""

    def __init__(self, batches: list[TaskBatch]) -> None:
        masks = [batch.mask for batch in batches]
        pairs = list(zip(batches, masks, strict=True))
        self._tokens = torch.cat([batch.tokens[mask].int() for batch, mask in pairs])
        self._labels = torch.cat([batch.labels[mask].int() for batch, mask in pairs])
        self._answer = torch.cat([batch.answer for batch in batches])
        self._lengths = torch.cat([batch.lengths for batch in batches])
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._positions = {
            name: torch.cat([batch.positions[name] for batch in batches])
            for name in batches[0].positions
        }

    def gather(self, index: PerDocument) -> TaskBatch:
        lengths = self._lengths[index]
        pos = torch.arange(int(lengths.max()) if len(lengths) else 0)
        real = pos < lengths[:, None]
        where = (self._starts[index, None] + pos).where(real, 0)
        return TaskBatch(
            tokens=self._tokens[where].long().masked_fill_(~real, PAD),
            labels=self._labels[where].long().masked_fill_(~real, IGNORE_INDEX),
            answer=self._answer[index],
            positions={name: pos[index] for name, pos in self._positions.items()},
            lengths=lengths,
        )


def _generator(seed: int, counter: int) -> torch.Generator:
    """Return the generator of one draw. Its seeds differ for every counter of a stream."""
    start = stir(stir(seed & 0xFFFFFFFF) ^ 0x5EED)
    return torch.Generator().manual_seed((start + counter) & 0xFFFFFFFF)


def _check_state(state: Any, settings: Mapping[str, int], counters: Mapping[str, int]) -> None:
    """Hold a state to the stream's settings, and its counters to 0 and their largest values."""
    if not isinstance(state, Mapping):
        raise TaskError(f"a stream's state is a mapping, as of state_dict; got {shown(state)}")
    for name in [*settings, *counters]:
        if name not in state:
            raise TaskError(f"the stream's state lacks {name!r}; it has {sorted(state)}")
        if not is_integer(state[name]):
            raise TaskError(f"the stream's state has {name}={state[name]!r}; allowed: an integer")
        if name in counters and not 0 <= int(state[name]) <= counters[name]:
            raise TaskError(
                f"the stream's state has {name}={state[name]}; allowed: 0..{counters[name]}. It is "
                "damaged: go on from another checkpoint"
            )
    for name, value in settings.items():
        if int(state[name]) != value:
            raise TaskError(
                f"this state is of a stream with {name}={state[name]}, but this one has "
                f"{name}={value}; build the stream with the settings it was saved with"
            )

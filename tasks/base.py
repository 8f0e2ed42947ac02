"""The contract of every task: documents, what is asked in them, and where the named tokens stand.

A task draws documents with an explicit generator and says of each where the query stands, what the
answer is, and at which positions the tokens stand that an analysis wants to corrupt or restore.
Analyses use only this contract, so one mechanistic evaluation runs on every task.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_ssm.checks import Count, check_fields, checked_as
from hooked_ssm.errors import TaskError, unknown
from hooked_ssm.rules import is_integer, shown
from hooked_ssm.shapes import Mask, PerDocument, Tokens
from hooked_ssm.tasks.draws import absent_tokens

IGNORE_INDEX = -100
"""The label of positions that are not trained on."""
PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")

Split = Literal["train", "dev", "test"]


@dataclass(frozen=True)
class TaskBatch:
    """Documents of a task, right padded with `<pad>`.

    Attributes:
        tokens: The documents. [batch, pos]
        labels: labels[i, t] is the token to predict *at* t, that is tokens[i, t + 1]; IGNORE_INDEX
            where the answer-only loss does not train. `all_labels` has the other loss. [batch, pos]
        answer: The token to predict at positions["query_item"]. [batch]
        positions: Named positions; every name is present for every document. name -> [batch]
        lengths: Tokens of each document, padding left out. [batch]
    """

    tokens: Tokens
    labels: Tokens
    answer: PerDocument
    positions: dict[str, PerDocument]
    lengths: PerDocument

    def __post_init__(self) -> None:
        check_fields(self, TaskError, prefix="a batch's ")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, index: slice | Tensor | Sequence[int]) -> TaskBatch:
        """Return the documents at a slice, an index tensor or list, or a boolean mask.

        Raises:
            TaskError: A single integer, which would drop the batch axis; a number beyond the
                documents, or no index at all.
        """
        if is_integer(index) or isinstance(index, bool):
            raise TaskError(f"batch[{index}] would drop the batch axis; use batch[{index}:][:1]")
        try:
            return self._map(lambda tensor: tensor[index])
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise TaskError(
                f"batch[{shown(index)}]: {error}; allowed: a slice, a boolean mask, or numbers in "
                f"-{len(self)}..{len(self) - 1}, as the batch has {len(self)} documents"
            ) from error

    def to(self, device: torch.device | str) -> TaskBatch:
        """Return the batch with every tensor on `device`.

        Raises:
            TaskError: torch has no such device.
        """
        try:
            return self._map(lambda tensor: tensor.to(device))
        except (RuntimeError, TypeError, AssertionError) as error:
            raise TaskError(f"the batch cannot go to device {device!r}: {error}") from error

    def trim(self) -> TaskBatch:
        """Return the batch without the columns that are padding in every document."""
        longest = int(self.lengths.max()) if len(self) else 0
        return dataclasses.replace(
            self, tokens=self.tokens[:, :longest], labels=self.labels[:, :longest]
        )

    @property
    def mask(self) -> Mask:
        """True at real tokens, False at padding. [batch, pos]"""
        pos = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return pos < self.lengths[:, None]

    def all_labels(self) -> Tokens:
        """Return the labels of the all-token loss: the next token wherever there is one."""
        labels = torch.full_like(self.tokens, IGNORE_INDEX)
        labels[:, :-1] = self.tokens[:, 1:].where(self.mask[:, 1:], IGNORE_INDEX)
        return labels

    def _map(self, change: Callable[[Tensor], Tensor]) -> TaskBatch:
        return TaskBatch(
            tokens=change(self.tokens),
            labels=change(self.labels),
            answer=change(self.answer),
            positions={name: change(pos) for name, pos in self.positions.items()},
            lengths=change(self.lengths),
        )


@dataclass(frozen=True)
class Task(ABC):
    """A family of documents with a query each. Subclasses are frozen dataclasses of JSON values.

    Attributes:
        name: The task's name in specs; a subclass that sets it is found by `Task.from_json`.
        shared_fields: Fields that decide what is learned: training documents may differ from those
            of an evaluation in other fields, but not in these.
        corruptions: The positions whose token `corrupt` can replace.
        fresh_corruption: True if `corrupt` puts in a token that the document lacks; False, for
            tasks whose documents may hold the whole vocabulary, if it is only another one.
    """

    name: ClassVar[str]
    shared_fields: ClassVar[tuple[str, ...]] = ("holdout", "seed")
    corruptions: ClassVar[tuple[str, ...]] = ("query_item_orig", "target_item_orig")
    fresh_corruption: ClassVar[bool] = True
    _by_name: ClassVar[dict[str, type[Task]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            return
        known = Task._by_name.get(cls.name)
        # a class that is defined anew, as by a cell that runs again, replaces itself
        if known and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TaskError(
                f"{cls.__qualname__}: the task's name {cls.name!r} is taken by {known.__module__}."
                f"{known.__qualname__}; choose another name"
            )
        Task._by_name[cls.name] = cls

    def __post_init__(self) -> None:
        """Check every field against its annotation; subclasses call it before checks of their own.

        Raises:
            TaskError: A field of another type, or a number that is not finite.
        """
        check_fields(self, TaskError, prefix=f"{type(self).__name__}: ")

    @property
    def position_names(self) -> tuple[str, ...]:
        """The keys of every batch's `positions`.

        query_item_orig and target_item_orig stand in the context: what is asked about, and its
        answer. query_item and target_item are the query and the answer at the end; divider is the
        last token before the queries.
        """
        return (
            "bos",
            "query_item_orig",
            "target_item_orig",
            "divider",
            "query_item",
            "target_item",
        )

    @property
    def answer_position(self) -> str:
        """The name of the position where the answer is predicted."""
        return "query_item"

    @property
    @abstractmethod
    def d_vocab(self) -> int:
        """Number of token ids, the special tokens included."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Tokens of the longest document: the n_ctx a model needs."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of guessing uniformly among the candidates that stand in the document."""

    @property
    @abstractmethod
    def blind_chance(self) -> float:
        """Accuracy of guessing uniformly among all tokens that can be an answer."""

    @abstractmethod
    def describe(self) -> str:
        """Return what a document looks like and what is asked, for people."""

    @abstractmethod
    def decode_token(self, token: int) -> str:
        """Return the readable form of one token that is not special."""

    @abstractmethod
    def token_range(self, position_name: str) -> range:
        """Return the token ids of the kind that stands at a corruptible position."""

    @abstractmethod
    def _draw(self, n: int, split: Split, generator: torch.Generator) -> TaskBatch:
        """Draw n documents; `sample` has checked the arguments."""

    @checked_as(TaskError)
    def sample(self, n: Count, split: Split = "train", *, generator: torch.Generator) -> TaskBatch:
        """Draw n documents.

        Without a hold-out every split has the same distribution: pass another generator.

        Raises:
            TaskError: n < 1, unknown split, no generator, or no document meets the settings.
        """
        return self._draw(n, split, generator)

    @checked_as(TaskError)
    def corrupt(
        self, batch: TaskBatch, position_name: str, *, generator: torch.Generator
    ) -> TaskBatch:
        """Replace one token per document by a random one of its kind, as `fresh_corruption` says.

        Labels, answer and positions stay those of the original.

        Raises:
            TaskError: A position that cannot be corrupted, no generator, or no token is left.
        """
        if position_name not in self.corruptions:
            raise TaskError(unknown("position to corrupt", position_name, self.corruptions))
        if position_name not in batch.positions:
            raise TaskError(unknown("position of the batch", position_name, batch.positions))
        pos = batch.positions[position_name].unsqueeze(1)
        avoid = batch.tokens if self.fresh_corruption else batch.tokens.gather(1, pos)
        put_in = absent_tokens(avoid, self.token_range(position_name), generator)
        return dataclasses.replace(batch, tokens=batch.tokens.scatter(1, pos, put_in.unsqueeze(1)))

    @property
    def token_names(self) -> list[str]:
        """The readable form of every token id, in order."""
        return [self._decode(token) for token in range(self.d_vocab)]

    @checked_as(TaskError)
    def decode(self, tokens: Int[Tensor, " pos"] | Sequence[int]) -> list[str]:
        """Return the readable form of each token of one document.

        Raises:
            TaskError: A token outside the vocabulary.
        """
        return [self._decode(int(token)) for token in tokens]

    def _decode(self, token: int) -> str:
        if not 0 <= token < self.d_vocab:
            raise TaskError(f"token {token} is not in the vocabulary 0..{self.d_vocab - 1}")
        return SPECIAL_TOKENS[token] if token < len(SPECIAL_TOKENS) else self.decode_token(token)

    def single_query(self) -> Task:
        """Return the task to evaluate on: the same vocabulary, without aids for training."""
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the spec: the task's name and every field, as JSON values.

        Raises:
            TaskError: The name is another class's, inherited, so the spec would build that one.
        """
        owner = Task._by_name.get(getattr(self, "name", ""))
        if owner is not type(self):
            raise TaskError(
                f"{type(self).__qualname__} has no name of its own, so no spec could name it; add "
                'name: ClassVar[str] = "..." to the class'
            )
        return {"task": self.name, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(spec: dict[str, Any]) -> Task:
        """Build the task of a spec made by `to_json`.

        Raises:
            TaskError: Unknown task name, or fields the task does not have.
        """
        if not isinstance(spec, Mapping):
            raise TaskError(f"a task's spec is a mapping, as of to_json; got {spec!r}")
        kind = Task._by_name.get(str(spec.get("task")))
        if kind is None:
            raise TaskError(
                f"{unknown('task', spec.get('task'), Task._by_name)}. One of your own is known "
                "once the module that has it is imported (--import on the command line)"
            )
        return kind._from_fields({key: value for key, value in spec.items() if key != "task"})

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> Task:
        allowed = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in allowed:
                raise TaskError(unknown(f"{cls.name} field", name, allowed))
        return cls(**values)

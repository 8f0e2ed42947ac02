"""Induction: random tokens, then the same ones again; what came after this token last time?

    <bos> x1 x2 ... xP (gap of other tokens) x1 x2 ... xP

The behavioural test of induction heads. Source: Elhage et al. 2021, "A mathematical framework for
transformer circuits"; Olsson et al. 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks.base import (
    BOS,
    IGNORE_INDEX,
    SPECIAL_TOKENS,
    Split,
    Task,
    TaskBatch,
)
from hooked_ssm.tasks.draws import draw_distinct


@dataclass(frozen=True)
class InductionSequences(Task):
    """Copies of one random sequence, with the loss on what the earlier copy determines.

    All tokens of a copy and of the gaps are distinct, so each answer follows from the context. The
    named query is a token of the last copy, drawn uniformly among those with a successor;
    query_item_orig and target_item_orig are that token and its successor in the first copy, and
    divider is the token before the last copy. Corrupting one token leaves the other copies alone.

    Args:
        num_tokens: Tokens to draw from, besides <pad>, <bos> and <eos>.
        period: Tokens of a copy.
        gap: Other tokens between one copy and the next.
        num_copies: Copies of the sequence.
        bos: Whether documents start with <bos>.

    Raises:
        TaskError: A value out of range, or too few tokens for a document of distinct ones.
    """

    name: ClassVar[str] = "induction_sequences"

    num_tokens: int = 64
    period: int = 16
    gap: int = 0
    num_copies: int = 2
    bos: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 2 or self.num_copies < 2 or self.gap < 0:
            raise TaskError(
                f"period and num_copies must be >= 2 and gap >= 0; got {self.period}, "
                f"{self.num_copies} and {self.gap}"
            )
        if self.num_tokens < self.num_distinct:
            raise TaskError(
                f"a document has {self.num_distinct} distinct tokens (period={self.period}, gap="
                f"{self.gap}, num_copies={self.num_copies}), but num_tokens={self.num_tokens}"
            )

    @property
    def num_distinct(self) -> int:
        """Distinct tokens of a document."""
        return self.period + self.gap * (self.num_copies - 1)

    @property
    def position_names(self) -> tuple[str, ...]:
        names = super().position_names
        return names if self.bos else tuple(name for name in names if name != "bos")

    @property
    def d_vocab(self) -> int:
        return len(SPECIAL_TOKENS) + self.num_tokens

    @property
    def max_length(self) -> int:
        """Every document's length."""
        return self.bos + self.num_copies * self.period + (self.num_copies - 1) * self.gap

    @property
    def chance(self) -> float:
        return 1 / self.num_distinct

    @property
    def blind_chance(self) -> float:
        return 1 / self.num_tokens

    def describe(self) -> str:
        return (
            f"Induction: {self.period} random distinct tokens of {self.num_tokens}, repeated to "
            f"{self.num_copies} copies {self.gap} other tokens apart; the answer at each token of "
            f"a later copy is the one that came next before. Chance {self.chance:.3g} among the "
            "tokens in the document."
        )

    def decode_token(self, token: int) -> str:
        return f"x{token - len(SPECIAL_TOKENS)}"

    def token_range(self, position_name: str) -> range:
        return range(len(SPECIAL_TOKENS), self.d_vocab)

    def _draw(self, n: int, split: Split, generator: torch.Generator) -> TaskBatch:
        drawn = draw_distinct(n, self.num_distinct, self.num_tokens, generator)
        drawn += len(SPECIAL_TOKENS)
        copy, gaps = drawn[:, : self.period], drawn[:, self.period :]
        parts = [torch.full_like(copy[:, :1], BOS)] if self.bos else []
        for gap in gaps.reshape(n, self.num_copies - 1, self.gap).unbind(1):
            parts += [copy, gap]
        tokens = torch.cat([*parts, copy], dim=1)

        labels = torch.full_like(tokens, IGNORE_INDEX)
        stride = self.period + self.gap
        for start in range(self.bos + stride, tokens.shape[1], stride):
            labels[:, start : start + self.period - 1] = copy[:, 1:]
        offset = torch.randint(self.period - 1, (n,), generator=generator, device=generator.device)
        last = self.max_length - self.period
        positions = {
            "bos": torch.zeros_like(offset),
            "query_item_orig": self.bos + offset,
            "target_item_orig": self.bos + offset + 1,
            "divider": torch.full_like(offset, last - 1),
            "query_item": last + offset,
            "target_item": last + offset + 1,
        }
        return TaskBatch(
            tokens=tokens,
            labels=labels,
            answer=copy.gather(1, offset[:, None] + 1).squeeze(1),
            positions={name: positions[name] for name in self.position_names},
            lengths=torch.full_like(offset, tokens.shape[1]),
        )

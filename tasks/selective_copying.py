"""Selective copying: remember the items scattered among noise, and give them back in order.

    <bos> ~ ~ x1 ~ x2 ~ ~ ~ x3 ~ <eos> x1 x2 x3 <eos>

`~` is the noise token. Source: Gu & Dao 2023 (Mamba), section 3.1; Arjovsky et al. 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks.base import (
    BOS,
    EOS,
    IGNORE_INDEX,
    SPECIAL_TOKENS,
    Split,
    Task,
    TaskBatch,
)
from hooked_ssm.tasks.draws import draw_distinct, uniform

_NOISE = len(SPECIAL_TOKENS)


@dataclass(frozen=True)
class SelectiveCopying(Task):
    """Copying of `num_items` items out of a stretch of noise, with the loss on each.

    The named query is one of the items behind the divider but the last, drawn uniformly: the answer
    is the item that comes next in the context. Items are drawn independently and may recur, so the
    order counts, not the query token alone.

    Args:
        num_tokens: Different items.
        num_items: Items per document.
        context_length: Tokens between <bos> and the divider, items and noise together.

    Raises:
        TaskError: A value out of range, or more items than places.
    """

    name: ClassVar[str] = "selective_copying"
    fresh_corruption: ClassVar[bool] = False

    num_tokens: int = 16
    num_items: int = 8
    context_length: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_tokens < 2 or not 2 <= self.num_items <= self.context_length:
            raise TaskError(
                "num_tokens must be >= 2 and 2 <= num_items <= context_length; got "
                f"{self.num_tokens}, {self.num_items} and {self.context_length}"
            )

    @property
    def items(self) -> range:
        """Token ids of the items."""
        return range(_NOISE + 1, _NOISE + 1 + self.num_tokens)

    @property
    def d_vocab(self) -> int:
        return self.items.stop

    @property
    def max_length(self) -> int:
        """Every document's length: the context, the items again, <bos>, the divider and <eos>."""
        return self.context_length + self.num_items + 3

    @property
    def chance(self) -> float:
        """The item itself may be drawn, or another place with an equal one."""
        return 1 / self.num_items + (1 - 1 / self.num_items) / self.num_tokens

    @property
    def blind_chance(self) -> float:
        return 1 / self.num_tokens

    def describe(self) -> str:
        return (
            f"Selective copying: {self.num_items} items of {self.num_tokens} among noise in "
            f"{self.context_length} places, then the items again in order. Chance "
            f"{self.chance:.3g} among the items in the document."
        )

    def decode_token(self, token: int) -> str:
        return "~" if token == _NOISE else f"x{token - self.items.start}"

    def token_range(self, position_name: str) -> range:
        return self.items

    def _draw(self, n: int, split: Split, generator: torch.Generator) -> TaskBatch:
        items = (uniform((n, self.num_items), generator) * self.num_tokens).long()
        items += self.items.start
        places = draw_distinct(n, self.num_items, self.context_length, generator).sort(1).values
        context = torch.full((n, self.context_length), _NOISE, device=generator.device)
        context.scatter_(1, places, items)
        bos = torch.full_like(items[:, :1], BOS)
        eos = torch.full_like(bos, EOS)
        tokens = torch.cat([bos, context, eos, items, eos], dim=1)

        divider = 1 + self.context_length
        labels = torch.full_like(tokens, IGNORE_INDEX)
        labels[:, divider : divider + self.num_items] = items
        asked = torch.randint(
            self.num_items - 1, (n, 1), generator=generator, device=generator.device
        )
        query_item = divider + 1 + asked.squeeze(1)
        return TaskBatch(
            tokens=tokens,
            labels=labels,
            answer=items.gather(1, asked + 1).squeeze(1),
            positions={
                "bos": torch.zeros_like(query_item),
                "query_item_orig": 1 + places.gather(1, asked).squeeze(1),
                "target_item_orig": 1 + places.gather(1, asked + 1).squeeze(1),
                "divider": torch.full_like(query_item, divider),
                "query_item": query_item,
                "target_item": query_item + 1,
            },
            lengths=torch.full_like(query_item, tokens.shape[1]),
        )

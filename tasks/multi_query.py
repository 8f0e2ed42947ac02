"""Multi-query associative recall (MQAR): every pair is asked, at gaps that follow a power law.

    <bos> k v k v ... k v <eos> f f k v f f f f k v ... <eos>

Token ids: <pad> 0, <bos> 1, <eos> 2, then num_kv/2 keys, num_kv/2 values, then the fillers `f`,
which are neither: so every answer follows from the context. Source: Arora, Eyuboglu et al.,
arXiv 2312.04927, and HazyResearch/zoology.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class MultiQueryAssociativeRecall(Task):
    """Recall of every pair of a document, with the loss on each answer.

    The part behind the divider has slots of two tokens. Each pair is asked in one of them: slot g
    (1 is the first) with weight g**(power_a - 1), without replacement; the key is followed by its
    value, and the other slots hold fillers. Zoology's own documents have neither <bos> nor divider,
    and a filler behind the key instead of its value, which a causal model sees too late to matter.

    The named query of a document, for analyses, is one of its queries drawn uniformly; its
    positions in context are those of the first pass.

    Args:
        num_kv: Keys plus values in the vocabulary; even.
        num_pairs: Pairs per document; keys, and values, are drawn without replacement.
        input_seq_len: Tokens of pairs and slots together, as in Zoology; even.
        power_a: Exponent: near 0 most queries stand close behind the pairs, 1 is uniform.
        num_passes: Times the pairs are shown, in the same order.
        num_fillers: Filler tokens in the vocabulary; 1 for a constant filler.

    Raises:
        TaskError: A value out of range, or too many pairs for the length or the vocabulary.
    """

    name: ClassVar[str] = "multi_query_associative_recall"

    num_kv: int = 64
    num_pairs: int = 8
    input_seq_len: int = 64
    power_a: float = 0.01
    num_passes: int = 1
    num_fillers: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv < 2 or self.num_kv % 2:
            raise TaskError(
                f"num_kv must be even and >= 2 (half keys, half values), got {self.num_kv}"
            )
        if not 1 <= self.num_pairs <= self.num_kv // 2:
            raise TaskError(
                f"num_pairs={self.num_pairs} needs that many distinct keys and values, but num_kv="
                f"{self.num_kv} gives {self.num_kv // 2} of each; allowed: 1..{self.num_kv // 2}"
            )
        if self.num_passes < 1 or self.num_fillers < 1 or self.power_a <= 0:
            raise TaskError(
                f"num_passes and num_fillers must be >= 1 and power_a > 0; got "
                f"{self.num_passes}, {self.num_fillers} and {self.power_a}"
            )
        least = 2 * self.num_pairs * (self.num_passes + 1)
        if self.input_seq_len % 2 or self.input_seq_len < least:
            raise TaskError(
                f"input_seq_len must be even and >= {least} to show {self.num_pairs} pairs "
                f"{self.num_passes} times and ask each once, got {self.input_seq_len}"
            )

    @property
    def keys(self) -> range:
        """Token ids of the keys."""
        return range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + self.num_kv // 2)

    @property
    def values(self) -> range:
        """Token ids of the values."""
        return range(self.keys.stop, self.keys.stop + self.num_kv // 2)

    @property
    def fillers(self) -> range:
        """Token ids of the fillers."""
        return range(self.values.stop, self.values.stop + self.num_fillers)

    @property
    def num_slots(self) -> int:
        """Slots of two tokens behind the divider."""
        return self.input_seq_len // 2 - self.num_passes * self.num_pairs

    @property
    def d_vocab(self) -> int:
        return self.fillers.stop

    @property
    def max_length(self) -> int:
        """Every document's length: input_seq_len, <bos>, the divider and the last <eos>."""
        return self.input_seq_len + 3

    @property
    def chance(self) -> float:
        return 1 / self.num_pairs

    @property
    def blind_chance(self) -> float:
        return 1 / len(self.values)

    def describe(self) -> str:
        return (
            f"Multi-query associative recall: {self.num_pairs} key-value pairs of "
            f"{len(self.keys)} keys and {len(self.values)} values, shown {self.num_passes} times, "
            f"then every key once among fillers in {self.num_slots} slots; the answer to each is "
            f"its value. Chance {self.chance:.3g} among the values in the document."
        )

    def decode_token(self, token: int) -> str:
        for letter, kind in (("k", self.keys), ("v", self.values), ("f", self.fillers)):
            if token in kind:
                return f"{letter}{token - kind.start}"
        raise AssertionError(f"token {token} is in the vocabulary but of no kind")

    def single_query(self) -> MultiQueryAssociativeRecall:
        """Return the task with one pass: with more, a corrupted pair stands intact in another."""
        return replace(self, num_passes=1)

    def token_range(self, position_name: str) -> range:
        return self.keys if position_name == "query_item_orig" else self.values

    def _draw(self, n: int, split: Split, generator: torch.Generator) -> TaskBatch:
        shape = (n, self.num_pairs, self.num_kv // 2)
        keys = draw_distinct(*shape, generator) + self.keys.start
        values = draw_distinct(*shape, generator) + self.values.start
        slots = self._draw_slots(n, generator)
        pairs = torch.stack([keys, values], dim=2)
        queries = uniform((n, self.num_slots, 2), generator) * self.num_fillers
        queries = queries.long() + self.fillers.start
        queries.scatter_(1, slots[..., None].expand(-1, -1, 2), pairs)
        bos = torch.full_like(keys[:, :1], BOS)
        eos = torch.full_like(bos, EOS)
        context = pairs.flatten(1).repeat(1, self.num_passes)
        tokens = torch.cat([bos, context, eos, queries.flatten(1), eos], dim=1)

        divider = 1 + context.shape[1]
        asked_at = divider + 1 + 2 * slots
        labels = torch.full_like(tokens, IGNORE_INDEX).scatter_(1, asked_at, values)
        chosen = torch.randint(self.num_pairs, (n, 1), generator=generator, device=generator.device)
        return TaskBatch(
            tokens=tokens,
            labels=labels,
            answer=values.gather(1, chosen).squeeze(1),
            positions=_positions(chosen.squeeze(1), asked_at.gather(1, chosen).squeeze(1), divider),
            lengths=torch.full_like(tokens[:, 0], tokens.shape[1]),
        )

    def _draw_slots(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw a slot for each pair: weighted, without replacement. [batch, pair]

        The largest of log weight + Gumbel noise are such a draw, in order (Plackett-Luce).
        """
        slot = torch.arange(1, self.num_slots + 1, device=generator.device)
        log_weight = (self.power_a - 1) * slot.double().log()
        noise = -(-uniform((n, self.num_slots), generator).clamp_min(1e-300).log()).log()
        return (log_weight + noise).topk(self.num_pairs, dim=1).indices


def _positions(pair: Tensor, asked_at: Tensor, divider: int) -> dict[str, Tensor]:
    return {
        "bos": torch.zeros_like(pair),
        "query_item_orig": 1 + 2 * pair,
        "target_item_orig": 2 + 2 * pair,
        "divider": torch.full_like(pair, divider),
        "query_item": asked_at,
        "target_item": asked_at + 1,
    }

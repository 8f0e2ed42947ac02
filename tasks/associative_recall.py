"""Associative recall (AR): pairs in context, then one key whose value is asked.

    <bos> k v k v ... k v <eos> q a <eos>

Token ids: <pad> 0, <bos> 1, <eos> 2, then num_kv/2 keys, then num_kv/2 values. The <eos> before
the query is the *divider*. Source: Arora et al., arXiv 2505.15105.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_ssm.checks import Seed, checked_as
from hooked_ssm.errors import TaskError
from hooked_ssm.shapes import PerDocument
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
from hooked_ssm.tasks.holdout import held_out

QueryType = Literal["key", "value"]
Layout = Literal["end", "repeats"]
_MAX_REDRAWS = 2000


class _Plan(NamedTuple):
    """Which pair each slot shows, by its index in the document.

    slots: Pair of each context slot. [batch, slot]
    asks: True where a slot asks for a pair shown before, rather than showing a new one; its answer
        is trained on.
    queries: Pair of each query after the divider; the last one is the document's. [batch, query]
    """

    slots: Tensor
    asks: Tensor
    queries: Tensor


@dataclass(frozen=True)
class AssociativeRecall(Task):
    """Associative recall over `num_pairs` key-value pairs.

    `num_queries` > 1 is an aid for training small models quickly: the document asks more often and
    every answer is trained on. Layout "end" asks behind the divider, each pair once before any is
    asked again, `... <eos> q1 a1 q2 a2 <eos>`: the first query stands where the paper's does, which
    models with learned positions need. "repeats" puts all but the last query among the pairs, each
    somewhere after its pair, so that a key that comes again is followed by its value again.
    Evaluate on `single_query()`: the paper's documents, over the same vocabulary.

    Args:
        num_kv: Keys plus values in the vocabulary; even.
        num_pairs: Pairs per document; keys, and values, are drawn without replacement.
        query_type: "key" asks for a key's value, "value" for a value's key.
        holdout: Fraction of all (key, value) pairs that splits "train" and "dev" never ask for, and
            "test" alone asks for. 0: all splits have the same distribution.
        num_queries: Queries per document, all trained on; 1 in the paper.
        layout: Where the queries before the last one stand.
        seed: Which pairs are held out.

    Raises:
        TaskError: A value out of range, too few keys for the pairs, or a hold-out that leaves no
            document to draw.
    """

    name: ClassVar[str] = "associative_recall"

    num_kv: int = 64
    num_pairs: int = 8
    query_type: QueryType = "key"
    holdout: float = 0.0
    num_queries: int = 1
    layout: Layout = "end"
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv < 2 or self.num_kv % 2:
            raise TaskError(
                f"num_kv must be even and >= 2 (half keys, half values), got {self.num_kv}"
            )
        if not 1 <= self.num_pairs <= self.num_keys:
            raise TaskError(
                f"num_pairs={self.num_pairs} needs that many distinct keys and values, but "
                f"num_kv={self.num_kv} gives {self.num_keys} of each; allowed: 1..{self.num_keys}"
            )
        if not 0 <= self.holdout < 1:
            raise TaskError(f"holdout is a fraction of the pairs, 0 <= it < 1; got {self.holdout}")
        if self.num_queries < 1:
            raise TaskError(f"num_queries must be >= 1, got {self.num_queries}")

    @property
    def num_keys(self) -> int:
        """Keys in the vocabulary; there are as many values."""
        return self.num_kv // 2

    @property
    def keys(self) -> range:
        """Token ids of the keys."""
        return range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + self.num_keys)

    @property
    def values(self) -> range:
        """Token ids of the values."""
        return range(self.keys.stop, self.keys.stop + self.num_keys)

    @property
    def d_vocab(self) -> int:
        return len(SPECIAL_TOKENS) + self.num_kv

    @property
    def max_length(self) -> int:
        """Every document's length: <bos>, the slots, the divider, the queries, <eos>."""
        return 3 + 2 * (self.num_pairs + self.num_queries)

    @property
    def chance(self) -> float:
        return 1 / self.num_pairs

    @property
    def blind_chance(self) -> float:
        return 1 / self.num_keys

    def describe(self) -> str:
        ask, answer = ("key", "value") if self.query_type == "key" else ("value", "key")
        text = (
            f"Associative recall: {self.num_pairs} key-value pairs of {self.num_keys} keys and "
            f"{self.num_keys} values, then a {ask} of the document; the answer is its {answer}. "
            f"Chance {self.chance:.3g} among the {answer}s in the document."
        )
        if self.num_queries > 1:
            text += f" {self.num_queries} queries per document, layout {self.layout!r}."
        if self.holdout:
            text += f" {self.holdout:.0%} of all pairs are asked in split 'test' only."
        return text

    def decode_token(self, token: int) -> str:
        if token in self.keys:
            return f"k{token - self.keys.start}"
        return f"v{token - self.values.start}"

    def token_range(self, position_name: str) -> range:
        is_key = (position_name == "query_item_orig") == (self.query_type == "key")
        return self.keys if is_key else self.values

    def single_query(self) -> AssociativeRecall:
        return replace(self, num_queries=1, layout="end")

    @checked_as(TaskError)
    def eligible(
        self, keys: Int[Tensor, "batch pair"], values: Int[Tensor, "batch pair"], split: Split
    ) -> Bool[Tensor, "batch pair"]:
        """True where a split may ask for a pair of these token ids."""
        if self.holdout == 0:
            return torch.ones_like(keys, dtype=torch.bool)
        return held_out(keys, values, self.holdout, self.seed) == (split == "test")

    @checked_as(TaskError)
    def build(
        self,
        keys: Int[Tensor, "batch pair"],
        values: Int[Tensor, "batch pair"],
        query: PerDocument,
    ) -> TaskBatch:
        """Return single-query documents of chosen pairs, for hand-made examples.

        Args:
            keys, values: Token ids.
            query: Index of the queried pair.

        Raises:
            TaskError: A token that is no key or no value, one that comes twice, another number of
                pairs than the task's, or a query that is no pair's index.
        """
        if keys.shape[1] != self.num_pairs:
            raise TaskError(
                f"keys and values of {keys.shape[1]} pairs a document; allowed: {self.num_pairs}, "
                f"the task's num_pairs. Build it with num_pairs={keys.shape[1]}"
            )
        for name, given, allowed in (
            ("keys", keys, self.keys),
            ("values", values, self.values),
            ("query", query, range(keys.shape[1])),
        ):
            low, high = (int(end) for end in given.aminmax())
            if low not in allowed or high not in allowed:
                raise TaskError(
                    f"{name} from {low} to {high}; allowed {allowed.start}..{allowed.stop - 1}"
                )
        for name, given in (("keys", keys), ("values", values)):
            ordered = given.sort(dim=1).values
            if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
                raise TaskError(f"{name}: one comes twice in a document; allowed: each once")
        slots = torch.arange(keys.shape[1], device=keys.device).expand_as(keys)
        asks = torch.zeros_like(keys, dtype=torch.bool)
        return self._assemble(keys, values, _Plan(slots, asks, query[:, None]))

    def _draw(self, n: int, split: Split, generator: torch.Generator) -> TaskBatch:
        keys, values = self._draw_pairs(n, split, generator)
        allowed = self.eligible(keys, values, split)
        # a random order of the allowed pairs
        order = uniform(keys.shape, generator).masked_fill_(~allowed, 2.0).argsort(dim=1)
        at_end = self.num_queries if self.layout == "end" else 1
        turns = self._draw_turns(at_end, allowed.sum(dim=1, keepdim=True), generator)
        slots, asks = self._draw_slots(allowed, self.num_queries - at_end, generator)
        return self._assemble(keys, values, _Plan(slots, asks, order.gather(1, turns)))

    def _draw_turns(self, n: int, allowed: Tensor, generator: torch.Generator) -> Tensor:
        """Which of a document's allowed pairs are asked: each once, then any. [batch, query]"""
        turns = torch.arange(n, device=allowed.device).expand(len(allowed), n)
        again = (uniform(turns.shape, generator) * allowed).long()
        return torch.where(turns < allowed, turns, again)

    def _draw_pairs(
        self, n: int, split: Split, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw the pairs of n documents; those with no pair the split may ask for again."""
        keys = draw_distinct(n, self.num_pairs, self.num_keys, generator) + self.keys.start
        values = draw_distinct(n, self.num_pairs, self.num_keys, generator) + self.values.start
        for _ in range(self._redraws(n, split)):
            bad = (~self.eligible(keys, values, split)).all(dim=1).nonzero().squeeze(1)
            if len(bad) == 0:
                return keys, values
            shape = (len(bad), self.num_pairs, self.num_keys)
            keys[bad] = draw_distinct(*shape, generator) + self.keys.start
            values[bad] = draw_distinct(*shape, generator) + self.values.start
        raise TaskError(
            f"no document with a pair that split {split!r} may ask for was found: holdout="
            f"{self.holdout} of {self.num_keys}**2 pairs, num_pairs={self.num_pairs}. "
            "Use more pairs, a larger num_kv or another holdout"
        )

    def _redraws(self, n: int, split: Split) -> int:
        """Rounds after which one of n documents is still unlucky in 1 of a million samples."""
        share = self.holdout if split == "test" else 1 - self.holdout
        unlucky = (1 - share) ** self.num_pairs if self.holdout else 0.0
        rounds: float = 2
        if unlucky:  # a tiny share leaves 1 exactly: no number of rounds is enough
            rounds += math.ceil(math.log(1e-6 / n) / math.log(unlucky)) if unlucky < 1 else math.inf
        if rounds > _MAX_REDRAWS:
            raise TaskError(
                f"split {split!r} may ask for only {share:.2g} of the pairs, so of {self.num_pairs}"
                f" pairs almost never one: about {rounds} redraws for {n} documents, at most "
                f"{_MAX_REDRAWS} are made. Use another holdout than {self.holdout}, or more pairs"
            )
        return int(rounds)

    def _draw_slots(
        self, allowed: Tensor, repeats: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Choose which pair each context slot shows, and whether it asks for one shown before.

        Only allowed pairs are asked; where one would have to be before any is shown, the first
        allowed pair of the document is shown first.
        """
        n, num_slots = len(allowed), self.num_pairs + repeats
        new = torch.ones(n, num_slots, dtype=torch.bool, device=generator.device)
        ranks = uniform((n, num_slots - 1), generator).argsort(dim=1)
        new[:, 1:] = ranks < self.num_pairs - 1
        turn = new.cumsum(dim=1) - 1
        pairs = torch.arange(self.num_pairs, device=allowed.device).repeat(n, 1)
        to_ask = (allowed.gather(1, turn) & new).cumsum(dim=1)
        early = (~new & (to_ask == 0)).any(dim=1)
        first = allowed.long().argmax(dim=1)  # of equals, the first
        pairs[early, first[early]] = 0
        pairs[early, 0] = first[early]
        in_turn = allowed.gather(1, pairs)
        to_ask = (in_turn.gather(1, turn) & new).cumsum(dim=1)
        # allowed pairs come first, in the order in which they are shown
        asked = pairs.gather(1, (~in_turn).long().argsort(dim=1, stable=True))
        drawn = (uniform((n, num_slots), generator) * to_ask).long()
        return torch.where(new, pairs.gather(1, turn), asked.gather(1, drawn)), ~new

    def _assemble(self, keys: Tensor, values: Tensor, plan: _Plan) -> TaskBatch:
        asked, answers = (keys, values) if self.query_type == "key" else (values, keys)
        first = torch.where(plan.asks, asked.gather(1, plan.slots), keys.gather(1, plan.slots))
        second = torch.where(plan.asks, answers.gather(1, plan.slots), values.gather(1, plan.slots))
        context = torch.stack([first, second], dim=2).flatten(1)
        queries = torch.stack([asked, answers], dim=2)
        queries = queries.gather(1, plan.queries[..., None].expand(-1, -1, 2)).flatten(1)
        bos = torch.full_like(keys[:, :1], BOS)
        eos = torch.full_like(bos, EOS)
        tokens = torch.cat([bos, context, eos, queries, eos], dim=1)

        divider = 1 + context.shape[1]
        trained = torch.zeros_like(tokens, dtype=torch.bool)
        trained[:, 1:divider:2] = plan.asks
        trained[:, divider + 1 : -1 : 2] = True
        labels = torch.full_like(tokens, IGNORE_INDEX)
        labels[:, :-1] = tokens[:, 1:].where(trained[:, :-1], IGNORE_INDEX)
        return TaskBatch(
            tokens=tokens,
            labels=labels,
            answer=tokens[:, -2].clone(),
            positions=self._positions(plan, divider, tokens.shape[1]),
            lengths=torch.full_like(tokens[:, 0], tokens.shape[1]),
        )

    def _positions(self, plan: _Plan, divider: int, length: int) -> dict[str, Tensor]:
        shows = (plan.slots == plan.queries[:, -1:]) & ~plan.asks
        key_pos = 1 + 2 * shows.long().argmax(dim=1)
        is_value = self.query_type == "value"
        return {
            "bos": torch.zeros_like(key_pos),
            "query_item_orig": key_pos + is_value,
            "target_item_orig": key_pos + (not is_value),
            "divider": torch.full_like(key_pos, divider),
            "query_item": torch.full_like(key_pos, length - 3),
            "target_item": torch.full_like(key_pos, length - 2),
        }

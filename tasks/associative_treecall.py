"""Associative Treecall (ATR): a sentence with a hidden tree, then a token whose parent is asked.

    <bos> sentence <eos> q (query type) a <eos>

Token ids: <pad> 0, <bos> 1, <eos> 2, then the terminals, then, if several query types are on, a
token for each. Source: Arora et al., arXiv 2505.15105.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import torch

from hooked_ssm.checks import Count, Seed, checked_as
from hooked_ssm.errors import TaskError
from hooked_ssm.tasks.base import (
    BOS,
    EOS,
    IGNORE_INDEX,
    PAD,
    SPECIAL_TOKENS,
    Split,
    Task,
    TaskBatch,
)
from hooked_ssm.tasks.grammar import Grammar, random_grammar
from hooked_ssm.tasks.holdout import held_out
from hooked_ssm.tasks.treecall_documents import (
    Query,
    QueryType,
    TreeDocument,
    document_statistics,
    possible_queries,
)
from hooked_ssm.tasks.trees import HeadPosition, Sentence, SentenceSampler

SampleFirst = Literal["query", "target"]
_MIN_SENTENCE = 3
_GRAMMAR_FIELDS = (
    "num_terminals",
    "num_nonterminals",
    "max_rhs_len",
    "max_rules_per_nt",
    "max_depth",
    "terminal_occurrence_factor",
)
_MAX_REDRAWS = 40_000  # sentences: never reached where _LEAST of _TRIED give a document
_TRIED, _LEAST = 2000, 3


@dataclass(frozen=True)
class AssociativeTreecall(Task):
    """Recall over the tree of a sentence from a random grammar (see `random_grammar`).

    A sentence that is shorter than 3 tokens, breaks a bound, or has no query to ask is drawn again;
    so the distribution is the grammar's, given that a query can be asked within the bounds.

    Args:
        num_terminals, num_nonterminals, max_rhs_len, max_rules_per_nt, max_depth,
            terminal_occurrence_factor: Of the random grammar.
        head_position: Side on which a nonterminal emits its head.
        query_types: What may be asked; several put a query-type token behind the query.
        unambiguous_queries: Ask only for the rightmost occurrence of a terminal.
        sample_first: "query": draw a query, then one of its answers; "target": draw an answer, then
            a query for it.
        holdout: Fraction of all (answer, query) terminal pairs that "train" and "dev" never ask
            for, and "test" alone asks for. 0: all splits have the same distribution.
        max_length: Tokens of the longest document.
        max_tree_depth: Nested expansions of the deepest sentence.
        seed: Of the grammar and of the hold-out.
        grammar: A hand-made grammar instead of a random one.

    Raises:
        TaskError: A value out of range, or a grammar that gives no document within the bounds.
    """

    name: ClassVar[str] = "associative_treecall"
    fresh_corruption: ClassVar[bool] = False
    shared_fields: ClassVar[tuple[str, ...]] = (*Task.shared_fields, *_GRAMMAR_FIELDS, "grammar")

    num_terminals: int = 20
    num_nonterminals: int = 40
    max_rhs_len: int = 5
    max_rules_per_nt: int = 5
    max_depth: int = 10
    terminal_occurrence_factor: float | None = None
    head_position: HeadPosition = "right"
    query_types: Sequence[QueryType] = ("parent",)
    unambiguous_queries: bool = True
    sample_first: SampleFirst = "query"
    holdout: float = 0.0
    max_length: int = 1024
    max_tree_depth: int = 20
    seed: Seed = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "query_types", tuple(self.query_types))
        if not self.query_types or len(set(self.query_types)) < len(self.query_types):
            raise TaskError(
                f"query_types must be different ones of {', '.join(get_args(QueryType))}, "
                f"got {self.query_types}"
            )
        if not 0 <= self.holdout < 1:
            raise TaskError(f"holdout is a fraction of the pairs, 0 <= it < 1; got {self.holdout}")
        if self.max_sentence < _MIN_SENTENCE:
            least = self.max_length - self.max_sentence + _MIN_SENTENCE
            raise TaskError(f"max_length must be >= {least}, got {self.max_length}")
        if self.grammar is not None:
            object.__setattr__(self, "num_terminals", self.grammar.num_terminals)
            object.__setattr__(self, "num_nonterminals", self.grammar.num_nonterminals)
        for split in ("train", "test") if self.holdout else ("train",):
            rng, tried = random.Random(self.seed), 0
            for _ in range(_LEAST):  # raises where documents are too rare to draw reliably
                tried += self._draw_document(rng, split, max(1, _TRIED - tried))[1]

    @cached_property
    def rules(self) -> Grammar:
        """The grammar the sentences are drawn from: the hand-made one, or the random one."""
        sizes = {name: getattr(self, name) for name in _GRAMMAR_FIELDS}
        return self.grammar or random_grammar(**sizes, seed=self.seed)

    @property
    def max_sentence(self) -> int:
        """Tokens of the longest sentence: the document without <bos>, divider, query and end."""
        return self.max_length - 5 - self.names_type

    @property
    def names_type(self) -> int:
        """1 if documents name the query's type, because there are several; else 0."""
        return int(len(self.query_types) > 1)

    @property
    def position_names(self) -> tuple[str, ...]:
        return (
            (*super().position_names, "query_type") if self.names_type else super().position_names
        )

    @property
    def answer_position(self) -> str:
        """ "query_item"; with several query types "query_type", the token behind it."""
        return "query_type" if self.names_type else "query_item"

    @property
    def terminals(self) -> range:
        """Token ids of the terminals."""
        return range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + self.num_terminals)

    @property
    def d_vocab(self) -> int:
        return self.terminals.stop + (len(self.query_types) if self.names_type else 0)

    @cached_property
    def chance(self) -> float:
        """Measured on 500 documents: mean of 1 / (different terminals in the document)."""
        documents = self.documents(500, generator=torch.Generator().manual_seed(0))
        return sum(1 / len(set(document.sentence.terminals)) for document in documents) / 500

    @property
    def blind_chance(self) -> float:
        return 1 / self.num_terminals

    def describe(self) -> str:
        statistics = self.statistics(500, generator=torch.Generator().manual_seed(0))
        text = (
            f"Associative treecall: a sentence of a grammar with {self.num_nonterminals} "
            f"nonterminals and {self.num_terminals} terminals (mean length "
            f"{statistics['length']:.1f}, depth {statistics['depth']:.1f}), then one of its tokens;"
            f" the answer is its {' or '.join(self.query_types)} in the sentence's tree. Chance "
            f"{self.chance:.3g} among the terminals in the document, "
            f"{statistics['majority']:.3g} by the commonest answer."
        )
        if self.holdout:
            text += f" {self.holdout:.0%} of all pairs are asked in split 'test' only."
        return text

    def decode_token(self, token: int) -> str:
        if token in self.terminals:
            return f"t{token - self.terminals.start}"
        return f"<{self.query_types[token - self.terminals.stop]}>"

    def token_range(self, position_name: str) -> range:
        return self.terminals

    def to_json(self) -> dict[str, Any]:
        """Return the spec; a hand-made grammar in full, a random one by its sizes and seed."""
        spec = {field.name: getattr(self, field.name) for field in fields(self)}
        grammar = self.grammar.to_json() if self.grammar else None
        return {
            "task": self.name,
            **spec,
            "query_types": list(self.query_types),
            "grammar": grammar,
        }

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> AssociativeTreecall:
        if values.get("grammar"):
            values = {**values, "grammar": Grammar.from_json(values["grammar"])}
        return super()._from_fields(values)

    @checked_as(TaskError)
    def documents(
        self, n: Count, split: Split = "train", *, generator: torch.Generator
    ) -> list[TreeDocument]:
        """Draw n documents with their trees; `sample` gives the same ones as a batch."""
        seed = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
        rng = random.Random(int(seed))
        return [self._draw_document(rng, split)[0] for _ in range(n)]

    @checked_as(TaskError)
    def statistics(
        self, n: Count, split: Split = "train", *, generator: torch.Generator
    ) -> dict[str, Any]:
        """Describe n documents: see `document_statistics`."""
        return document_statistics(self.documents(n, split, generator=generator))

    def build(self, documents: Sequence[TreeDocument]) -> TaskBatch:
        """Return documents as a batch.

        Raises:
            TaskError: No documents.
        """
        if not documents:
            raise TaskError("documents is an empty list; give at least one document")
        rows = [self._tokens(document) for document in documents]
        lengths = torch.tensor([len(row) for row in rows])
        real = torch.arange(int(lengths.max())) < lengths[:, None]
        tokens = torch.full(real.shape, PAD)
        tokens[real] = torch.tensor([token for row in rows for token in row])
        positions = {
            "bos": torch.zeros_like(lengths),
            "query_item_orig": torch.tensor([1 + document.query.query for document in documents]),
            "target_item_orig": torch.tensor([1 + document.query.target for document in documents]),
            "divider": lengths - 4 - self.names_type,
            "query_item": lengths - 3 - self.names_type,
            "target_item": lengths - 2,
        }
        if self.names_type:
            positions["query_type"] = lengths - 3
        answer = tokens.gather(1, positions["target_item"][:, None])
        labels = torch.full_like(tokens, IGNORE_INDEX)
        labels.scatter_(1, positions[self.answer_position][:, None], answer)
        return TaskBatch(tokens, labels, answer.squeeze(1), positions, lengths)

    def _draw(self, n: int, split: Split, generator: torch.Generator) -> TaskBatch:
        return self.build(self.documents(n, split, generator=generator)).to(generator.device)

    def _tokens(self, document: TreeDocument) -> list[int]:
        first, query = self.terminals.start, document.query
        sentence = [first + terminal for terminal in document.sentence.terminals]
        kind = [self.terminals.stop + self.query_types.index(query.kind)] if self.names_type else []
        return [BOS, *sentence, EOS, sentence[query.query], *kind, sentence[query.target], EOS]

    @cached_property
    def _sampler(self) -> SentenceSampler:
        return SentenceSampler(
            self.rules, self.head_position, self.max_sentence, self.max_tree_depth
        )

    def _draw_document(
        self, rng: random.Random, split: Split, most: int = _MAX_REDRAWS
    ) -> tuple[TreeDocument, int]:
        """Return a document, and of how many sentences it is the first that gives one."""
        failures: Counter[str] = Counter()
        for drawn in range(1, most + 1):
            sentence = self._sampler.draw(rng)
            if isinstance(sentence, str):
                failures[sentence] += 1
            elif len(sentence) < _MIN_SENTENCE:
                failures["shorter than 3 tokens"] += 1
            elif queries := self._eligible(sentence, split):
                return TreeDocument(sentence, self._choose(queries, rng)), drawn
            else:
                failures["no query to ask"] += 1
        reasons = ", ".join(f"{reason}: {count}" for reason, count in failures.most_common())
        raise TaskError(
            f"no document for split {split!r} in {most} sentences of this grammar "
            f"({reasons}). Use another seed or grammar, other query types, longer or deeper "
            f"documents (max_length={self.max_length}, max_tree_depth={self.max_tree_depth}), "
            f"or another holdout ({self.holdout})"
        )

    def _eligible(self, sentence: Sentence, split: Split) -> list[Query]:
        queries = possible_queries(sentence, self.query_types, self.unambiguous_queries)
        if self.holdout == 0:
            return list(queries)
        labels = sentence.terminals
        return [
            query
            for query in queries
            if held_out(labels[query.target], labels[query.query], self.holdout, self.seed)
            == (split == "test")
        ]

    def _choose(self, queries: list[Query], rng: random.Random) -> Query:
        """Draw one token first, then what is asked, then the other token; each step uniformly."""
        first = rng.choice(sorted({getattr(query, self.sample_first) for query in queries}))
        queries = [query for query in queries if getattr(query, self.sample_first) == first]
        kind = rng.choice(sorted({query.kind for query in queries}))
        return rng.choice([query for query in queries if query.kind == kind])

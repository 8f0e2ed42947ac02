"""Probabilistic context-free grammars whose every expansion also emits a head terminal.

Symbols are integers: terminals 0..num_terminals-1, then the nonterminals.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hooked_ssm.checks import Seed, check_fields, checked_as
from hooked_ssm.errors import TaskError, unknown
from hooked_ssm.files import read_json, write_text
from hooked_ssm.rules import shown


@dataclass(frozen=True)
class Rule:
    """One right-hand side of a nonterminal and its probability."""

    symbols: Sequence[int]
    probability: float

    def __post_init__(self) -> None:
        check_fields(self, TaskError, prefix="a rule's ")
        object.__setattr__(self, "symbols", tuple(int(symbol) for symbol in self.symbols))


@dataclass(frozen=True)
class Grammar:
    """A grammar, checked when it is built.

    Args:
        num_terminals: Symbols below this are terminals.
        rules: The rules of each nonterminal.
        heads: The distribution of each nonterminal's head over the terminals.
        start: The distribution of the start symbol over the nonterminals.

    Raises:
        TaskError: Probabilities that do not sum to 1, an unknown symbol, a nonterminal without
            rules, or one that can never end in terminals.
    """

    num_terminals: int
    rules: Sequence[Sequence[Rule]]
    heads: Sequence[Sequence[float]]
    start: Sequence[float]

    def __post_init__(self) -> None:
        check_fields(self, TaskError, prefix="a grammar's ")
        heads = tuple(tuple(float(share) for share in row) for row in self.heads)
        object.__setattr__(self, "rules", tuple(map(tuple, self.rules)))
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "start", tuple(float(share) for share in self.start))
        if self.num_terminals < 1 or not self.rules:
            raise TaskError("a grammar needs at least 1 terminal and 1 nonterminal")
        for name, rows in (("heads", self.heads), ("start", self.start)):
            if len(rows) != len(self.rules):
                raise TaskError(
                    f"{name} has {len(rows)} entries for {len(self.rules)} nonterminals"
                )
        _check_distribution("start", self.start)
        for index, (rules, heads) in enumerate(zip(self.rules, self.heads, strict=True)):
            _check_distribution(f"the rules of nonterminal {index}", [r.probability for r in rules])
            _check_distribution(f"the heads of nonterminal {index}", heads)
            if len(heads) != self.num_terminals:
                raise TaskError(
                    f"nonterminal {index} has {len(heads)} head probabilities for "
                    f"{self.num_terminals} terminals"
                )
            for symbol in (symbol for rule in rules for symbol in rule.symbols):
                if not 0 <= symbol < self.num_terminals + len(self.rules):
                    raise TaskError(
                        f"nonterminal {index} uses symbol {symbol}; there are "
                        f"{self.num_terminals} terminals and {len(self.rules)} nonterminals"
                    )
        self._check_that_everything_can_end()

    @property
    def num_nonterminals(self) -> int:
        return len(self.rules)

    def expected_length(self) -> float:
        """Return the mean number of tokens of a sentence, infinite if the recursion explodes.

        length[A] = 1 + sum over rules p (terminals + sum over children length[child]), which has a
        finite solution if the spectral radius of the matrix of mean children is below 1.
        """
        children = torch.zeros(len(self.rules), len(self.rules), dtype=torch.float64)
        own = torch.ones(len(self.rules), dtype=torch.float64)
        for index, rules in enumerate(self.rules):
            for rule in rules:
                for symbol in rule.symbols:
                    if symbol < self.num_terminals:
                        own[index] += rule.probability
                    else:
                        children[index, symbol - self.num_terminals] += rule.probability
        if torch.linalg.eigvals(children).abs().max() >= 1 - 1e-12:
            return math.inf
        length = torch.linalg.solve(torch.eye(len(self.rules)).double() - children, own)
        return float(torch.tensor(self.start, dtype=torch.float64) @ length)

    def to_json(self) -> dict[str, Any]:
        """Return the grammar as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, spec: dict[str, Any]) -> Grammar:
        """Build the grammar of `to_json`.

        Raises:
            TaskError: A missing or unknown field, or a grammar that the constructor refuses.
        """
        given = _fields_of(cls, spec, "the grammar's spec")
        try:
            given["rules"] = [
                [Rule(**_fields_of(Rule, rule, "a rule")) for rule in rules]
                for rules in given["rules"]
            ]
        except TypeError as error:
            raise TaskError(
                f"the grammar's rules={shown(given['rules'])}; allowed: a list of rules for each "
                "nonterminal, as of to_json"
            ) from error
        return cls(**given)

    def save(self, path: str | Path) -> None:
        """Write the grammar as a JSON file, whole or not at all."""
        write_text(Path(path), json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Grammar:
        """Read a grammar written by `save`."""
        return cls.from_json(read_json(Path(path)))

    def _check_that_everything_can_end(self) -> None:
        ends = set(range(self.num_terminals))
        size = 0
        while size < len(ends):
            size = len(ends)
            for index, rules in enumerate(self.rules):
                if any(rule.probability > 0 and ends.issuperset(rule.symbols) for rule in rules):
                    ends.add(self.num_terminals + index)
        endless = [i for i in range(len(self.rules)) if self.num_terminals + i not in ends]
        if endless:
            raise TaskError(
                f"nonterminals {endless} can never end in terminals alone: give each a rule "
                "that leads to terminals"
            )


@checked_as(TaskError)
def random_grammar(
    *,
    num_terminals: int,
    num_nonterminals: int,
    max_rhs_len: int,
    max_rules_per_nt: int,
    max_depth: int,
    terminal_occurrence_factor: float | None,
    seed: Seed,
) -> Grammar:
    """Draw a grammar as the paper does.

    Each nonterminal gets a depth index, uniform in 1..max_depth, and 1..max_rules_per_nt rules;
    a rule has 1..max_rhs_len-1 symbols, drawn with replacement among the terminals and the
    nonterminals of a strictly larger index, so every sentence ends. Rule and head probabilities
    are Dirichlet(1), the start symbol is uniform. Every symbol is equally likely in a rule; with a
    `terminal_occurrence_factor` f, some terminal has weight f against 1 for each nonterminal.

    Only `random.Random(seed).random()` is used, whose numbers are the same on every platform.

    Raises:
        TaskError: A size out of range.
    Source: Arora et al., arXiv 2505.15105; with replacement as in the authors' tinylang@5fb5836.
    """
    _check_sizes(
        num_terminals=(num_terminals, 1),
        num_nonterminals=(num_nonterminals, 1),
        max_rhs_len=(max_rhs_len, 2),
        max_rules_per_nt=(max_rules_per_nt, 1),
        max_depth=(max_depth, 1),
    )
    if terminal_occurrence_factor is not None and terminal_occurrence_factor <= 0:
        raise TaskError(f"terminal_occurrence_factor must be > 0, got {terminal_occurrence_factor}")
    rng = random.Random(seed)
    depths = [1 + _below(rng, max_depth) for _ in range(num_nonterminals)]
    weight = float(terminal_occurrence_factor or num_terminals)
    rules = []
    for depth in depths:
        deeper = [num_terminals + i for i, other in enumerate(depths) if other > depth]
        sides = [
            _draw_symbols(rng, 1 + _below(rng, max_rhs_len - 1), num_terminals, weight, deeper)
            for _ in range(1 + _below(rng, max_rules_per_nt))
        ]
        shares = _dirichlet(rng, len(sides))
        rules.append(tuple(Rule(side, share) for side, share in zip(sides, shares, strict=True)))
    return Grammar(
        num_terminals=num_terminals,
        rules=tuple(rules),
        heads=tuple(_dirichlet(rng, num_terminals) for _ in depths),
        start=(1 / num_nonterminals,) * num_nonterminals,
    )


def _draw_symbols(
    rng: random.Random, count: int, num_terminals: int, terminal_weight: float, deeper: list[int]
) -> tuple[int, ...]:
    """Draw symbols, each in proportion to its weight."""
    chosen: list[int] = []
    for _ in range(count):
        draw = rng.random() * (terminal_weight + len(deeper))
        if draw < terminal_weight:
            chosen.append(_below(rng, num_terminals))
        else:
            chosen.append(deeper[min(int(draw - terminal_weight), len(deeper) - 1)])
    return tuple(chosen)


def _below(rng: random.Random, stop: int) -> int:
    return int(rng.random() * stop)


def _dirichlet(rng: random.Random, count: int) -> tuple[float, ...]:
    """Draw from Dirichlet(1, ..., 1): exponentials divided by their sum."""
    draws = [-math.log(1 - rng.random()) for _ in range(count)]
    total = sum(draws)
    return tuple(draw / total for draw in draws) if total > 0 else (1 / count,) * count


def _fields_of(kind: type, spec: Any, what: str) -> dict[str, Any]:
    """Return the fields of a dataclass from a mapping that has them all and no other."""
    names = [field.name for field in fields(kind)]
    if not isinstance(spec, Mapping):
        raise TaskError(f"{what} is {shown(spec)}; allowed: a mapping of {', '.join(names)}")
    for name in names:
        if name not in spec:
            raise TaskError(f"{what} lacks {name!r}; it has {sorted(map(str, spec))}")
    for name in spec:
        if name not in names:
            raise TaskError(unknown(f"field of {what}", name, names))
    return dict(spec)


def _check_distribution(name: str, probabilities: Sequence[float]) -> None:
    total = sum(probabilities)
    if abs(total - 1) > 1e-6 or any(p < 0 for p in probabilities):
        raise TaskError(
            f"{name} must be probabilities that sum to 1, got {list(probabilities)[:8]} "
            f"with sum {total:.6g}"
        )


def _check_sizes(**sizes: tuple[int, int]) -> None:
    for name, (got, least) in sizes.items():
        if got < least:
            raise TaskError(f"{name} must be >= {least}, got {got}")

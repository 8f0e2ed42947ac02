"""Sentences drawn from a grammar, with the tree of heads above their tokens."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from hooked_ssm.tasks.grammar import Grammar

HeadPosition = Literal["left", "right"]
Failure = Literal["too long", "too deep"]


@dataclass(frozen=True)
class Sentence:
    """A sentence and its tree.

    Attributes:
        terminals: The terminal at each position.
        parents: The position of each token's head: the head terminal of the constituent it
            belongs to, for a head that of the constituent around its own; -1 for the root.
        nonterminals: The nonterminal whose expansion the token heads; -1 for the other tokens.
        depth: Nested expansions, 1 for a single one.
    """

    terminals: tuple[int, ...]
    parents: tuple[int, ...]
    nonterminals: tuple[int, ...]
    depth: int

    def __len__(self) -> int:
        return len(self.terminals)

    def children(self) -> list[list[int]]:
        """Return the positions whose parent each position is, from left to right."""
        children: list[list[int]] = [[] for _ in self.terminals]
        for position, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(position)
        return children

    def draw(self, marks: dict[int, str] | None = None) -> str:
        """Return the tree as text, a line per token: its position, its name, its nonterminal.

        Args:
            marks: Words to put behind the tokens at these positions.
        """
        marks, children = marks or {}, self.children()
        pending, lines = [(self.parents.index(-1), "", "")], []
        while pending:
            position, first, rest = pending.pop()
            nonterminal = self.nonterminals[position]
            line = f"{first}t{self.terminals[position]} @{position}"
            line += f" (head of n{nonterminal})" if nonterminal >= 0 else ""
            line += f"  <- {marks[position]}" if position in marks else ""
            lines.append(line)
            below = children[position]
            for child in reversed(below):
                last = child == below[-1]
                pending.append(
                    (child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))
                )
        return "\n".join(lines)


class SentenceSampler:
    """Draws sentences from a grammar: iteratively, with bounds, so that it always ends.

    A sentence that grows beyond `max_length` tokens or `max_depth` nested expansions is given up,
    and the caller draws again: the distribution is the grammar's, given that the bounds hold.

    Args:
        grammar: The grammar.
        head_position: On which side of its children a nonterminal's head terminal is emitted.
        max_length, max_depth: The bounds.
    """

    def __init__(
        self, grammar: Grammar, head_position: HeadPosition, max_length: int, max_depth: int
    ) -> None:
        self.head_position, self.max_length, self.max_depth = head_position, max_length, max_depth
        self._num_terminals = grammar.num_terminals
        self._start = _chooser(grammar.start)
        self._heads = [_chooser(row) for row in grammar.heads]
        self._rules = [_chooser([rule.probability for rule in rules]) for rules in grammar.rules]
        self._sides = [[rule.symbols for rule in rules] for rules in grammar.rules]

    def draw(self, rng: random.Random) -> Sentence | Failure:
        """Draw a sentence, or return which bound it broke."""
        terminals, nodes, parent_nodes, nonterminals = [], [], [], []
        num_terminals, next_node, depth = self._num_terminals, 1, 0
        # (symbol, its node, its parent's node, its level; for a head ~the nonterminal it heads)
        pending = [(num_terminals + self._start(rng), 0, -1, 1)]
        while pending:
            symbol, node, parent, level = pending.pop()
            if symbol < num_terminals:
                terminals.append(symbol)
                nodes.append(node)
                parent_nodes.append(parent)
                nonterminals.append(~level if level < 0 else -1)
                continue
            if level > self.max_depth:
                return "too deep"
            depth = max(depth, level)
            nonterminal = symbol - num_terminals
            head = (self._heads[nonterminal](rng), node, parent, ~nonterminal)
            side = self._sides[nonterminal][self._rules[nonterminal](rng)]
            if self.head_position == "right":
                pending.append(head)
            for child in reversed(side):
                pending.append((child, next_node, node, level + 1))
                next_node += 1
            if self.head_position == "left":
                pending.append(head)
            # each pending symbol becomes at least one token
            if len(terminals) + len(pending) > self.max_length:
                return "too long"
        where = {node: position for position, node in enumerate(nodes)}
        parents = tuple(where.get(node, -1) for node in parent_nodes)
        return Sentence(tuple(terminals), parents, tuple(nonterminals), depth)


def _chooser(probabilities) -> Callable[[random.Random], int]:
    """Return a function that draws an index with these probabilities."""
    bounds = list(accumulate(probabilities))
    total, last = bounds[-1], max(i for i, p in enumerate(probabilities) if p > 0)

    def choose(rng: random.Random) -> int:
        return min(bisect(bounds, rng.random() * total), last)

    return choose

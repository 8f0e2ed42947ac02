"""Grammars: what is refused, what is drawn, and the expected length."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from scipy.stats import binomtest, chisquare

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks import Grammar, Rule, random_grammar
from hooked_ssm.tasks.trees import SentenceSampler

PAPER = dict(
    num_terminals=20,
    num_nonterminals=40,
    max_rhs_len=5,
    max_rules_per_nt=5,
    max_depth=10,
    terminal_occurrence_factor=None,
)
# n0 -> t0 n1 (0.75) | t1 (0.25), n1 -> t0 t1; heads t2 and t3. Symbols 4 and 5 are n0 and n1
GOLDEN = Grammar(
    num_terminals=4,
    rules=((Rule((0, 5), 0.75), Rule((1,), 0.25)), (Rule((0, 1), 1.0),)),
    heads=((0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)),
    start=(1.0, 0.0),
)
RECURSIVE = Grammar(
    num_terminals=1,
    rules=((Rule((1, 1), 0.6), Rule((0,), 0.4)),),
    heads=((1.0,),),
    start=(1.0,),
)


def draw(grammar, n, side="right", max_length=1000, max_depth=20):
    sampler, rng = SentenceSampler(grammar, side, max_length, max_depth), random.Random(0)
    return [sampler.draw(rng) for _ in range(n)]


def test_golden_sentences():
    right = {s.terminals: (s.parents, s.nonterminals, s.depth) for s in draw(GOLDEN, 50)}
    assert right == {
        (0, 0, 1, 3, 2): ((4, 3, 3, 4, -1), (-1, -1, -1, 1, 0), 2),
        (1, 2): ((1, -1), (-1, 0), 1),
    }
    left = {s.terminals: (s.parents, s.nonterminals, s.depth) for s in draw(GOLDEN, 50, "left")}
    assert left == {
        (2, 0, 3, 0, 1): ((-1, 0, 0, 2, 2), (0, -1, 1, -1, -1), 2),
        (2, 1): ((-1, 0), (0, -1), 1),
    }


def test_golden_tree_is_drawn():
    sentence = next(s for s in draw(GOLDEN, 50) if len(s) == 5)
    assert sentence.draw({1: "query", 3: "answer"}).splitlines() == [
        "t2 @4 (head of n0)",
        "├─ t0 @0",
        "└─ t3 @3 (head of n1)  <- answer",
        "   ├─ t0 @1  <- query",
        "   └─ t1 @2",
    ]


def test_expected_length():
    assert GOLDEN.expected_length() == pytest.approx(0.75 * 5 + 0.25 * 2)
    assert RECURSIVE.expected_length() == math.inf
    grammar = random_grammar(**PAPER, seed=0)
    lengths = [len(sentence) for sentence in draw(grammar, 20_000)]
    mean = sum(lengths) / len(lengths)
    spread = math.sqrt(sum((n - mean) ** 2 for n in lengths) / len(lengths))
    assert abs(mean - grammar.expected_length()) < 4 * spread / math.sqrt(len(lengths))


def test_rules_and_heads_are_drawn_with_their_probabilities():
    grammar = dataclasses.replace(
        GOLDEN, heads=((0.1, 0.2, 0.3, 0.4), (0.0, 0.5, 0.5, 0.0)), start=(0.6, 0.4)
    )
    sentences = draw(grammar, 20_000)
    roots = [s for s in sentences if s.nonterminals[-1] == 0]
    assert_share(len(roots), 20_000, 0.6)
    assert_share(sum(len(s) == 5 for s in roots), len(roots), 0.75)
    for terminal, probability in enumerate(grammar.heads[0]):
        assert_share(sum(s.terminals[-1] == terminal for s in roots), len(roots), probability)


def assert_share(count, total, probability):
    sigma = math.sqrt(total * probability * (1 - probability))
    assert abs(count - total * probability) < 4 * sigma


def test_recursive_grammar_stops_at_the_bounds():
    drawn = draw(RECURSIVE, 5000, max_length=25, max_depth=8)
    assert {s for s in drawn if isinstance(s, str)} == {"too long", "too deep"}
    kept = [s for s in drawn if not isinstance(s, str)]
    assert max(len(s) for s in kept) <= 25 and max(s.depth for s in kept) <= 8
    assert sum(s.depth == 1 for s in kept) > 0


def test_deep_trees_need_no_recursion():
    chain = Grammar(
        num_terminals=2,
        rules=((Rule((0, 3), 1.0),), (Rule((0, 2), 0.9995), Rule((1,), 0.0005))),
        heads=((1.0, 0.0), (0.0, 1.0)),
        start=(1.0, 0.0),
    )
    for side in ("left", "right"):
        sentences = draw(chain, 8, side, max_length=200_000, max_depth=100_000)
        deepest = max(sentences, key=lambda sentence: sentence.depth)
        assert deepest.depth > 2000
        assert len(deepest.draw().splitlines()) == len(deepest) == 2 * deepest.depth


def test_random_grammar_keeps_the_sizes():
    grammar = random_grammar(**PAPER, seed=1)
    assert grammar.num_nonterminals == 40
    assert {len(rules) for rules in grammar.rules} == {1, 2, 3, 4, 5}
    sides = [rule.symbols for rules in grammar.rules for rule in rules]
    assert {len(side) for side in sides} == {1, 2, 3, 4}
    assert any(len(set(side)) < len(side) for side in sides)  # drawn with replacement
    assert grammar.start == (1 / 40,) * 40
    assert max(s.depth for s in draw(grammar, 3000)) <= 10


def test_random_grammar_draws_what_its_docstring_says():
    """Depth indices, numbers of rules, lengths and symbols, over 40 grammars; chi-square."""
    grammars = [random_grammar(**{**PAPER, "max_depth": 1}, seed=seed) for seed in range(40)]
    rules = [rules for grammar in grammars for rules in grammar.rules]
    sides = [rule.symbols for some in rules for rule in some]
    symbols = [symbol for side in sides for symbol in side]
    for drawn, values in (
        ([len(some) for some in rules], range(1, 6)),
        ([len(side) for side in sides], range(1, 5)),
        (symbols, range(20)),
    ):
        counts = [drawn.count(value) for value in values]
        assert sum(counts) == len(drawn)
        assert chisquare(counts).pvalue > 1e-3
    pairs = [side[0] == side[1] for side in sides if len(side) > 1]
    assert binomtest(sum(pairs), len(pairs), 1 / 20).pvalue > 1e-3  # independent of each other


def test_deeper_nonterminals_are_those_of_a_larger_index():
    """With two depth indices, about half of all nonterminals have no nonterminal in any rule."""
    leaves = []
    for seed in range(40):
        grammar = random_grammar(**{**PAPER, "max_depth": 2}, seed=seed)
        inner = [any(max(r.symbols) >= 20 for r in rules) for rules in grammar.rules]
        used = {s - 20 for rules in grammar.rules for r in rules for s in r.symbols if s >= 20}
        assert not any(inner[i] for i in used)  # what stands in a rule is of the last index
        leaves.append(len(inner) - sum(inner))
    assert 20 < sum(leaves) / 40 < 26  # half, and those whose few rules have terminals only


def test_random_grammar_is_seeded():
    first, again, other = (random_grammar(**PAPER, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def terminal_share(**options):
    symbols = [
        symbol
        for seed in range(8)
        for rules in random_grammar(**{**PAPER, "max_depth": 1, **options}, seed=seed).rules
        for rule in rules
        for symbol in rule.symbols
    ]
    return sum(symbol < options.get("num_terminals", 20) for symbol in symbols) / len(symbols)


def test_terminal_occurrence_factor_weighs_terminals_as_a_class():
    assert terminal_share() == 1.0  # one depth index: no rule has a deeper nonterminal
    plain = terminal_share(max_depth=10)
    same = terminal_share(max_depth=10, num_terminals=8192, terminal_occurrence_factor=20.0)
    rare = terminal_share(max_depth=10, terminal_occurrence_factor=1.0)
    assert abs(plain - same) < 0.03 and rare < plain - 0.15


def test_grammar_survives_a_file(tmp_path):
    grammar = random_grammar(**PAPER, seed=2)
    grammar.save(tmp_path / "grammar.json")
    assert Grammar.load(tmp_path / "grammar.json") == grammar
    assert [path.name for path in tmp_path.iterdir()] == ["grammar.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(start=(0.5, 0.4)), "start must be probabilities that sum to 1"),
        (dict(rules=((Rule((0,), 0.9),), (Rule((0,), 1.0),))), "the rules of nonterminal 0"),
        (dict(rules=((), (Rule((0,), 1.0),))), "the rules of nonterminal 0"),
        (dict(heads=((1.5, -0.5, 0, 0), (1.0, 0, 0, 0))), "the heads of nonterminal 0"),
        (dict(heads=((1.0,), (1.0, 0, 0, 0))), "has 1 head probabilities for 4"),
        (dict(heads=((1.0, 0, 0, 0),)), "heads has 1 entries for 2"),
        (dict(rules=((Rule((6,), 1.0),), (Rule((0,), 1.0),))), "uses symbol 6"),
        (dict(rules=((Rule((5,), 1.0),), (Rule((4,), 1.0),))), r"nonterminals \[0, 1\] can never"),
        (dict(rules=(), heads=(), start=()), "at least 1 terminal"),
    ],
)
def test_improper_grammars_are_refused(change, message, as_shipped):
    with pytest.raises(TaskError, match=message):
        dataclasses.replace(GOLDEN, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_terminals=0), "num_terminals must be >= 1, got 0"),
        (dict(max_rhs_len=1), "max_rhs_len must be >= 2, got 1"),
        (dict(max_rules_per_nt=0), "max_rules_per_nt must be >= 1"),
        (dict(max_depth=0), "max_depth must be >= 1"),
        (dict(terminal_occurrence_factor=0.0), "must be > 0"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(TaskError, match=message):
        random_grammar(**{**PAPER, **change}, seed=0)


def test_spec_without_a_field_is_refused():
    with pytest.raises(TaskError, match="lacks 'heads'"):
        Grammar.from_json({"num_terminals": 1, "rules": []})

"""ATR: golden documents of a hand-made grammar, answers checked against trees, hold-out, bounds."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks import IGNORE_INDEX, AssociativeTreecall, FixedSet, Grammar, Rule
from hooked_ssm.tasks.treecall_documents import Query, possible_queries
from hooked_ssm.tasks.trees import Sentence
from tests.tasks.test_grammar import GOLDEN, RECURSIVE

X = IGNORE_INDEX
KINDS = ("parent", "child", "sibling")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# GOLDEN's long sentence: t0 (t0 t1 t3) t2, the head of each bracket at its right
SENTENCE = Sentence((0, 0, 1, 3, 2), (4, 3, 3, 4, -1), (-1, -1, -1, 1, 0), 2)


def queries(kinds, unambiguous):
    return {(q.kind, q.query, q.target) for q in possible_queries(SENTENCE, kinds, unambiguous)}


def test_golden_queries():
    parent = {("parent", 0, 4), ("parent", 1, 3), ("parent", 2, 3), ("parent", 3, 4)}
    child = {("child", 4, 0), ("child", 4, 3), ("child", 3, 1), ("child", 3, 2)}
    sibling = {("sibling", 0, 3), ("sibling", 3, 0), ("sibling", 1, 2), ("sibling", 2, 1)}
    assert queries(["parent"], False) == parent
    assert queries(["child"], False) == child
    assert queries(["sibling"], False) == sibling
    # position 0 is not the rightmost t0; as an answer that matters for siblings only
    assert queries(["parent"], True) == parent - {("parent", 0, 4)}
    assert queries(["child"], True) == child
    assert queries(["sibling"], True) == {("sibling", 1, 2), ("sibling", 2, 1)}
    assert queries(KINDS, False) == parent | child | sibling


def test_sibling_is_the_rightmost_other_one():
    flat = Sentence((0, 1, 2, 3), (3, 3, 3, -1), (-1, -1, -1, 0), 1)
    found = {(q.query, q.target) for q in possible_queries(flat, ["sibling"], True)}
    assert found == {(0, 2), (1, 2), (2, 1)}


def test_golden_document():
    task = AssociativeTreecall(grammar=GOLDEN)
    batch = task.sample(200, generator=generator())
    rows = {
        (tuple(tokens), tuple(labels), orig, target)
        for tokens, labels, orig, target in zip(
            batch.tokens.tolist(),
            batch.labels.tolist(),
            batch.positions["query_item_orig"].tolist(),
            batch.positions["target_item_orig"].tolist(),
            strict=True,
        )
    }
    context = (1, 3, 3, 4, 6, 5, 2)  # <bos> t0 t0 t1 t3 t2 <eos>
    assert rows == {
        ((*context, 3, 6, 2), (X, X, X, X, X, X, X, 6, X, X), 2, 4),
        ((*context, 4, 6, 2), (X, X, X, X, X, X, X, 6, X, X), 3, 4),
        ((*context, 6, 5, 2), (X, X, X, X, X, X, X, 5, X, X), 4, 5),
    }
    assert (batch.positions["divider"] == 6).all() and (batch.positions["query_item"] == 7).all()
    assert (batch.positions["target_item"] == 8).all() and (batch.lengths == 10).all()
    assert task.d_vocab == 7
    assert task.decode([1, 3, 6, 2]) == ["<bos>", "t0", "t3", "<eos>"]


def test_several_query_types_name_the_type():
    task = AssociativeTreecall(grammar=GOLDEN, query_types=KINDS)
    batch = task.sample(100, generator=generator())
    assert task.answer_position == "query_type" and task.d_vocab == 10
    assert task.decode([7, 8, 9]) == ["<parent>", "<child>", "<sibling>"]
    kinds = batch.tokens.gather(1, batch.positions["query_type"][:, None])
    assert set(kinds.flatten().tolist()) == {7, 8, 9}
    assert torch.equal(batch.positions["query_item"] + 1, batch.positions["query_type"])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unambiguous", [True, False])
def test_answers_follow_from_the_tree(side, kind, unambiguous):
    task = AssociativeTreecall(
        head_position=side, query_types=(kind,), unambiguous_queries=unambiguous
    )
    documents = task.documents(300, generator=generator())
    batch = task.build(documents)
    assert torch.equal(batch.tokens, task.sample(300, generator=generator()).tokens)
    for document, tokens in zip(documents, batch.tokens.tolist(), strict=True):
        sentence, query = document.sentence, document.query
        assert len(sentence) >= 3
        asked, answer = tokens[len(sentence) + 2 : len(sentence) + 4]
        assert asked - 3 == sentence.terminals[query.query]
        assert answer - 3 == sentence.terminals[query.target]
        parents = sentence.parents
        assert {
            "parent": parents[query.query] == query.target,
            "child": parents[query.target] == query.query,
            "sibling": parents[query.target] == parents[query.query] != -1
            and query.target != query.query,
        }[kind]
        if unambiguous:
            assert sentence.terminals[query.query] not in sentence.terminals[query.query + 1 :]
        assert "<- answer" in document.draw() and f"query: its {kind}?" in document.draw()


def test_heads_stand_beside_their_children():
    for side in ("left", "right"):
        for document in AssociativeTreecall(head_position=side).documents(
            100, generator=generator()
        ):
            for position, parent in enumerate(document.sentence.parents):
                assert parent == -1 or (parent < position) == (side == "left")


def test_sample_first_decides_what_is_uniform():
    # t0 t0 t1 t3 t2: t3 has two children to ask about, t2 one; so the first draw matters
    for first, share in (("query", 1 / 3), ("target", 1 / 2)):
        task = AssociativeTreecall(grammar=GOLDEN, sample_first=first)
        batch = task.sample(4000, generator=generator())
        got = (batch.answer == 5).float().mean()
        assert abs(got - share) < 4 * (share * (1 - share) / 4000) ** 0.5


def test_statistics_of_pcfg_easy():
    """Six grammars; a mean sentence of about 10 tokens follows from the paper's description."""
    lengths = []
    for seed in range(6):
        statistics = AssociativeTreecall(seed=seed).statistics(500, generator=generator())
        lengths.append(statistics["length"])
        assert 1 < statistics["depth"] <= 10 and statistics["kinds"] == {"parent": 1.0}
        assert 3 <= statistics["distinct"] <= min(20, statistics["length"])
        assert 0 < statistics["adjacent"] < 1 and statistics["distance"] > 0
        assert statistics["majority"] < 0.3 and statistics["longest"] < 500
    assert min(lengths) > 6 and max(lengths) < 20 and 8 < sum(lengths) / 6 < 14
    medium = AssociativeTreecall(max_rhs_len=10).statistics(300, generator=generator())
    assert 30 < medium["length"] < 100


@pytest.mark.parametrize(("max_rhs_len", "factor"), [(5, 1.0), (5, 2.0), (6, 4.0)])
def test_sentences_of_the_papers_length(max_rhs_len, factor):
    """27 to 41 tokens come from grammars in which terminals weigh as a class."""
    lengths = [
        AssociativeTreecall(
            max_rhs_len=max_rhs_len, terminal_occurrence_factor=factor, seed=seed
        ).statistics(200, generator=generator())["length"]
        for seed in range(16)
    ]
    assert 25 < sum(lengths) / 16 < 43


def test_chance_is_below_one_and_above_blind():
    task = AssociativeTreecall(grammar=GOLDEN)
    assert task.chance == pytest.approx(1 / 4) and task.blind_chance == 1 / 4


def test_holdout_splits_the_queried_pairs():
    task = AssociativeTreecall(holdout=0.3, unambiguous_queries=False, seed=1)
    asked = {}
    for split in ("train", "dev", "test"):
        batch = task.sample(500, split, generator=generator())
        query = batch.tokens.gather(1, batch.positions["query_item"][:, None])[:, 0]
        asked[split] = set(zip(query.tolist(), batch.answer.tolist(), strict=True))
    assert not asked["test"] & (asked["train"] | asked["dev"])
    assert 0.15 < len(asked["test"]) / len(asked["test"] | asked["train"]) < 0.45


def test_recursive_grammar_ends_and_keeps_the_bounds():
    task = AssociativeTreecall(
        grammar=RECURSIVE, unambiguous_queries=False, max_length=40, max_tree_depth=6
    )
    batch = task.sample(300, generator=generator())
    assert batch.tokens.shape[1] <= 40
    assert max(d.sentence.depth for d in task.documents(300, generator=generator())) <= 6


def test_documents_at_the_length_bound():
    task = AssociativeTreecall(max_length=12)
    assert task.max_sentence == 7
    batch = task.sample(500, generator=generator())
    assert batch.lengths.max() == 12


def test_corruption_puts_in_any_other_terminal():
    task = AssociativeTreecall(grammar=GOLDEN)
    batch = task.sample(300, generator=generator())
    corrupted = task.corrupt(batch, "target_item_orig", generator=generator())
    at = batch.positions["target_item_orig"][:, None]
    assert (corrupted.tokens.gather(1, at) != batch.tokens.gather(1, at)).all()
    assert set(corrupted.tokens.gather(1, at).flatten().tolist()) == {3, 4, 5, 6}


def test_fixed_set_pads_only_to_the_batch():
    documents = FixedSet(AssociativeTreecall(), 200, seed=0)
    batch = documents.next(16)
    assert batch.tokens.shape[1] == batch.lengths.max()
    assert (batch.tokens[~batch.mask] == 0).all() and (batch.labels[~batch.mask] == X).all()
    at = batch.positions["query_item"][:, None]
    assert torch.equal(batch.labels.gather(1, at)[:, 0], batch.answer)


def test_hand_made_grammar_is_kept_in_the_spec():
    spec = AssociativeTreecall(grammar=GOLDEN).to_json()
    assert spec["grammar"]["num_terminals"] == 4 and spec["num_terminals"] == 4
    assert AssociativeTreecall().to_json()["grammar"] is None


ONLY_SHORT = Grammar(2, ((Rule((0,), 1.0),),), ((0.0, 1.0),), (1.0,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(grammar=ONLY_SHORT), "shorter than 3 tokens: 2000"),
        (dict(grammar=RECURSIVE), "no query to ask"),
        (dict(grammar=RECURSIVE, max_tree_depth=0), "too deep: 2000"),
        (dict(grammar=GOLDEN, query_types=("sibling",), max_length=9), "too long"),
        (dict(grammar=GOLDEN, query_types=()), "must be different ones"),
        (dict(query_types=("parent", "parent")), "must be different ones"),
        (dict(query_types=("parents",)), "Did you mean 'parent'"),
        (dict(head_position="middle"), "Allowed: left, right"),
        (dict(sample_first="answer"), "Allowed: query, target"),
        (dict(holdout=1.0), "0 <= it < 1"),
        (dict(max_length=7), "max_length must be >= 8"),
        (dict(num_terminals=0), "num_terminals must be >= 1"),
    ],
)
def test_bad_settings_are_refused(options, message, as_shipped):
    with pytest.raises(TaskError, match=message):
        AssociativeTreecall(**options)


def test_queries_are_plain_values():
    assert dataclasses.astuple(Query("parent", 1, 2)) == ("parent", 1, 2)

"""AR: a golden document, a lookup solver, hold-out, layouts, and what is refused."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks import IGNORE_INDEX, AssociativeRecall

X = IGNORE_INDEX


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# keys are tokens 3..6, values 7..10; the pairs are k1 v2, k3 v0, k0 v1 and the second is asked
KEYS, VALUES = torch.tensor([[4, 6, 3]]), torch.tensor([[9, 7, 8]])
GOLDEN = {
    "key": (
        "<bos> k1 v2 k3 v0 k0 v1 <eos> k3 v0 <eos>",
        [1, 4, 9, 6, 7, 3, 8, 2, 6, 7, 2],
        [X, X, X, X, X, X, X, X, 7, X, X],
        dict(bos=0, query_item_orig=3, target_item_orig=4, divider=7, query_item=8, target_item=9),
    ),
    "value": (
        "<bos> k1 v2 k3 v0 k0 v1 <eos> v0 k3 <eos>",
        [1, 4, 9, 6, 7, 3, 8, 2, 7, 6, 2],
        [X, X, X, X, X, X, X, X, 6, X, X],
        dict(bos=0, query_item_orig=4, target_item_orig=3, divider=7, query_item=8, target_item=9),
    ),
}


@pytest.mark.parametrize("query_type", GOLDEN)
def test_golden_document(query_type):
    words, tokens, labels, positions = GOLDEN[query_type]
    task = AssociativeRecall(num_kv=8, num_pairs=3, query_type=query_type)
    batch = task.build(KEYS, VALUES, torch.tensor([1]))
    assert task.decode(batch.tokens[0]) == words.split()
    assert batch.tokens.tolist() == [tokens]
    assert batch.labels.tolist() == [labels]
    assert {name: pos.item() for name, pos in batch.positions.items()} == positions
    assert batch.answer.item() == tokens[-2]
    assert batch.lengths.item() == len(tokens) == task.max_length
    assert batch.all_labels().tolist() == [[*tokens[1:], X]]


def look_up(task: AssociativeRecall, tokens: list[int], pos: int) -> int:
    """Answer the query at `pos` from the tokens before it, as a reader would."""
    before = [token for token in tokens[:pos] if token > 2]
    partner = {}
    for first, second in zip(before[::2], before[1::2], strict=True):
        partner |= {first: second, second: first}
    return partner[tokens[pos]]


@pytest.mark.parametrize("query_type", ["key", "value"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"holdout": 0.4},
        {"num_queries": 3},
        {"num_queries": 5, "holdout": 0.4},
        {"num_queries": 12, "layout": "repeats"},
        {"num_queries": 12, "layout": "repeats", "holdout": 0.4},
        {"num_kv": 2, "num_pairs": 1},
        {"num_kv": 10},
        {"num_kv": 400, "num_pairs": 3},
    ],
    ids=str,
)
def test_every_label_follows_from_the_context(query_type, options):
    task = AssociativeRecall(**{"num_kv": 32, "num_pairs": 5, "query_type": query_type, **options})
    batch = task.sample(300, generator=generator())
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        for pos, label in enumerate(labels):
            assert label == IGNORE_INDEX or label == look_up(task, tokens, pos)


def test_pairs_are_distinct_and_named_positions_point_at_them():
    task = AssociativeRecall(num_kv=32, num_pairs=8)
    batch = task.sample(500, generator=generator())
    keys, values = batch.tokens[:, 1:17:2], batch.tokens[:, 2:17:2]
    for drawn, kind in ((keys, task.keys), (values, task.values)):
        assert all(len(set(row)) == 8 for row in drawn.tolist())
        assert drawn.min() == kind.start and drawn.max() == kind.stop - 1
    at = {name: batch.tokens.gather(1, pos[:, None])[:, 0] for name, pos in batch.positions.items()}
    assert (at["bos"] == 1).all() and (at["divider"] == 2).all()
    assert torch.equal(at["query_item_orig"], at["query_item"])
    assert torch.equal(at["target_item_orig"], at["target_item"])
    assert torch.equal(at["target_item"], batch.answer)


@pytest.mark.parametrize("num_kv", [16, 200])  # by sorting, by Floyd's method
def test_tokens_and_queries_are_uniform(num_kv):
    task = AssociativeRecall(num_kv=num_kv, num_pairs=4)
    batch = task.sample(20_000, generator=generator())
    for pos in (1, 7):
        counts = batch.tokens[:, pos].bincount(minlength=task.d_vocab)[3 : task.keys.stop].float()
        assert_uniform(counts)
    assert_uniform(((batch.positions["query_item_orig"] - 1) // 2).bincount(minlength=4).float())


def assert_uniform(counts: torch.Tensor) -> None:
    """Chi-square against equal counts, within 4 standard deviations of its mean."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5 + 4


def test_large_vocabulary_in_bounded_memory():
    task = AssociativeRecall(num_kv=8192, num_pairs=16)
    batch = task.sample(100_000, generator=generator())
    assert task.d_vocab == 8195 and batch.tokens.shape == (100_000, 37)
    keys = batch.tokens[:, 1:33:2].sort(dim=1).values
    assert (keys[:, 1:] > keys[:, :-1]).all()


def queried_pairs(task, batch) -> set[tuple[int, int]]:
    pairs = set()
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        for pos, label in enumerate(labels):
            if label != IGNORE_INDEX:
                pairs.add(
                    (tokens[pos], label) if task.query_type == "key" else (label, tokens[pos])
                )
    return pairs


@pytest.mark.parametrize(
    "options",
    [{}, {"query_type": "value"}, {"num_queries": 3}, {"num_queries": 9, "layout": "repeats"}],
    ids=str,
)
def test_holdout_splits_the_queried_pairs(options):
    task = AssociativeRecall(num_kv=32, num_pairs=4, holdout=0.25, seed=7, **options)
    asked = {
        split: queried_pairs(task, task.sample(6000, split, generator=generator()))
        for split in ("train", "dev", "test")
    }
    assert asked["train"] == asked["dev"]
    assert not asked["train"] & asked["test"]
    assert len(asked["train"] | asked["test"]) == 16 * 16
    assert 0.15 < len(asked["test"]) / 256 < 0.35


def test_held_out_pairs_stand_once_in_training_documents_whatever_the_loss():
    """Asked nowhere, with the answer beside it or not: neither among the repeats nor behind."""
    task = AssociativeRecall(
        num_kv=32, num_pairs=4, num_queries=12, layout="repeats", holdout=0.4, seed=7
    )
    again = {}
    for split in ("train", "test"):
        tokens = task.sample(2000, split, generator=generator()).tokens
        keys, values = tokens[:, 1:31].unflatten(1, (15, 2)).unbind(2)  # 4 pairs, 11 repeats
        slot = torch.arange(15)
        repeated = ((keys[:, :, None] == keys[:, None, :]) & (slot[:, None] > slot)).any(2)
        assert (repeated.sum(1) == 11).all()
        again[split] = (~task.eligible(keys, values, "train"))[repeated].float().mean().item()
    assert again == {"train": 0.0, "test": 1.0}


def test_holdout_depends_on_the_seed_and_keeps_its_fraction():
    keys = torch.arange(3, 503).repeat_interleave(500).view(1, -1)
    values = torch.arange(503, 1003).repeat(500).view(1, -1)
    chosen = [
        AssociativeRecall(num_kv=1000, holdout=0.2, seed=seed).eligible(keys, values, "test")
        for seed in (0, 0, 1)
    ]
    assert torch.equal(chosen[0], chosen[1])
    for mask in chosen:
        assert abs(mask.float().mean() - 0.2) < 4 * (0.2 * 0.8 / 250_000) ** 0.5
    both = (chosen[0] & chosen[2]).float().mean()
    assert abs(both - 0.04) < 4 * (0.04 * 0.96 / 250_000) ** 0.5
    rows = chosen[0].view(500, 500).float()
    for means in (rows.mean(0), rows.mean(1)):  # no key or value is favoured
        assert abs(means.std() - (0.2 * 0.8 / 500) ** 0.5) < 0.003


def test_holdout_that_leaves_nothing_is_refused():
    for options in ({"holdout": 1e-6}, {"num_kv": 2, "num_pairs": 1, "holdout": 0.01}):
        task = AssociativeRecall(**options)
        assert len(task.sample(5, "train", generator=generator())) == 5
        with pytest.raises(TaskError, match="may ask for"):
            task.sample(5, "test", generator=generator())


def test_end_layout_asks_different_pairs_and_trains_on_each():
    task = AssociativeRecall(num_kv=32, num_pairs=5, num_queries=3)
    batch = task.sample(200, generator=generator())
    assert batch.tokens.shape[1] == task.max_length == 19
    trained = batch.labels != IGNORE_INDEX
    assert trained.sum(0).nonzero().squeeze(1).tolist() == [12, 14, 16]
    asked = batch.tokens[:, 12:17:2]
    assert all(len(set(row)) == 3 for row in asked.tolist())
    assert (batch.positions["query_item"] == 16).all()


def test_repeats_layout_trains_on_repeated_keys_only():
    task = AssociativeRecall(num_kv=64, num_pairs=8, num_queries=17, layout="repeats")
    batch = task.sample(200, generator=generator())
    assert batch.tokens.shape[1] == task.max_length == 3 + 2 * 25
    kind = task.keys
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        keys = [token for token in tokens if token in kind]
        assert len(set(keys)) == 8 and len(keys) == 25
        seen = set()
        for token, label in zip(tokens, labels, strict=True):
            assert (label != IGNORE_INDEX) == (token in seen)
            if token in kind:
                seen.add(token)


def test_query_item_orig_is_the_first_showing_of_the_pair():
    task = AssociativeRecall(num_kv=64, num_pairs=8, num_queries=9, layout="repeats")
    batch = task.sample(200, generator=generator())
    for i, tokens in enumerate(batch.tokens.tolist()):
        query = tokens[batch.positions["query_item"][i]]
        assert tokens.index(query) == batch.positions["query_item_orig"][i]


def test_single_query_gives_the_paper_documents():
    plain = AssociativeRecall(num_kv=64, num_pairs=8)
    task = AssociativeRecall(num_kv=64, num_pairs=8, num_queries=17, layout="repeats")
    assert task.single_query() == plain


def test_corruption_is_fresh_for_the_document():
    task = AssociativeRecall(num_kv=18, num_pairs=8)
    batch = task.sample(300, generator=generator())
    for name, kind in (("query_item_orig", task.keys), ("target_item_orig", task.values)):
        corrupted = task.corrupt(batch, name, generator=generator())
        fresh = corrupted.tokens.gather(1, batch.positions[name][:, None])
        assert not (batch.tokens == fresh).any()
        # 9 tokens of the kind, 8 of them in the document: the fresh one is the one left
        inside = (batch.tokens >= kind.start) & (batch.tokens < kind.stop)
        present = (batch.tokens * inside)[:, 1:17].sum(1)
        assert torch.equal(fresh[:, 0], sum(kind) - present)


def test_fresh_tokens_are_uniform():
    task = AssociativeRecall(num_kv=24, num_pairs=2)
    batch = task.build(
        torch.tensor([[4, 7]]).repeat(9000, 1),
        torch.tensor([[15, 16]]).repeat(9000, 1),
        torch.zeros(9000, dtype=torch.long),
    )
    corrupted = task.corrupt(batch, "query_item_orig", generator=generator())
    counts = corrupted.tokens[:, 1].bincount(minlength=15)[3:15]
    assert counts[[1, 4]].tolist() == [0, 0]
    assert_uniform(counts[counts > 0].float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv": 7, "num_pairs": 2}, "must be even"),
        ({"num_kv": 0}, "must be even"),
        ({"num_kv": 8, "num_pairs": 5}, "gives 4 of each; allowed: 1..4"),
        ({"num_pairs": 0}, "num_pairs=0"),
        ({"query_type": "vale"}, "did you mean 'value'"),
        ({"layout": "repeat"}, "did you mean 'repeats'"),
        ({"holdout": 1.0}, "0 <= it < 1"),
        ({"num_queries": 0}, "num_queries must be >= 1"),
    ],
)
def test_bad_settings_are_refused(options, message, as_shipped):
    with pytest.raises(TaskError, match=message):
        AssociativeRecall(**options)


def test_corruption_without_a_fresh_token_is_refused():
    task = AssociativeRecall(num_kv=16, num_pairs=8)
    batch = task.sample(4, generator=generator())
    with pytest.raises(TaskError, match="4 documents hold all 8 tokens"):
        task.corrupt(batch, "query_item_orig", generator=generator())


def test_more_queries_than_pairs_ask_each_once_before_any_again():
    task = AssociativeRecall(num_kv=16, num_pairs=3, num_queries=8)
    batch = task.sample(64, "train", generator=torch.Generator().manual_seed(0))
    asked = batch.tokens[:, 2 + 2 * 3 : -1 : 2]
    assert asked.shape == (64, 8)
    assert all(len(set(row[:3])) == 3 for row in asked.tolist())
    assert all(set(row) == set(row[:3]) for row in asked.tolist())
    assert (
        len({tuple(row[3:]) for row in (asked == asked[:, :1]).tolist()}) > 8
    )  # in no fixed order

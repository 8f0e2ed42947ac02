"""MQAR: every label follows from the context, fillers stay apart, gaps follow the power law."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks import IGNORE_INDEX, MultiQueryAssociativeRecall


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_pairs": 1, "input_seq_len": 4},
        {"num_pairs": 16, "input_seq_len": 64},  # the most pairs for the length
        {"num_kv": 16, "num_pairs": 8, "input_seq_len": 128},  # and for the vocabulary
        {"num_passes": 3, "input_seq_len": 96},
        {"num_fillers": 1, "power_a": 1.0},
    ],
    ids=str,
)
def test_every_label_follows_from_the_context(options):
    task = MultiQueryAssociativeRecall(**options)
    batch = task.sample(1000, generator=generator())
    context, fillers = 2 * task.num_pairs * task.num_passes, task.fillers
    assert batch.tokens.shape[1] == task.max_length == task.input_seq_len + 3
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        slots = dict(zip(tokens[1 : 1 + context : 2], tokens[2 : 2 + context : 2], strict=True))
        asked = [pos for pos, label in enumerate(labels) if label != IGNORE_INDEX]
        assert sorted(tokens[pos] for pos in asked) == sorted(slots)
        assert all(labels[pos] == slots[tokens[pos]] for pos in asked)
        rest = set(range(context + 2, len(tokens) - 1)) - {p + i for p in asked for i in (0, 1)}
        assert all(tokens[pos] in fillers for pos in rest)
        assert tokens[1 : 1 + context].count(tokens[asked[0]]) == task.num_passes


def test_kinds_are_disjoint_and_fill_the_vocabulary():
    task = MultiQueryAssociativeRecall(num_kv=12, num_pairs=2, num_fillers=5)
    kinds = [*range(3), *task.keys, *task.values, *task.fillers]
    assert kinds == list(range(task.d_vocab))
    assert task.decode([3, 9, 15]) == ["k0", "v0", "f0"]


def test_golden_document():
    task = MultiQueryAssociativeRecall(
        num_kv=2, num_pairs=1, input_seq_len=4, num_fillers=1, num_passes=1
    )
    batch = task.sample(2, generator=generator())
    assert batch.tokens.tolist() == [[1, 3, 4, 2, 3, 4, 2]] * 2
    x = IGNORE_INDEX
    assert batch.labels.tolist() == [[x, x, x, x, 4, x, x]] * 2
    assert {name: pos.tolist() for name, pos in batch.positions.items()} == {
        "bos": [0, 0],
        "query_item_orig": [1, 1],
        "target_item_orig": [2, 2],
        "divider": [3, 3],
        "query_item": [4, 4],
        "target_item": [5, 5],
    }


@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0])
def test_gaps_follow_the_power_law(power_a):
    task = MultiQueryAssociativeRecall(num_pairs=1, input_seq_len=22, power_a=power_a)
    batch = task.sample(20_000, generator=generator())
    slots = (batch.positions["query_item"] - batch.positions["divider"] - 1) // 2
    counts = slots.bincount(minlength=10).double()
    weights = torch.arange(1, 11).double() ** (power_a - 1)
    expected = 20_000 * weights / weights.sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 9 + 4 * 18**0.5


def test_slots_are_drawn_without_replacement_by_weight():
    task = MultiQueryAssociativeRecall(num_pairs=2, input_seq_len=10, power_a=0.01)
    batch = task.sample(20_000, generator=generator())
    asked = (batch.labels != IGNORE_INDEX).nonzero()[:, 1].view(20_000, 2)
    pairs = ((asked - 6) // 2).tolist()
    w = [1, 2**-0.99, 3**-0.99]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        a, b, total = w[first], w[second], sum(w)
        share = a / total * b / (total - a) + b / total * a / (total - b)
        got = sum(pair == [first, second] for pair in pairs)
        assert abs(got - 20_000 * share) < 4 * (20_000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv": 9}, "must be even"),
        ({"num_kv": 8}, "gives 4 of each; allowed: 1..4"),
        ({"num_pairs": 0}, "num_pairs=0"),
        ({"num_pairs": 17}, "input_seq_len must be even and >= 68"),
        ({"num_passes": 4}, "input_seq_len must be even and >= 80"),
        ({"input_seq_len": 63}, "must be even"),
        ({"num_fillers": 0}, "num_fillers must be >= 1"),
        ({"power_a": 0.0}, "power_a > 0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(TaskError, match=message):
        MultiQueryAssociativeRecall(**options)

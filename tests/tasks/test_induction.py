"""Induction sequences: copies, gaps, labels and positions."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks import IGNORE_INDEX, InductionSequences

X = IGNORE_INDEX


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bos", [True, False])
def test_golden_layout(bos):
    task = InductionSequences(num_tokens=9, period=3, gap=1, num_copies=3, bos=bos)
    batch = task.sample(1, generator=generator())
    tokens = batch.tokens[0].tolist()[bos:]
    a, b, c, d, *_ = tokens
    e = tokens[7]
    assert len({a, b, c, d, e}) == 5
    assert tokens == [a, b, c, d, a, b, c, e, a, b, c]
    assert batch.labels[0].tolist() == [X] * bos + [X, X, X, X, b, c, X, X, b, c, X]
    offset = int(batch.positions["query_item_orig"]) - bos
    assert {name: pos.item() for name, pos in batch.positions.items()} == {
        **({"bos": 0} if bos else {}),
        "query_item_orig": bos + offset,
        "target_item_orig": bos + offset + 1,
        "divider": bos + 7,
        "query_item": bos + 8 + offset,
        "target_item": bos + 9 + offset,
    }
    assert batch.answer.item() == [b, c][offset]
    assert task.max_length == bos + 11


@pytest.mark.parametrize(
    "options",
    [{}, {"gap": 5}, {"num_copies": 4}, {"period": 2}, {"num_tokens": 16}, {"bos": False}],
)
def test_every_label_is_what_came_next_before(options):
    task = InductionSequences(**options)
    batch = task.sample(100, generator=generator())
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        for pos, label in enumerate(labels):
            if label != IGNORE_INDEX:
                assert label == tokens[tokens.index(tokens[pos], 0, pos) + 1]
    trained = (batch.labels != IGNORE_INDEX).sum(1)
    assert (trained == (task.num_copies - 1) * (task.period - 1)).all()


def test_every_token_with_a_successor_is_asked():
    batch = InductionSequences(period=4).sample(500, generator=generator())
    assert set(batch.positions["query_item_orig"].tolist()) == {1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 1}, "period and num_copies must be >= 2"),
        ({"num_copies": 1}, "period and num_copies must be >= 2"),
        ({"gap": -1}, "gap >= 0"),
        ({"period": 65}, "has 65 distinct tokens"),
        ({"gap": 30, "num_copies": 3}, "has 76 distinct tokens"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(TaskError, match=message):
        InductionSequences(**options)

"""Selective copying: the items come back in order, whatever the noise between them."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks import IGNORE_INDEX, SelectiveCopying

X = IGNORE_INDEX


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_golden_document_without_noise():
    task = SelectiveCopying(num_tokens=4, num_items=3, context_length=3)
    batch = task.sample(1, generator=generator())
    a, b, c = batch.tokens[0, 1:4].tolist()
    assert batch.tokens[0].tolist() == [1, a, b, c, 2, a, b, c, 2]
    assert batch.labels[0].tolist() == [X, X, X, X, a, b, c, X, X]
    asked = int(batch.positions["query_item_orig"]) - 1
    assert {name: pos.item() for name, pos in batch.positions.items()} == {
        "bos": 0,
        "query_item_orig": 1 + asked,
        "target_item_orig": 2 + asked,
        "divider": 4,
        "query_item": 5 + asked,
        "target_item": 6 + asked,
    }
    assert batch.answer.item() == [b, c][asked]
    assert task.max_length == 9 and task.decode([3, 4]) == ["~", "x0"]


def test_items_come_back_in_order():
    task = SelectiveCopying()
    batch, kind = task.sample(500, generator=generator()), task.items
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        items = [token for token in tokens[1:33] if token in kind]
        assert len(items) == 8 and set(tokens[1:33]) - set(items) == {3}
        assert tokens[34:42] == items == [label for label in labels if label != IGNORE_INDEX]
    places = (batch.tokens[:, 1:33] != 3).double().mean(0)
    assert (places - 0.25).abs().max() < 4 * (0.25 * 0.75 / 500) ** 0.5


def test_corruption_puts_in_another_item():
    task = SelectiveCopying(num_tokens=2, num_items=4, context_length=4)
    batch = task.sample(50, generator=generator())
    corrupted = task.corrupt(batch, "target_item_orig", generator=generator())
    at = batch.positions["target_item_orig"][:, None]
    assert torch.equal(corrupted.tokens.gather(1, at), 9 - batch.tokens.gather(1, at))


@pytest.mark.parametrize(
    "options", [{"num_tokens": 1}, {"num_items": 1}, {"num_items": 33}], ids=str
)
def test_bad_settings_are_refused(options):
    with pytest.raises(TaskError, match="num_tokens must be >= 2 and 2 <= num_items"):
        SelectiveCopying(**options)

"""Streams resume exactly, and a fixed set is really fixed."""

from __future__ import annotations

import json

import pytest
import torch

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks import AssociativeRecall, FixedSet, Stream

TASK = AssociativeRecall(num_kv=32, num_pairs=3)


@pytest.mark.parametrize("make", [Stream, lambda task, seed: FixedSet(task, 10, seed)])
def test_resuming_goes_on_exactly(make):
    stream = make(TASK, 3)
    for _ in range(3):
        stream.next(4)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = make(TASK, 3)
    resumed.load_state_dict(state)
    for _ in range(5):
        want, got = stream.next(4), resumed.next(4)
        assert torch.equal(want.tokens, got.tokens)
        assert torch.equal(want.positions["query_item_orig"], got.positions["query_item_orig"])


def test_stream_is_seeded_and_never_repeats_a_batch():
    batches = [Stream(TASK, seed).next(8).tokens for seed in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], batches[2])
    stream = Stream(TASK, 0)
    drawn = torch.stack([stream.next(8).tokens for _ in range(50)])
    assert len(drawn.unique(dim=0)) == 50


def test_fixed_set_shows_every_document_once_a_pass_in_new_orders():
    documents = FixedSet(TASK, 10, seed=0)
    stored = documents[torch.arange(10)].tokens
    passes = []
    for _ in range(3):
        shown = torch.cat([documents.next(5).tokens for _ in range(2)])
        passes.append(shown)
        assert torch.equal(shown.unique(dim=0), stored.unique(dim=0))
    assert not torch.equal(passes[0], passes[1]) and not torch.equal(passes[1], passes[2])


def test_batches_are_full_across_the_end_of_a_pass():
    documents = FixedSet(TASK, 10, seed=0)
    assert [len(documents.next(7)) for _ in range(4)] == [7, 7, 7, 7]
    assert len(documents.next(25)) == 25


def test_packing_gives_the_documents_back():
    documents = FixedSet(TASK, 10, seed=0)
    batch = documents[torch.tensor([4, 2])]
    assert batch.tokens.dtype == torch.long
    query = batch.positions["query_item"][:, None]
    assert torch.equal(batch.labels.gather(1, query)[:, 0], batch.answer)
    assert ((batch.labels != -100).sum(1) == 1).all()


def test_splits_reach_the_stream():
    task = AssociativeRecall(num_kv=32, num_pairs=4, holdout=0.3)
    for stream in (Stream(task, 0, "test"), FixedSet(task, 40, 0, "test")):
        batch = stream.next(40)
        at = [
            batch.tokens.gather(1, batch.positions[n][:, None])
            for n in ("query_item", "target_item")
        ]
        assert task.eligible(*at, "test").all()


def test_wrong_states_are_refused(as_shipped):
    with pytest.raises(TaskError, match="seed=3, but this one has seed=4"):
        Stream(TASK, 4).load_state_dict(Stream(TASK, 3).state_dict())
    with pytest.raises(TaskError, match="lacks 'size'"):
        FixedSet(TASK, 4, 0).load_state_dict(Stream(TASK, 0).state_dict())
    with pytest.raises(TaskError, match="size=0; allowed: an integer >= 1"):
        FixedSet(TASK, 0, 0)
    with pytest.raises(TaskError, match="batch_size=0; allowed: an integer >= 1"):
        FixedSet(TASK, 4, 0).next(0)
    with pytest.raises(TaskError, match="batch_size=0; allowed: an integer >= 1"):
        Stream(TASK, 0).next(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"used": 11}, r"used=11; allowed: 0\.\.10"),
        ({"used": -2}, "used=-2"),
        ({"pass": -3}, "pass=-3"),
        (None, "a mapping, as of state_dict; got None"),
    ],
)
def test_a_damaged_state_is_named(change, message, as_shipped):
    fixed = FixedSet(TASK, 10, 0)
    state = None if change is None else {**fixed.state_dict(), **change}
    with pytest.raises(TaskError, match=message):
        fixed.load_state_dict(state)
    with pytest.raises(TaskError, match="batches=-5"):
        Stream(TASK, 0).load_state_dict({"seed": 0, "batches": -5})

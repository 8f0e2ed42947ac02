"""Every task keeps the contract that analyses rely on. Add a task to TASKS and it is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks import (
    IGNORE_INDEX,
    PAPER_TASKS,
    AssociativeRecall,
    AssociativeTreecall,
    InductionSequences,
    MultiQueryAssociativeRecall,
    SelectiveCopying,
    Task,
    paper_task,
)
from tests.snippets import blocks

TASKS = [
    AssociativeRecall(num_kv=64, num_pairs=8),
    AssociativeRecall(num_kv=64, num_pairs=8, query_type="value", holdout=0.3),
    AssociativeRecall(num_kv=64, num_pairs=8, num_queries=4),
    AssociativeRecall(num_kv=64, num_pairs=8, num_queries=9, layout="repeats"),
    AssociativeTreecall(),
    AssociativeTreecall(query_types=("sibling",), sample_first="target", head_position="left"),
    AssociativeTreecall(
        query_types=("parent", "child"), unambiguous_queries=False, holdout=0.2, seed=3
    ),
    MultiQueryAssociativeRecall(),
    MultiQueryAssociativeRecall(num_passes=2, num_fillers=1, power_a=1.0),
    InductionSequences(),
    InductionSequences(gap=3, num_copies=3, bos=False),
    SelectiveCopying(),
    SelectiveCopying(num_tokens=2, num_items=3, context_length=5),
]


@pytest.fixture(params=TASKS, ids=lambda task: f"{task.name}-{TASKS.index(task)}")
def task(request) -> Task:
    return request.param


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_batch_has_the_declared_shapes(task):
    batch = task.sample(50, generator=generator())
    assert len(batch) == 50
    assert batch.tokens.shape == batch.labels.shape
    assert batch.tokens.shape[1] <= task.max_length
    assert set(batch.positions) == set(task.position_names)
    assert {"query_item_orig", "target_item_orig", "query_item"} <= set(task.position_names)
    assert all(pos.shape == (50,) for pos in batch.positions.values())
    assert all(bool((pos < batch.lengths).all()) for pos in batch.positions.values())
    assert batch.tokens[batch.mask].min() >= 1
    assert (batch.tokens[~batch.mask] == 0).all()
    assert batch.tokens.max() < task.d_vocab


def test_answer_is_the_label_at_the_query_and_the_next_token(task):
    batch = task.sample(50, generator=generator())
    query = batch.positions[task.answer_position].unsqueeze(1)
    assert torch.equal(batch.labels.gather(1, query).squeeze(1), batch.answer)
    assert torch.equal(batch.tokens.gather(1, query + 1).squeeze(1), batch.answer)
    assert torch.equal(
        batch.tokens.gather(1, batch.positions["target_item"][:, None])[:, 0], batch.answer
    )


def test_labels_are_next_tokens(task):
    batch = task.sample(50, generator=generator())
    following = torch.full_like(batch.tokens, IGNORE_INDEX)
    following[:, :-1] = batch.tokens[:, 1:]
    trained = batch.labels != IGNORE_INDEX
    assert torch.equal(batch.labels[trained], following[trained])
    all_labels = batch.all_labels()
    assert torch.equal((all_labels != IGNORE_INDEX).sum(1), batch.lengths - 1)
    assert torch.equal(all_labels[trained], batch.labels[trained])


def test_corruption_changes_one_token_to_another_of_its_kind(task):
    batch = task.sample(50, generator=generator())
    for name in task.corruptions:
        corrupted = task.corrupt(batch, name, generator=generator(1))
        changed = corrupted.tokens != batch.tokens
        pos = batch.positions[name]
        assert torch.equal(changed.nonzero()[:, 1], pos)
        fresh = corrupted.tokens[changed]
        kind = task.token_range(name)
        assert fresh.min() >= kind.start and fresh.max() < kind.stop
        assert torch.equal(corrupted.labels, batch.labels)
        assert torch.equal(corrupted.answer, batch.answer)
        assert corrupted.positions is batch.positions


def test_same_seed_same_documents(task):
    first, again, other = (task.sample(50, generator=generator(s)) for s in (3, 3, 4))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.labels, again.labels)
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)


def test_sampling_leaves_the_global_generator_alone(task):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    task.corrupt(task.sample(5, generator=generator()), "query_item_orig", generator=generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_spec_survives_json(task):
    again = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert again == task
    assert torch.equal(
        again.sample(20, generator=generator()).tokens,
        task.sample(20, generator=generator()).tokens,
    )


def test_single_query_keeps_the_vocabulary_and_fits_the_context(task):
    single = task.single_query()
    assert single.d_vocab == task.d_vocab and single.max_length <= task.max_length
    assert single.single_query() == single


def test_decode_and_describe_are_readable(task):
    batch = task.sample(1, generator=generator())
    words = task.decode(batch.tokens[0])
    assert len(words) == batch.tokens.shape[1] and all(words)
    assert len(set(task.token_names)) == task.d_vocab
    assert words == [task.token_names[token] for token in batch.tokens[0]]
    assert len(task.describe()) > 20
    assert 0 < task.blind_chance <= task.chance <= 1


def test_slices_index_tensors_and_devices(task):
    batch = task.sample(10, generator=generator())
    assert torch.equal(batch[2:4].tokens, batch.tokens[2:4])
    assert torch.equal(batch[torch.tensor([7, 1])].answer, batch.answer[[7, 1]])
    assert torch.equal(
        batch[batch.answer == batch.answer[0]].positions["query_item"][:1],
        batch.positions["query_item"][:1],
    )
    assert batch.to("meta").tokens.is_meta and batch.to("meta").positions["query_item"].is_meta
    assert batch[:1].trim().tokens.shape[1] == batch.lengths[0]


def test_errors_say_what_is_allowed(task, as_shipped):
    batch = task.sample(5, generator=generator())
    with pytest.raises(TaskError, match="n=0; allowed: an integer >= 1"):
        task.sample(0, generator=generator())
    with pytest.raises(TaskError, match="did you mean 'train'"):
        task.sample(1, "trian", generator=generator())
    with pytest.raises(TaskError, match="manual_seed"):
        task.sample(1, generator=None)
    with pytest.raises(TaskError, match="manual_seed"):
        task.corrupt(batch, "query_item_orig", generator=None)
    with pytest.raises(TaskError, match="did you mean 'query_item_orig'"):
        task.corrupt(batch, "query_item_origin", generator=generator())
    with pytest.raises(TaskError, match="not in the vocabulary"):
        task.decode([task.d_vocab])
    with pytest.raises(TaskError, match="batch axis"):
        batch[0]


def test_unknown_specs_are_refused(as_shipped):
    with pytest.raises(TaskError, match="did you mean 'associative_recall'"):
        Task.from_json({"task": "asociative_recall"})
    with pytest.raises(TaskError, match="did you mean 'num_pairs'"):
        Task.from_json({"task": "associative_recall", "num_pair": 3})


def test_named_positions_line_up(task):
    batch = task.sample(50, generator=generator())
    at = {name: batch.tokens.gather(1, pos[:, None])[:, 0] for name, pos in batch.positions.items()}
    assert torch.equal(at["query_item_orig"], at["query_item"])
    assert torch.equal(at["target_item_orig"], at["target_item"])
    order = [batch.positions[name] for name in ("divider", "query_item", task.answer_position)]
    assert (order[0] < order[1]).all() and (order[1] <= order[2]).all()
    assert (batch.positions["query_item_orig"] <= order[0]).all()
    assert "bos" not in at or (at["bos"] == 1).all()


def test_a_corrupted_key_leaves_no_way_to_the_answer():
    """What is evaluated on shows the queried key once: restoring it is what brings it back."""
    for task in TASKS:
        if not isinstance(task, AssociativeRecall | MultiQueryAssociativeRecall):
            continue
        batch = task.single_query().sample(50, "test", generator=generator())
        corrupted = task.single_query().corrupt(batch, "query_item_orig", generator=generator(1))
        query = batch.tokens.gather(1, batch.positions["query_item"][:, None])
        assert ((corrupted.tokens == query).sum(1) == 1).all()


@pytest.mark.parametrize("setting", PAPER_TASKS)
def test_paper_settings(setting):
    task = paper_task(setting)
    sizes = {
        "ar_32": 8195,
        "ar_gen": 8195,
        "pcfg_easy": 23,
        "pcfg_easy_8192": 8195,
        "pcfg_medium": 23,
        "sibling": 23,
    }
    assert task.d_vocab == sizes[setting] and task.max_length <= 1024
    assert len(task.sample(10, generator=generator())) == 10
    assert getattr(task, "holdout", 0) == (0.2 if setting == "ar_gen" else 0)


def test_paper_settings_can_be_changed_and_are_checked():
    assert paper_task("ar_32", num_pairs=4).num_pairs == 4
    with pytest.raises(TaskError, match="did you mean 'ar_32'"):
        paper_task("ar_3")
    with pytest.raises(TaskError, match="did you mean 'num_pairs'"):
        paper_task("ar_32", num_pair=4)


def test_the_task_that_contributing_shows_keeps_the_contract(monkeypatch):
    others = {name: kind for name, kind in Task._by_name.items() if name != "first_token"}
    monkeypatch.setattr(Task, "_by_name", others)
    page = Path(__file__).parents[2] / "CONTRIBUTING.md"
    (block,) = [b for b in blocks(page, "python") if b.text.startswith("# tasks/")]
    assert block.text.count("\n") <= 45
    names: dict[str, Any] = {}
    exec(compile(block.text, str(page), "exec"), names)
    shown = names["FirstToken"]()
    test_batch_has_the_declared_shapes(shown)
    assert Task.from_json(shown.to_json()) == shown
    batch = shown.sample(20, generator=generator())
    changed = shown.corrupt(batch, "target_item_orig", generator=generator(1))
    assert (changed.tokens[:, 1] != batch.answer).all()
    assert (batch.tokens[:, 1] == batch.answer).all()
    assert shown.decode(batch.tokens[0])[5:7] == ["<eos>", "?"]

"""Wrong settings and arguments of tasks are refused by name, built by hand or read from JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hooked_ssm.errors import HookedSSMError, TaskError
from hooked_ssm.tasks import (
    AssociativeRecall,
    AssociativeTreecall,
    FixedSet,
    Grammar,
    Rule,
    Stream,
    Task,
    TaskBatch,
)
from hooked_ssm.tasks.base import SPECIAL_TOKENS
from hooked_ssm.tasks.treecall_documents import document_statistics
from tests.tasks.test_contract import TASKS, generator

pytestmark = pytest.mark.usefixtures("as_shipped")

KINDS = {type(task): task for task in TASKS}.values()
NAN = float("nan")
WRONG: dict[str, list[Any]] = {
    "int": [True, "3", 1.5, NAN, None, [3], -(10**6)],
    "Seed": [True, "3", 1.5, NAN, None, [3], -1],
    "float": [True, "0.1", NAN, float("inf"), None, -0.5],
    "float | None": ["0.1", NAN, True, -1.0],
    "bool": [1, "yes", None],
    "Grammar | None": ["grammar.json", {"rules": 1}],
}
CASES = [
    (task, field.name, value)
    for task in KINDS
    for field in fields(task)
    for value in WRONG.get(field.type, [7, ["?"], "?", None])
]


@pytest.mark.parametrize(("task", "name", "value"), CASES)
def test_wrong_fields_are_refused_by_name(task, name, value):
    with pytest.raises(TaskError, match=name):
        type(task)(**{name: value})
    values = {**task.to_json(), name: value}
    with pytest.raises(TaskError, match=name if value != {"rules": 1} else "grammar"):
        Task.from_json(json.loads(json.dumps(values)))


def test_numbers_of_numpy_become_plain():
    task = TASKS[0].from_json({**TASKS[0].to_json(), "num_pairs": np.int64(2)})
    assert json.loads(json.dumps(task.to_json()))["num_pairs"] == 2


@pytest.mark.parametrize("spec", [None, "associative_recall", [], {}, {"task": 3}])
def test_what_is_no_spec(spec):
    with pytest.raises(TaskError, match="a mapping|unknown task"):
        Task.from_json(spec)


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n=0; allowed: an integer >= 1"),
        ({"n": -3}, "n=-3"),
        ({"n": "3"}, "n='3'"),
        ({"n": True}, "n=True"),
        ({"n": 2.0}, "n=2.0"),
        ({"split": "tests"}, "unknown split 'tests'; did you mean 'test'"),
        ({"split": None}, "split=None"),
        ({"generator": None}, r"generator=None.*manual_seed\(0\)"),
        ({"generator": 0}, "generator=0"),
    ],
)
def test_samples(task, arguments, message):
    given = {"n": 2, "generator": generator(), **arguments}
    for draw in (task.sample, *([task.documents] if hasattr(task, "documents") else [])):
        with pytest.raises(TaskError, match=message):
            draw(given.pop("n"), **given) if "n" not in arguments else draw(**given)
        given = {"n": 2, "generator": generator(), **arguments}


@pytest.mark.parametrize("task", KINDS)
def test_an_empty_batch_stays_one_everywhere(task):
    empty = task.sample(3, generator=generator())[:0]
    assert len(empty) == len(empty.trim()) == len(empty.to("cpu")) == len(empty[:1]) == 0
    assert empty.mask.shape == empty.all_labels().shape == empty.tokens.shape
    assert len(task.corrupt(empty, "query_item_orig", generator=generator())) == 0
    assert len(FixedSet(task, 3, 0)[torch.zeros(0, dtype=torch.long)]) == 0


@pytest.mark.parametrize("index", [0, np.int64(1), torch.tensor(1), True])
def test_a_single_document_keeps_its_axis(index):
    batch = TASKS[0].sample(3, generator=generator())
    with pytest.raises(TaskError, match="would drop the batch axis"):
        batch[index]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens", lambda x: x.float(), r"tokens=float32 .*\.long\(\)"),
        ("labels", lambda x: x[:, 1:], "pos is .* but it is .* in tokens"),
        ("answer", lambda x: x[:2], "batch is 2; but it is 3 in tokens"),
        ("lengths", lambda x: x[:, None], "lengths=int64"),
        ("positions", lambda x: {**x, "bos": x["bos"][:1]}, r"positions\['bos'\].*batch is 1"),
        ("positions", lambda x: {**x, "bos": 0}, "positions"),
    ],
)
def test_batches_that_do_not_fit_together(name, change, message):
    batch = TASKS[0].sample(3, generator=generator())
    with pytest.raises(TaskError, match=message):
        TaskBatch(**{**vars(batch), name: change(getattr(batch, name))})


def test_corruptions_and_tokens():
    task = TASKS[0]
    batch = task.sample(2, generator=generator())
    with pytest.raises(TaskError, match="batch=int64"):
        task.corrupt(batch.tokens, "query_item_orig", generator=generator())
    with pytest.raises(TaskError, match="generator=None"):
        task.corrupt(batch, "query_item_orig", generator=None)
    lacking = TaskBatch(**{**vars(batch), "positions": {"bos": batch.positions["bos"]}})
    with pytest.raises(TaskError, match="unknown position of the batch 'query_item_orig'"):
        task.corrupt(lacking, "query_item_orig", generator=generator())
    for tokens in (batch.tokens, ["a"], [1.5], 3):
        with pytest.raises(TaskError, match="tokens="):
            task.decode(tokens)


@pytest.mark.parametrize("wrong", [0, -1, True, "3", 2.0, None])
def test_streams(wrong):
    for make in (lambda: Stream(TASKS[0], 0), lambda: FixedSet(TASKS[0], 4, 0)):
        with pytest.raises(TaskError, match="batch_size="):
            make().next(wrong)
    with pytest.raises(TaskError, match="size="):
        FixedSet(TASKS[0], wrong, 0)
    state = Stream(TASKS[0], 0).state_dict()
    for value in ("1", None, 1.5):
        with pytest.raises(TaskError, match=f"batches={value!r}"):
            Stream(TASKS[0], 0).load_state_dict({**state, "batches": value})


@pytest.mark.parametrize("probability", [NAN, "1", True, None])
def test_grammars(probability, tmp_path):
    with pytest.raises(TaskError, match="probability="):
        Rule((0,), probability)
    with pytest.raises(TaskError, match="heads="):
        Grammar(1, ((Rule((0,), 1.0),),), ((probability,),), (1.0,))
    for spec in (None, [], "x", {"num_terminals": 1, "rules": 3, "heads": 1, "start": 1}):
        with pytest.raises(TaskError, match="grammar"):
            Grammar.from_json(spec)
    (tmp_path / "bad.json").write_text("{")
    for name, message in (("bad.json", "no JSON"), ("none.json", "not exist"), (".", "be read")):
        with pytest.raises(HookedSSMError, match=message):
            Grammar.load(tmp_path / name)


def test_own_tasks_are_checked_too():
    @dataclass(frozen=True)
    class Doubling(Task):
        name: ClassVar[str] = "doubling_of_this_test"
        size: int = 4

        d_vocab = max_length = property(lambda self: len(SPECIAL_TOKENS) + self.size)
        chance = blind_chance = property(lambda self: 1.0)
        describe = decode_token = token_range = _draw = lambda self, *_: None

    assert Doubling(3).size == 3
    with pytest.raises(TaskError, match="Doubling: size='3'; allowed: an integer"):
        Doubling("3")
    del Task._by_name["doubling_of_this_test"]


@pytest.mark.parametrize("index", [[99], torch.tensor([3]), [True, False]])
def test_documents_that_are_not_there(index):
    batch = TASKS[0].sample(3, generator=generator())
    with pytest.raises(TaskError, match=r"numbers in -3\.\.2, as the batch has 3 documents"):
        batch[index]


def test_a_taken_name_and_an_inherited_one():
    with pytest.raises(TaskError, match="'associative_recall' is taken by .*AssociativeRecall"):
        type("Mine", (AssociativeRecall,), {"name": "associative_recall"})
    mine = type("Mine", (AssociativeRecall,), {})()
    with pytest.raises(TaskError, match="Mine has no name of its own"):
        mine.to_json()
    assert Task.from_json({"task": "associative_recall"}) == AssociativeRecall()


def test_a_set_has_no_order_for_tokens_to_follow():
    with pytest.raises(TaskError, match="query_types=.*allowed: a list of words"):
        AssociativeTreecall(query_types={"parent", "child"})


@pytest.mark.parametrize("share", [1e-12, 1e-17])
def test_a_holdout_that_no_document_meets(share):
    with pytest.raises(TaskError, match="almost never one"):
        AssociativeRecall(holdout=share).sample(2, "test", generator=generator())


def test_hand_made_pairs_are_those_of_the_task():
    task = AssociativeRecall(num_kv=16, num_pairs=2)
    keys, values = torch.tensor([[3, 4]]), torch.tensor([[11, 12]])
    assert len(task.build(keys, values, torch.tensor([0]))) == 1
    with pytest.raises(TaskError, match="keys: one comes twice"):
        task.build(torch.tensor([[3, 3]]), values, torch.tensor([0]))
    with pytest.raises(TaskError, match="of 3 pairs a document; allowed: 2"):
        task.build(torch.tensor([[3, 4, 5]]), torch.tensor([[11, 12, 13]]), torch.tensor([0]))


def test_no_trees():
    with pytest.raises(TaskError, match="documents is an empty list"):
        AssociativeTreecall().build([])
    with pytest.raises(TaskError, match="documents is an empty list"):
        document_statistics([])


def test_a_grammar_that_almost_never_gives_a_document_is_refused():
    seldom = Grammar(
        num_terminals=2,
        rules=[[Rule([0], 1 - 1e-4), Rule([0, 1, 0], 1e-4)]],
        heads=[[0.5, 0.5]],
        start=[1.0],
    )
    for seed in range(5):
        with pytest.raises(TaskError, match="no document for split 'train'"):
            AssociativeTreecall(grammar=seldom, seed=seed)
    rare = dataclasses.replace(seldom, rules=[[Rule([0], 0.99), Rule([0, 1, 0], 0.01)]])
    task = AssociativeTreecall(grammar=rare)
    assert len(task.sample(200, generator=generator())) == 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown field of the grammar's spec 'extra'"),
        ({"rules": [[{"symbols": {}, "probability": 1.0}]]}, "symbols={}"),
        ({"rules": [[{"symbols": [0]}]]}, "a rule lacks 'probability'"),
        ({"rules": [[3]]}, "a rule is 3"),
        ({"rules": 3}, "the grammar's rules=3"),
        ({"start": [10**400]}, "start"),
    ],
)
def test_damaged_grammars(change, message):
    spec = Grammar(1, [[Rule([0], 1.0)]], [[1.0]], [1.0]).to_json()
    assert Grammar.from_json(spec) == Grammar(1, ((Rule((0,), 1.0),),), ((1.0,),), (1.0,))
    with pytest.raises(TaskError, match=message):
        Grammar.from_json({**spec, **change})


def test_a_grammar_of_arrays_is_the_one_of_tuples():
    arrays = Grammar(1, [[Rule(np.array([0]), 1.0)]], [np.ones(1)], np.ones(1))
    assert arrays == Grammar(1, ((Rule((0,), 1.0),),), ((1.0,),), (1.0,))
    assert hash(arrays) and json.dumps(arrays.to_json())

"""Whatever a file holds, it is refused by name: no traceback, and nothing passed over."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
import pytest

from hooked_ssm.errors import ConfigError
from hooked_ssm.sweeps import parse_sweep, read_sweep
from tests.sweeps.tiny import SWEEP

pytestmark = pytest.mark.usefixtures("as_shipped")

GRID = SWEEP["grid"]
TODAY = datetime.date(2026, 1, 1)


def with_grid(**axes):
    return {"grid": {**GRID, **axes}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (with_grid(task=[["tiny"]]), r"task=\['tiny'\]; allowed: a word"),
        (with_grid(task={"setting": "ar_32"}), "task={.*allowed: a word. Define it under tasks"),
        (with_grid(task=None), "task=None; allowed: a word"),
        (with_grid(task=True), "task=True; allowed: a word. YAML reads yes.*in quotes"),
        (with_grid(variant=[[]]), r"variant=\[\]; allowed: a word"),
        (with_grid(variant=[{"a": 1}]), "variant={'a': 1}; allowed: a word"),
        (with_grid(variant=None), "variant=None; allowed: a word. Leave it out"),
        (with_grid(variant=False), "variant=False; allowed: a word. YAML reads"),
        (with_grid(lr=None), "lr=None; allowed: a finite number > 0"),
        (with_grid(lr="fast"), "lr='fast'; allowed: a finite number > 0"),
        (with_grid(lr=[[1e-3]]), "lr=.*; allowed: a finite number > 0"),
        (with_grid(lr=float("nan")), "lr=nan; allowed: a finite number > 0"),
        (with_grid(architecture=[["mamba"]]), r"architecture=\['mamba'\]; allowed"),
        (with_grid(d_model={"a": 1}), "d_model={'a': 1}; allowed"),
        (with_grid(d_model=None), "d_model"),
        (with_grid(seed=None), "seed=None; allowed"),
        (with_grid(seed=TODAY), "a sweep: grid: seed is datetime.date.*allowed.*in quotes"),
        (with_grid(seed=np.int64(0)), "grid: seed is .*an? int64; allowed"),
        ({"grid": []}, "grid is an empty list, of 0 runs; give at least one grid"),
        ({"grid": [GRID, []]}, r"grid must be a mapping of names to values, got \[\]"),
        ({"grid": {}}, "the grid needs architecture, .*; it has nothing"),
        ({"train": None}, "train must be a mapping of .*got None; write .* or leave it out"),
        ({"train": [1]}, r"train must be a mapping of names to values, got \[1\]"),
        ({"train": {**SWEEP["train"], "lr": "fast"}}, "lr='fast' would override an axis"),
        ({"train": {**SWEEP["train"], "lr": None}}, "lr=None would override an axis"),
        ({"train": {**SWEEP["train"], "steps": TODAY}}, "train: steps is datetime.date"),
        ({"train": {**SWEEP["train"], "steps": 1e999}}, "steps=inf; allowed"),
        ({"train": {1: 2}}, "unknown TrainConfig field '1'"),
        ({"train": {TODAY: 2}}, "train: a name=datetime.date.*allowed: a word"),
        ({"model": {"d_mlp": 10**17}}, "model: it cannot be built: .*make it smaller"),
        ({"model": {"d_mlp": 10**30}}, "model: it cannot be built: .*make it smaller"),
        ({"model": {"options": 3}}, "options=3; allowed"),
        ({"model": {"options": {"d_conv": {1, 2}}}}, "options: d_conv is {1, 2}, a set; allowed"),
        ({"evaluate": {"seed": 2**64}}, "evaluate: seed=18446744073709551616; allowed"),
        ({"evaluate": {"sites": [["resid_pre"]]}}, "sites=.*allowed"),
        ({"tasks": "x"}, "tasks must be a mapping of names to values, got 'x'"),
        ({"tasks": {**SWEEP["tasks"], "other": None}}, "tasks: other must be a mapping"),
        ({"tasks": {**SWEEP["tasks"], "other": {"setting": ["a"]}}}, r"setting=\['a'\]; allowed"),
        (
            {"tasks": {**SWEEP["tasks"], "other": {"setting": "ar_23"}}},
            "paper setting 'ar_23'; did",
        ),
        ({"tasks": {**SWEEP["tasks"], 1: {}, "1": {}}}, "tasks has '1' twice"),
        ({"tasks": {"tiny": {"task": ["a"]}}}, "unknown task"),
        ({"variants": {"a": 0}}, "variants: a must be a mapping of names to values, got 0"),
        ({"variants": {"a": {"train": None}}}, "variants: a: train must be a mapping"),
        ({"variants": {"a": {"trian": {}}}}, "unknown entry of variant 'a' 'trian'; did you mean"),
        ({"variants": {"": {}}}, "variants:  has the name .., by which.*without changes"),
        ({"variants": {True: {}}}, "variants: a name=True; allowed: a word. YAML reads"),
        ({"small": None}, "small must be a mapping of names to values, got None"),
        ({"small": {"train": [1]}}, r"small: train must be a mapping .*got \[1\]"),
        ({"small": {"tasks": "x"}}, "small: tasks must be a mapping of names to values, got 'x'"),
        ({"small": {"variants": {"a": 1}}}, "small: variants: a must be a mapping"),
        ({"small": {"grid": []}}, "small: grid is an empty list"),
        ({"small": {"grid": None}}, "small: grid must be a mapping"),
    ],
)
@pytest.mark.parametrize("small", [False, True])
def test_contents_are_refused_by_name(changes, message, small):
    with pytest.raises(ConfigError, match=message):
        parse_sweep(
            {**SWEEP, **({"small": {"train": {}}} if small else {}), **changes}, small=small
        )


def test_a_content_that_contains_itself():
    content = {**SWEEP, "model": {}}
    content["model"]["options"] = content["model"]
    with pytest.raises(ConfigError, match="a sweep: model: options contains itself"):
        parse_sweep(content)
    with pytest.raises(ConfigError, match="a sweep needs a grid; write grid:"):
        parse_sweep({"train": SWEEP["train"]})


def test_numbers_may_be_names_and_tuples_lists():
    content = {
        **SWEEP,
        "tasks": {32: SWEEP["tasks"]["tiny"]},
        "variants": {0.5: {"train": {"warmup": 0.5}}, "as it is": None},
        "grid": {**GRID, "task": 32, "variant": ("as it is", 0.5), "n_layers": (1,), "lr": 0.1},
    }
    specs = parse_sweep(content)
    assert {spec.task_name for spec in specs} == {"32"}
    assert [spec.variant for spec in specs[:2]] == ["as it is", "0.5"]
    assert [spec.train.get("warmup") for spec in specs[:2]] == [None, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  steps: 3\n  lr: 1\n  steps: 4\n", "key 'steps' on line 4 .*on line 2; .*once"),
        ('{"grid": 1, "grid": 2}', "key 'grid' on line 1 .*on line 1"),
        ("grid:\n  {seed: 2020-13-45}", "cannot read the sweep .*month"),
        ("train: {steps: 2020-10-10}", "train: steps is datetime.date"),
        ("a: &a [*a]", "contains itself|unknown entry"),
        ("? [a]\n: 1\n", "cannot read the sweep"),
        ("[" * 3000, "cannot read the sweep"),
    ],
)
def test_files_are_refused_by_name(text, message, tmp_path: Path):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_sweep(path)


def test_a_key_that_overrides_a_merged_one_is_no_second_key(tmp_path: Path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        f"""
        tasks: {json.dumps(SWEEP["tasks"])}
        train: &train {{<<: &base {{steps: 2, batch_size: 4}}, batch_size: 3}}
        grid: {json.dumps({**GRID, "lr": 0.1})}
        small: {{train: {{<<: *train, steps: 1}}}}
        """
    )
    assert {spec.train["batch_size"] for spec in read_sweep(path)} == {3}
    assert {spec.train["steps"] for spec in read_sweep(path, small=True)} == {1}
    with pytest.raises(ConfigError, match="path=3"):
        read_sweep(3)

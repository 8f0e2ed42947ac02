"""Sweeps refuse folders, runs and settings that do not fit, by name."""

from __future__ import annotations

import json

import pytest

from hooked_ssm.errors import CheckpointError, ConfigError, HookedSSMError
from hooked_ssm.sweeps import (
    EvaluationConfig,
    LocalExecutor,
    RunSpec,
    parse_sweep,
    read_sweep,
    results_table,
    run_sweep,
    write_report,
)

pytestmark = pytest.mark.usefixtures("as_shipped")

SPEC = {
    "model": {"architecture": "mamba", "d_model": 8, "n_layers": 1, "seed": 0},
    "task": {"task": "associative_recall", "num_kv": 8, "num_pairs": 2},
    "train": {"lr": 1e-3, "seed": 0, "steps": 2, "batch_size": 2},
    "task_name": "tiny",
}
RESULT = {"accuracy": 1.0, "dev_accuracy": 1.0, "attribution": {}, "attribution_error": {}}


@pytest.mark.parametrize(
    ("name", "value"),
    [("documents", 0), ("documents", True), ("documents", "8"), ("max_batch", 1.5),
     ("split", "tests"), ("seed", -1), ("seed", "0"), ("sites", "resid_pre"), ("sites", []),
     ("directions", "restore"), ("directions", [])],
)  # fmt: skip
def test_evaluations(name, value):
    with pytest.raises(ConfigError, match=f"evaluate: .*{name}"):
        EvaluationConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("retries", -1), ("retries", "2"), ("specs", []), ("specs", ["a"]), ("executor", "local"),
     ("progress", 1), ("folder", 3)],
)  # fmt: skip
def test_sweeps(name, value, tmp_path):
    given = {"specs": [RunSpec(**SPEC)], "folder": tmp_path, "progress": False}
    with pytest.raises(ConfigError, match=name):
        run_sweep(**{**given, name: value})


def test_executors():
    wrong_ones = [{"workers": 0}, {"workers": True}, {"threads": "2"}, {"device": 3}]
    for wrong in [*wrong_ones, {"imports": "my_tasks"}, {"imports": [3]}]:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LocalExecutor(**wrong)


@pytest.mark.parametrize("content", [None, [], "grid", 3, {"grid": 3}, {"grid": {"lr": []}}])
def test_contents(content):
    with pytest.raises(ConfigError):
        parse_sweep(content)


@pytest.mark.parametrize("text", ["grid: [", "\t- x", "a: b: c", "", "3"])
def test_files(text, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="sweep.yaml"):
        read_sweep(path)
    for missing in (tmp_path, path / "under", tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match="cannot read the sweep"):
            read_sweep(missing)


def test_folders_of_files(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is, or lies in, a file"):
        run_sweep([RunSpec(**SPEC)], file / "runs", progress=False)
    for folder in (file, tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="holds no runs"):
            results_table(folder)


@pytest.mark.parametrize(
    ("spec", "result"),
    [("{", None), ("[]", None), ("{}", None), (json.dumps({**SPEC, "model": 3}), None),
     (json.dumps({**SPEC, "train": {}}), None), (json.dumps(SPEC), "[]"),
     (json.dumps(SPEC), "{}"), (json.dumps(SPEC), '{"attribution": 3}'), ("null", None),
     *((json.dumps(SPEC), json.dumps({**RESULT, **change})) for change in (
         {"accuracy": "abc"}, {"accuracy": None}, {"dev_accuracy": [1]}, {"loss": "x"},
         {"attribution": {"key": "x"}}, {"evaluate": None}, {"evaluate": {"x": 0}}))],
)  # fmt: skip
def test_damaged_runs_are_named(spec, result, tmp_path):
    run = tmp_path / "runs" / "abc"
    run.mkdir(parents=True)
    (run / "spec.json").write_text(spec)
    if result is not None:
        (run / "result.json").write_text(result)
    with pytest.raises(CheckpointError, match="abc"):
        results_table(tmp_path / "runs")
    with pytest.raises(HookedSSMError, match="abc"):
        write_report(tmp_path / "runs", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()

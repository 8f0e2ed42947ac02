"""Tasks of one's own reach the processes of a sweep from a module that is named."""

from __future__ import annotations

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from hooked_ssm import cli
from hooked_ssm.errors import ConfigError
from hooked_ssm.sweeps import (
    LocalExecutor,
    RayExecutor,
    parse_sweep,
    results_table,
    run_sweep,
    write_report,
)
from hooked_ssm.sweeps import spec as spec_module
from hooked_ssm.tasks import Task
from tests.sweeps.tiny import SWEEP

MODULE = """
from dataclasses import dataclass

from hooked_ssm.tasks import AssociativeRecall


@dataclass(frozen=True)
class OwnRecall(AssociativeRecall):
    name = "own_recall"


print("own_tasks is imported")
"""
OWN = {
    **SWEEP,
    "tasks": {"own": {**SWEEP["tasks"]["tiny"], "task": "own_recall"}},
    "grid": {"architecture": "mamba", "d_model": 8, "n_layers": 1, "lr": 1e-2, "task": "own"},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module and a sweep of its task; both unknown elsewhere."""
    (tmp_path / "own_tasks.py").write_text(MODULE)
    (tmp_path / "broken_tasks.py").write_text("import no_such_module_at_all")
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(Task, "_by_name", dict(Task._by_name))
    yield tmp_path
    sys.modules.pop("own_tasks", None)


def test_the_command_line_imports_modules_of_the_current_folder(folder):
    command = ["sweep", "own.json", "--out", "runs"]
    unknown = CliRunner().invoke(cli.app, command)
    assert "unknown task 'own_recall'" in str(unknown.exception)
    result = CliRunner().invoke(cli.app, [*command, "--import", "own_tasks"])
    assert result.exit_code == 0, result.output
    assert results_table("runs")["state"].tolist() == ["complete"]
    (log,) = folder.glob("runs/*/log.txt")
    assert "own_tasks is imported" in log.read_text()
    (said,) = re.findall("hooked-(report .*)", result.output.replace("\n", " ").replace("ssm ", ""))
    Task._by_name.pop("own_recall")
    sys.modules.pop("own_tasks")
    spec_module._task.cache_clear()
    with pytest.raises(ConfigError, match="of run .*unknown task 'own_recall'.*--import"):
        write_report("runs", "report.html")
    assert CliRunner().invoke(cli.app, said.split()).exit_code == 0
    assert "own_tasks" in (folder / "report.html").read_text()


def test_a_task_that_the_processes_do_not_know_fails_with_its_name(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    LocalExecutor(imports=["own_tasks"])  # known here from now on
    (spec,) = parse_sweep(OWN)
    (failure,) = run_sweep([spec], "runs", progress=False).failures
    assert "unknown task 'own_recall'" in failure.reason


@pytest.mark.parametrize("name", ["no_such_module", "broken_tasks", "./own_tasks.py"])
def test_modules_that_cannot_be_imported(name, folder, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.syspath_prepend(str(folder))
    for executor in (LocalExecutor, RayExecutor):
        with pytest.raises(ConfigError, match=f"module {name!r} cannot be imported"):
            executor(imports=[name])

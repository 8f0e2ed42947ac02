"""Sweeps of processes on this machine: complete, killed, started again, two at once, failing."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hooked_ssm import HookedModel, cli
from hooked_ssm.errors import ConfigError, FileError
from hooked_ssm.sweeps import LocalExecutor, RunFolder, results_table, run_sweep
from hooked_ssm.sweeps import sweep as sweep_module
from hooked_ssm.sweeps.executors import Ended
from tests.sweeps.tiny import (
    SWEEP,
    attempts,
    history_of,
    one_run,
    result_of,
    tiny_sweep,
    wait_until,
    weights_of,
)

ENDLESS = {"steps": 100_000, "checkpoint_every": 10, "log_every": 10}
LONG = {"steps": 200, "checkpoint_every": 10, "log_every": 10, "eval_every": 100}


class Killer(LocalExecutor):
    """Kills the process of a run that has a checkpoint, the first `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__(workers=1)
        self.times, self.killed_at = times, []

    def start(self, sweep, spec):
        super().start(sweep, spec)
        if len(self.killed_at) == self.times:
            return
        run = RunFolder.of(sweep, spec)
        seen = self.killed_at[-1] if self.killed_at else 0
        wait_until(lambda: run.steps_done() > seen + 10)
        os.kill(run.holder()["pid"], signal.SIGKILL)
        self.killed_at.append(run.steps_done())


class Counting(LocalExecutor):
    """Counts attempts."""

    started = 0

    def start(self, sweep, spec):
        super().start(sweep, spec)
        self.started += 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder and the spec of a long run that nobody disturbed."""
    folder, spec = tmp_path_factory.mktemp("undisturbed"), one_run(**LONG)
    assert not run_sweep([spec], folder, progress=False).failures
    return folder, spec


def assert_same(folder: Path, undisturbed: tuple) -> None:
    other, spec = undisturbed
    for of in (result_of, weights_of, history_of):
        assert of(folder, spec) == of(other, spec)


def test_twelve_runs_and_none_of_them_twice(tmp_path, capsys):
    specs = tiny_sweep()
    outcome = run_sweep(specs, tmp_path)
    assert (outcome.complete, outcome.skipped, outcome.failures) == (specs, 0, [])
    assert "12/12 runs" in capsys.readouterr().err
    again = run_sweep(specs, tmp_path, progress=False)
    assert (again.complete, again.skipped) == (specs, 12)
    assert capsys.readouterr() == ("", "")
    assert all(attempts(tmp_path, spec) == 1 for spec in specs)
    table = results_table(tmp_path)
    assert len(table) == 12 and (table["state"] == "complete").all()
    run = RunFolder.of(tmp_path, specs[0])
    assert run.spec() == specs[0] and run.holder() is None
    (checkpoint,) = run.training.glob("checkpoints/step-*")
    assert HookedModel.from_pretrained(checkpoint).cfg.d_model == 8
    assert (run.path / "evaluation.csv").read_text().startswith("corrupt,direction,site")


def test_a_killed_worker_is_retried_and_equals_an_undisturbed_one(tmp_path, undisturbed):
    _, spec = undisturbed
    executor = Killer(times=2)
    outcome = run_sweep([spec], tmp_path, executor=executor, progress=False)
    assert outcome.complete == [spec]
    assert 0 < executor.killed_at[0] < executor.killed_at[1] < 200
    assert attempts(tmp_path, spec) == 3
    assert_same(tmp_path, undisturbed)


def test_retries_are_bounded_and_the_rest_goes_on(tmp_path):
    specs = [one_run(**LONG), one_run()]
    outcome = run_sweep(specs, tmp_path, executor=Killer(2), retries=1, progress=False)
    assert outcome.complete == specs[1:]
    (failure,) = outcome.failures
    assert "was ended by SIGKILL, 2 times; the last line of its log.txt: " in failure.reason
    assert failure.spec == specs[0]
    row = results_table(tmp_path).set_index("run").loc[specs[0].key]
    assert row["state"] == "failed" and row["reason"] == f"CrashedError: {failure.reason}"


@pytest.mark.parametrize("blocked", [("spec.json",), ("spec.json", "failure.json"), ("log.txt",)])
def test_what_cannot_be_written_is_a_failure_with_its_reason(blocked, tmp_path):
    spec, executor = one_run(), Counting(1)
    run = RunFolder.of(tmp_path, spec)
    for name in blocked:
        (run.path / name).mkdir(parents=True)
    (failure,) = run_sweep([spec], tmp_path, executor=executor, progress=False).failures
    assert executor.started == 1 and blocked[0] in failure.reason
    if "failure.json" in blocked:
        assert "failure.json cannot be written either" in failure.reason
    else:
        assert run.failure() == failure.reason


def test_a_killed_sweep_goes_on_where_it_was(tmp_path, undisturbed):
    _, long = undisturbed
    grid = {**SWEEP["grid"], "architecture": "mamba", "n_layers": 1, "lr": 1e-2}
    short = {**grid, "d_model": 4}
    content = {
        **SWEEP,
        "grid": [{**short, "seed": [1, 2]}, {**grid, "train": LONG}, {**short, "seed": [3, 4]}],
    }
    file, out = tmp_path / "sweep.json", tmp_path / "runs"
    file.write_text(json.dumps(content))
    command = [sys.executable, "-m", "hooked_ssm.cli", "sweep", file, "--out", out, "--workers"]
    with open(tmp_path / "log", "wb") as log:
        sweep = subprocess.Popen([*map(str, command), "1"], stdout=log, stderr=log)
    run = RunFolder.of(out, long)
    wait_until(lambda: run.steps_done() > 10 or sweep.poll() is not None)
    sweep.kill()
    sweep.wait()
    wait_until(lambda: is_free(run))  # its process wrote a checkpoint and left
    complete = {path.parent: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    assert len(complete) == 2 and 10 < run.steps_done() < 200
    result = CliRunner().invoke(cli.app, ["sweep", str(file), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "5 of 5 runs complete (2 were before)" in " ".join(result.output.split())
    assert {p: (p / "result.json").stat().st_mtime_ns for p in complete} == complete
    assert attempts(out, long) == 2
    assert_same(out, undisturbed)


def test_another_evaluation_trains_nothing_again(tmp_path):
    spec = one_run()
    run = RunFolder.of(tmp_path, spec)
    run_sweep([spec], tmp_path, progress=False)
    before, weights = run.result(), weights_of(tmp_path, spec)
    assert before["evaluate"]["documents"] == 8 and before["evaluate"]["split"] == "test"
    del before["evaluate"]  # as older results are: spec.json says it
    run.path.joinpath("result.json").write_text(json.dumps(before))
    assert run_sweep([spec], tmp_path, progress=False).skipped == 1
    in_smaller_batches = replace(spec, evaluate={**spec.evaluate, "max_batch": 4})
    assert run_sweep([in_smaller_batches], tmp_path, progress=False).skipped == 1
    other = replace(spec, evaluate={**spec.evaluate, "split": "train"})
    with pytest.raises(ConfigError, match="two evaluations"):
        run_sweep([spec, other], tmp_path)
    assert run.is_complete and not run.is_complete_as(other)
    run.begin(other)
    assert not run.is_complete and run.is_complete_as(spec)  # whoever is killed here
    outcome = run_sweep([other], tmp_path, progress=False)
    assert (outcome.complete, outcome.skipped) == ([other], 0)
    assert run.result()["evaluate"]["split"] == run.result()["split"] == "train"
    assert run.spec() == other and run.is_complete
    assert weights_of(tmp_path, spec) == weights and attempts(tmp_path, spec) == 1


def test_complete_runs_take_new_names(tmp_path):
    spec = one_run()
    run = RunFolder.of(tmp_path, spec)
    with run.locked():
        run.begin(spec)
    older = {"accuracy": 1, "dev_accuracy": 1}  # without its evaluation
    run.path.joinpath("result.json").write_text(json.dumps(older))
    renamed = replace(spec, task_name="small", variant="plain")
    with run.locked():
        assert run_sweep([renamed], tmp_path, progress=False).skipped == 1
    assert run.spec() == spec
    assert run_sweep([renamed], tmp_path, progress=False).skipped == 1
    assert run.spec() == renamed and run.is_complete_as(spec)
    assert run.result() == {**older, "evaluate": spec.evaluate}


def test_two_sweeps_at_once_share_the_work(tmp_path):
    specs = tiny_sweep({"architecture": "attention", "seed": [0, 1]}, steps=60)

    def sweep(_):
        return run_sweep(specs, tmp_path, executor=LocalExecutor(2), progress=False)

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(sweep, range(2)))
    assert [outcome.complete for outcome in outcomes] == [specs, specs]
    assert not any(outcome.failures for outcome in outcomes)
    assert [attempts(tmp_path, spec) for spec in specs] == [1] * len(specs)


def test_who_holds_a_run_for_long_is_said_again(tmp_path, monkeypatch, caplog):
    class Busy(Counting):
        def start(self, sweep, spec):
            self.started += 1
            if self.started == 4:  # the holder has finished it
                done = {"accuracy": 1, "dev_accuracy": 1}
                run.path.joinpath("result.json").write_text(json.dumps(done))
            self.ended = [Ended(spec, "busy")]

        def wait(self, seconds):
            ended, self.ended = self.ended, []
            return ended

    spec = one_run()
    run = RunFolder.of(tmp_path, spec)
    monkeypatch.setattr(sweep_module, "BUSY_AGAIN", 0.0)
    monkeypatch.setattr(sweep_module, "BUSY_SAID_AGAIN", 0.0)
    caplog.set_level("INFO", "hooked_ssm.sweeps.sweep")
    with run.locked():
        run.begin(spec)
        run_sweep([spec], tmp_path, executor=Busy(1), progress=False)
    who = f"process {os.getpid()} on "
    said = [record for record in caplog.records if who in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO", "WARNING", "WARNING"]
    assert "still has it, after 0 minutes" in said[-1].getMessage()


def test_one_failing_run_does_not_stop_the_rest(tmp_path):
    grid = {**SWEEP["grid"], "architecture": "mamba", "n_layers": 1, "lr": [1e38, 1e-2]}
    file, out = tmp_path / "sweep.json", tmp_path / "runs"
    file.write_text(json.dumps({**SWEEP, "grid": grid, "train": {**SWEEP["train"], "steps": 4}}))
    arguments = ["sweep", str(file), "--out", str(out)]
    listed = CliRunner().invoke(cli.app, [*arguments, "--dry-run"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0 and listed.output.count("missing") == 2 and not out.exists()
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert "1 of 2 runs complete" in result.output and "DivergedError" in result.output
    table = results_table(out)
    assert table["state"].tolist() == ["complete", "failed"]
    assert table["reason"][1].startswith("DivergedError")
    failure = json.loads((out / table["run"][1] / "failure.json").read_text())
    assert "Traceback" in failure["traceback"]
    page = tmp_path / "report.html"
    result = CliRunner().invoke(cli.app, ["report", str(out), "--out", str(page)])
    assert result.exit_code == 0 and "DivergedError" in page.read_text()


def test_an_interrupted_sweep_leaves_checkpoints_and_no_process(tmp_path):
    class Interrupted(LocalExecutor):
        def wait(self, seconds):
            run = RunFolder.of(tmp_path, spec)
            wait_until(lambda: run.steps_done() > 10)
            raise KeyboardInterrupt

    spec, executor = one_run(**ENDLESS), Interrupted(1)
    with pytest.raises(KeyboardInterrupt):
        run_sweep([spec], tmp_path, executor=executor, progress=False)
    run = RunFolder.of(tmp_path, spec)
    assert is_free(run) and executor.running == []
    assert list(run.training.glob("checkpoints/step-*")) and not run.is_complete
    assert json.loads((run.training / "result.json").read_text())["interrupted"]
    assert results_table(tmp_path)["state"].tolist() == ["unfinished"]


def test_a_lock_is_held_once_and_let_go_when_its_holder_is_killed(tmp_path):
    context = multiprocessing.get_context("forkserver")
    holder = context.Process(target=hold, args=(tmp_path,))
    holder.start()
    run = RunFolder(tmp_path)
    wait_until(lambda: run.holder() is not None)
    with run.locked() as held:
        assert not held
    assert run.holder()["pid"] == holder.pid
    holder.kill()
    holder.join()
    with run.locked() as held:
        assert held and run.holder()["pid"] == os.getpid()
        with RunFolder(tmp_path).locked() as held_twice:
            assert not held_twice
    assert run.holder() is None


def test_without_locks_of_the_system_no_marker_file_stands_in(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def missing(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with (
        pytest.raises(FileError, match="on a file system with locks"),
        RunFolder(tmp_path).locked(),
    ):
        pass
    monkeypatch.undo()
    with RunFolder(tmp_path).locked() as held:
        assert held


def test_a_sweep_needs_runs_workers_and_retries(tmp_path):
    with pytest.raises(ConfigError, match="0 runs"):
        run_sweep([], tmp_path)
    with pytest.raises(ConfigError, match="retries=-1"):
        run_sweep([one_run()], tmp_path, retries=-1)
    with pytest.raises(ConfigError, match="workers=0"):
        LocalExecutor(workers=0)


def hold(folder: Path) -> None:
    with RunFolder(folder).locked():
        time.sleep(600)


def is_free(run: RunFolder) -> bool:
    with run.locked() as held:
        return held

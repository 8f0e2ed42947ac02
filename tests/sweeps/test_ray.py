"""The same sweeps on Ray; only where Ray is installed."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import pytest

from hooked_ssm.errors import ConfigError
from hooked_ssm.sweeps import RayExecutor, RunFolder, ray_executor, results_table, run_sweep
from tests.sweeps.test_sweep import ENDLESS, LONG
from tests.sweeps.tiny import history_of, one_run, result_of, tiny_sweep, wait_until, weights_of

REASON = "Ray is not installed: pip install 'hooked-ssm[cluster]'"


def test_without_ray_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ray_executor.MissingRayError, match=r"hooked-ssm\[cluster\]"):
        RayExecutor()


def test_a_negative_share_of_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="gpus=-1.0"):
        RayExecutor(gpus=-1.0)


def test_a_gpu_that_ray_would_hide_is_refused():
    pytest.importorskip("ray", reason=REASON)
    with pytest.raises(ConfigError, match=r"device='cuda' with gpus=0.*gpus=0\.25"):
        RayExecutor(device="cuda")


def test_twelve_runs_one_of_them_killed(tmp_path):
    ray = pytest.importorskip("ray", reason=REASON)
    long = one_run(**LONG)
    specs = [long, *(spec for spec in tiny_sweep() if spec.label != long.label)]
    run = RunFolder.of(tmp_path / "ray", long)

    def kill() -> None:
        wait_until(lambda: run.steps_done() > 10)
        os.kill(run.holder()["pid"], signal.SIGKILL)
        killed_at.append(run.steps_done())

    killed_at: list[int] = []
    killer = threading.Thread(target=kill)
    executor = RayExecutor(workers=2, address="local")
    killer.start()
    outcome = run_sweep(specs, tmp_path / "ray", executor=executor, progress=False)
    killer.join()
    assert not ray.is_initialized()
    assert (outcome.complete, outcome.failures) == (specs, [])
    assert 10 < killed_at[0] < 200
    assert (results_table(tmp_path / "ray")["state"] == "complete").all()
    # by this machine's processes and undisturbed, the same comes out, bit by bit
    run_sweep([long], tmp_path / "local", progress=False)
    for of in (result_of, weights_of, history_of):
        assert of(tmp_path / "ray", long) == of(tmp_path / "local", long)


@pytest.fixture(scope="module")
def cluster():
    """A Ray that was there before the sweep: of one core, without a GPU."""
    ray = pytest.importorskip("ray", reason=REASON)
    ray.init(address="local", num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_an_interrupted_sweep_leaves_checkpoints_and_the_cluster(tmp_path, cluster):
    spec = one_run(**ENDLESS)
    run = RunFolder.of(tmp_path, spec)

    class Interrupted(RayExecutor):
        def wait(self, seconds):
            wait_until(lambda: run.steps_done() > 10)
            raise KeyboardInterrupt

    executor = Interrupted(imports=["this"])
    with pytest.raises(KeyboardInterrupt):
        run_sweep([spec], tmp_path, executor=executor, progress=False)
    assert json.loads((run.training / "result.json").read_text())["interrupted"]
    assert list(run.training.glob("checkpoints/step-*")) and not run.is_complete
    with run.locked() as held:
        assert held and executor.running == []
    assert cluster.is_initialized()
    log = run.log.read_text()  # what is printed and logged meanwhile
    assert "Beautiful is better than ugly." in log and "training from step 0" in log


def test_more_than_any_machine_has_is_refused(cluster):
    for gpus in (1, 0.25):
        with pytest.raises(ConfigError, match=f"takes {gpus} GPU, but no machine .* more than 0 "):
            RayExecutor(gpus=gpus)
    with pytest.raises(ConfigError, match="gpus=1.5"):
        RayExecutor(gpus=1.5)
    assert cluster.is_initialized()
    two = RayExecutor(workers=2)
    two._runs = {"first": one_run(), "second": one_run()}
    assert not two.has_room and RayExecutor().has_room


def test_no_cluster_at_an_address(monkeypatch):
    pytest.importorskip("ray", reason=REASON)

    def init(**_):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="no Ray cluster at .*'10.0.0.1:6379': nobody answers"):
        RayExecutor(address="10.0.0.1:6379")


def test_an_address_that_is_none(monkeypatch):
    pytest.importorskip("ray", reason=REASON)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="no Ray cluster at address='foo'"):
        RayExecutor(address="foo")

"""Where a machine's runs are put: one per core, or spread over its GPUs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from hooked_ssm.errors import ConfigError
from hooked_ssm.sweeps import LocalExecutor, executors
from tests.sweeps.tiny import one_run


def test_a_worker_per_core_or_per_gpu(monkeypatch):
    monkeypatch.setattr(executors, "usable_cores", lambda: 16)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for device, workers in ((None, 16), ("cpu", 16), ("cuda", 2), ("cuda:1", 1), ("meta", 1)):
        assert LocalExecutor(device=device).workers == workers
        assert LocalExecutor(5, device).workers == 5


def test_runs_are_spread_over_the_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    executor, devices = LocalExecutor(3, "cuda"), []

    def process(target, args):
        devices.append(args[-1].device)
        return SimpleNamespace(start=lambda: None, sentinel=len(devices))

    pipe = (None, SimpleNamespace(close=lambda: None))
    executor._context = SimpleNamespace(Process=process, Pipe=lambda duplex: pipe)
    for _ in range(3):
        executor.start(Path("runs"), one_run())
    del executor._processes[2]
    executor.start(Path("runs"), one_run())
    assert devices == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals are masked on Unix")
@pytest.mark.usefixtures("as_in_a_terminal")
def test_ctrl_c_while_a_process_starts_comes_when_it_is_known():
    executor = LocalExecutor(1)
    started = SimpleNamespace(start=lambda: os.kill(os.getpid(), signal.SIGINT), sentinel=1)
    pipe = (None, SimpleNamespace(close=lambda: None))
    executor._context = SimpleNamespace(Process=lambda **_: started, Pipe=lambda duplex: pipe)
    with pytest.raises(KeyboardInterrupt):
        executor.start(Path("runs"), one_run())
    assert executor.running == [one_run()]  # so it is stopped


def test_without_a_gpu_cuda_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device='cuda', but torch sees no GPU"):
        LocalExecutor(device="cuda")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("foo", "device='foo'; allowed: a device of torch"),
        ("cuda:1", "device='cuda:1', but torch sees only 1"),
        ("xla", "device='xla': nothing can be put there"),
    ],
)
def test_a_device_that_is_not_there_is_named_before_any_run(device, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match=message) as raised:
        LocalExecutor(device=device)
    assert "\n" not in str(raised.value)

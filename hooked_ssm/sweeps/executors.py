"""Where runs are executed: what every executor does, and the one of this machine's processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from hooked_ssm.checks import Count, checked
from hooked_ssm.devices import DeviceName, placing
from hooked_ssm.errors import ConfigError
from hooked_ssm.sweeps.spec import RunSpec
from hooked_ssm.sweeps.worker import Outcome, Setup, attempt, import_modules

EXIT_CODES: dict[Outcome, int] = {"done": 0, "failed": 70, "busy": 75, "interrupted": 130}
REASON_BYTES = 4000  # of a worker's last message: a pipe takes so many without a reader
PATIENCE = 20.0  # seconds a worker that is asked to stop gets for its step and its checkpoint


@dataclass(frozen=True)
class Ended:
    """An attempt that ended: as the worker says, or "crashed" if it could say nothing.

    `detail` is why it failed or crashed.
    """

    spec: RunSpec
    outcome: Outcome | Literal["crashed"]
    detail: str = ""


@runtime_checkable
class Executor(Protocol):
    """Starts attempts and says how they ended; retries and order are the sweep's affair."""

    @property
    def has_room(self) -> bool:
        """Whether another attempt can be started."""

    @property
    def running(self) -> list[RunSpec]:
        """The runs whose attempts have not ended."""

    def start(self, sweep: Path, spec: RunSpec) -> None:
        """Start an attempt."""

    def wait(self, seconds: float) -> list[Ended]:
        """Return the attempts that have ended, after at most so many seconds."""

    def stop(self) -> None:
        """End all attempts, with a checkpoint where there is time for one."""


class LocalExecutor:
    """A process per run on this machine.

    Args:
        workers: Runs at once; None: one per core this process may use or, elsewhere than on the
            CPU, one per device.
        device: Where they train; None: on the CPU. "cuda": spread over the GPUs that torch sees.
        threads: Of torch in every process. More make wide models faster, and change the last digits
            of a result; small ones are fastest with one.
        imports: Modules that every process imports first, for the tasks and mixers that they
            register.

    Raises:
        ConfigError: workers or threads < 1, a device that is not there, or a module that cannot be
            imported.
    """

    @checked
    def __init__(
        self,
        workers: Count | None = None,
        device: DeviceName | None = None,
        threads: Count = 1,
        imports: Sequence[str] = (),
    ) -> None:
        import_modules(imports)
        self.devices = _devices(device)
        usual = usable_cores() if _is_cpu(device) else len(self.devices)
        self.workers = usual if workers is None else workers
        self.threads, self.imports = threads, tuple(imports)
        self._context = _context(device)
        self._processes: dict[Any, _Process] = {}

    @property
    def has_room(self) -> bool:
        return len(self._processes) < self.workers

    @property
    def running(self) -> list[RunSpec]:
        return [process.spec for process in self._processes.values()]

    def start(self, sweep: Path, spec: RunSpec) -> None:
        device = self._least_used()
        setup = Setup(device, self.threads, self.imports)
        said, saying = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_work, args=(saying, str(sweep), spec.to_json(), setup)
        )
        with _deaf():  # until it is known here, so that a Ctrl-C at its end stops it too
            process.start()
            saying.close()  # the worker has its own end
            self._processes[process.sentinel] = _Process(spec, process, said, device)

    def wait(self, seconds: float) -> list[Ended]:
        sentinels = wait_for(list(self._processes), seconds)
        return [self._processes.pop(sentinel).ended() for sentinel in sentinels]

    def stop(self) -> None:
        processes = [running.process for running in self._processes.values()]
        for process in processes:
            if process.is_alive():
                _ask_to_stop(process.pid)
        patient_until = time.monotonic() + PATIENCE
        for process in processes:
            process.join(max(0.0, patient_until - time.monotonic()))
            process.kill()
            process.join()
        self._processes.clear()

    def _least_used(self) -> str | None:
        uses = Counter(process.device for process in self._processes.values())
        return min(self.devices, key=lambda device: uses[device])


@dataclass(frozen=True)
class _Process:
    spec: RunSpec
    process: Any
    said: Any  # the end of a pipe, from which the reason of a failure is read
    device: str | None

    def ended(self) -> Ended:
        self.process.join()
        code = self.process.exitcode
        self.process.close()
        with self.said, suppress(EOFError, OSError):
            return _ended(self.spec, code, self.said.recv_bytes().decode("utf-8", "replace"))
        return _ended(self.spec, code, "")


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _is_cpu(device: str | None) -> bool:
    return device is None or device.split(":")[0] == "cpu"


def _devices(device: str | None) -> list[str | None]:
    """Return the devices that runs are spread over: those that one name stands for."""
    if device is None:
        return [None]
    asked = torch.device(device)
    if asked.type != "cuda":
        with placing(device):
            torch.zeros(1).to(device)
        return [device]
    gpus = torch.cuda.device_count()  # asks no GPU for memory
    if gpus <= (asked.index or 0):
        seen = f"only {gpus}" if gpus else "no GPU"
        raise ConfigError(
            f"device={device!r}, but torch sees {seen}; leave it out to train on the CPU"
        )
    return [f"cuda:{i}" for i in range(gpus)] if asked.index is None else [device]


def _context(device: str | None) -> Any:
    """Return how processes are made.

    A fork server imports once what a run needs (torch's optimizers import torch._dynamo) and is
    forked for every run: 5 seconds saved each. It has run no tensor operation, so no thread of
    torch's is lost in the fork. CUDA wants processes that are no forks.
    """
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    if not can_fork or not _is_cpu(device):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    return context


@contextmanager
def _deaf() -> Iterator[None]:
    """Have the processes that start here be deaf to Ctrl-C until they can handle it.

    A terminal sends it to them too, while they import, and each would print a traceback. What this
    process is sent meanwhile comes at the end.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(spec: RunSpec, code: int, reason: str) -> Ended:
    for outcome, exit_code in EXIT_CODES.items():
        if code == exit_code:
            return Ended(spec, outcome, reason)
    if code < 0:
        return Ended(spec, "crashed", f"its process was ended by {signal.Signals(-code).name}")
    return Ended(spec, "crashed", f"its process ended with exit code {code}")


def _work(saying: Any, sweep: str, values: dict[str, Any], setup: Setup) -> None:
    """Execute a run in a process of its own."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the sweep alone, which then asks once
    outcome: Outcome = "interrupted"
    reason = ""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a sweep under nohup ignores it
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see _deaf
        threading.Thread(target=_stop_with_the_sweep, daemon=True).start()
        outcome, reason = attempt(sweep, values, setup)
    except KeyboardInterrupt:  # before the attempt, or after it
        pass
    if reason:
        with suppress(OSError):  # the sweep is gone
            saying.send_bytes(reason.encode()[:REASON_BYTES])
    sys.exit(EXIT_CODES[outcome])


def _stop_with_the_sweep() -> None:
    """Ask this process to stop as soon as the sweep's is gone, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        _ask_to_stop(os.getpid())


def _ask_to_stop(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, signal.SIGINT)

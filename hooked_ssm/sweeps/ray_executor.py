"""Runs as tasks of Ray: the same sweep on a laptop and on a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hooked_ssm.checks import Count, NonNegative, checked
from hooked_ssm.devices import DeviceName
from hooked_ssm.errors import ConfigError, MissingDependencyError
from hooked_ssm.sweeps.executors import PATIENCE, Ended
from hooked_ssm.sweeps.spec import RunSpec
from hooked_ssm.sweeps.worker import Attempt, Setup, attempt, import_modules

CPUS = 1.0  # that a run takes: it computes with one thread of torch's
STORE_BYTES = 200 * 1024**2  # of a Ray of our own: specs travel through it, results do not


class MissingRayError(MissingDependencyError):
    """Ray is not installed."""


class RayExecutor:
    """A Ray task per run. The sweep's folder has to be seen by every machine of the cluster.

    Args:
        workers: Runs at once; None: as many as there is room for, one per core.
        device: Where they train; None: "cuda" if `gpus` > 0, else the CPU.
        gpus: What a run takes of a machine's GPUs; 0.25 puts four on one.
        address: "auto" joins the cluster this machine belongs to, and starts a Ray of our own if
            there is none; "local" starts one in any case; else a cluster's address.
        imports: Modules that every worker imports first, for the tasks and mixers that they
            register; each machine finds them on its sys.path, which the current folder is on.

    Raises:
        MissingRayError: Ray is not installed.
        ConfigError: gpus < 0, between whole numbers above 1, more than any machine of the cluster
            has, or 0 with device "cuda"; there is no cluster at the address; or a module cannot be
            imported.
    """

    @checked
    def __init__(
        self,
        workers: Count | None = None,
        device: DeviceName | None = None,
        gpus: NonNegative = 0.0,
        address: str = "auto",
        imports: Sequence[str] = (),
    ) -> None:
        self._ray = _ray()
        import_modules(imports)
        self.imports = tuple(imports)
        self.device = device or ("cuda" if gpus else None)
        self._workers = workers
        self._runs: dict[Any, RunSpec] = {}
        if gpus > 1 and gpus % 1:
            raise ConfigError(f"gpus={gpus:g}; allowed: a fraction of 1, or a whole number")
        if not gpus and str(device).startswith("cuda"):
            raise ConfigError(
                f"device={device!r} with gpus=0: Ray hides all GPUs from a run that takes none; "
                "pass gpus=1, or gpus=0.25 to put four runs on one"
            )
        self._connect(workers, address)
        self._require({"CPU": CPUS, "GPU": float(gpus)})
        self._task = self._ray.remote(num_cpus=CPUS, num_gpus=gpus, max_retries=0)(_work)

    @property
    def has_room(self) -> bool:
        """Whether fewer than `workers` wait or run: Ray lets them wait for room on the cluster."""
        return self._workers is None or len(self._runs) < self._workers

    @property
    def running(self) -> list[RunSpec]:
        return list(self._runs.values())

    def start(self, sweep: Path, spec: RunSpec) -> None:
        setup = Setup(self.device, imports=self.imports)
        reference = self._task.remote(str(sweep.absolute()), spec.to_json(), setup)
        self._runs[reference] = spec

    def wait(self, seconds: float) -> list[Ended]:
        if not self._runs:
            return []
        ready, _ = self._ray.wait(list(self._runs), timeout=seconds)
        return [self._ended(reference) for reference in ready]

    def stop(self) -> None:
        """Ask all runs to stop, wait for their checkpoints, and leave Ray as it was found.

        A Ray of our own ends. A cluster goes on: leaving it closes the connection, and the caller's
        connection stays open.
        """
        try:
            for reference in self._runs:
                self._ray.cancel(reference)
            if self._runs:
                self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=PATIENCE)
        finally:
            self._runs.clear()
            self._leave()

    def _leave(self) -> None:
        if self._ours:
            self._ray.shutdown()

    def _ended(self, reference: Any) -> Ended:
        spec = self._runs.pop(reference)
        try:
            return Ended(spec, *self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
            return Ended(spec, "crashed", f"{type(error).__name__}: {reason}")

    def _require(self, wanted: dict[str, float]) -> None:
        """Refuse what no machine has: Ray would wait for such a machine without end."""
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for name, amount in wanted.items():
            most = max((machine.get(name, 0.0) for machine in machines), default=0.0)
            if amount > most:
                has = self._ray.cluster_resources().get(name, 0.0)
                self._leave()
                raise ConfigError(
                    f"a run takes {amount:g} {name}, but no machine of the Ray cluster has more "
                    f"than {most:g} ({name} of all {len(machines)} machines: {has:g}); take less, "
                    "or join another cluster"
                )

    def _connect(self, workers: int | None, address: str) -> None:
        self._ours = not self._ray.is_initialized()
        if not self._ours:
            return  # the caller's connection is used, and left open
        if address != "local":
            try:
                self._ray.init(address=address, log_to_driver=False)
                return
            except (ConnectionError, ValueError) as error:
                if address != "auto":
                    raise ConfigError(
                        f"no Ray cluster at address={address!r}: {error}; allowed: auto, local, or "
                        "a cluster's host:port"
                    ) from error
        self._ray.init(
            address="local",
            num_cpus=workers,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
        )


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingRayError(
            "executor 'ray' needs Ray; install it with: pip install 'hooked-ssm[cluster]', or "
            "use --executor local"
        ) from error
    return ray


def _work(sweep: str, values: dict[str, Any], setup: Setup) -> Attempt:
    # How Ray cancels a task; a worker whose Ray was started under nohup ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return attempt(sweep, values, setup)

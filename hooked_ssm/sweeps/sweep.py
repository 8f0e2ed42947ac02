"""The sweep itself: what is missing is run, what is killed is retried, what fails is listed."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hooked_ssm.checks import Natural, checked
from hooked_ssm.errors import CheckpointError, ConfigError, HookedSSMError
from hooked_ssm.files import make_folder
from hooked_ssm.progress import tqdm
from hooked_ssm.sweeps.executors import Ended, Executor, LocalExecutor
from hooked_ssm.sweeps.run_folder import RunFolder
from hooked_ssm.sweeps.spec import RunSpec

log = logging.getLogger(__name__)

POLL = 0.5  # seconds between two looks at how far the runs are
BUSY_AGAIN = 2.0  # seconds until a run that somebody else held is tried again
BUSY_SAID_AGAIN = 300.0  # seconds until it is said again that somebody holds a run


class CrashedError(HookedSSMError, RuntimeError):
    """A run's processes ended before they could say how the run went."""


@dataclass(frozen=True)
class Failure:
    """A run without a result, and why."""

    spec: RunSpec
    reason: str
    folder: Path


@dataclass(frozen=True)
class SweepOutcome:
    """What became of a sweep's runs.

    Attributes:
        complete: Runs that have a result now, in the sweep's order.
        skipped: How many of them had one before.
        failures: The others.
    """

    complete: list[RunSpec]
    skipped: int
    failures: list[Failure]


@checked
def run_sweep(
    specs: Sequence[RunSpec],
    folder: Path | str,
    *,
    executor: Executor | None = None,
    retries: Natural = 2,
    progress: bool = True,
) -> SweepOutcome:
    """Train and evaluate every run that has no result in the folder yet.

    Call it again after anything at all, a kill included: complete runs are skipped, the others
    go on from their last checkpoint; those that were evaluated in another way than asked are
    evaluated again, without training. Several sweeps may use one folder at once: each run is
    worked on by one of them. Ctrl-C lets every run write a checkpoint first.

    Args:
        specs: What `read_sweep` returns.
        folder: Made if needed; a run's own folder is inside, named by its key.
        executor: Where to run; None: `LocalExecutor()`. It is stopped at the end.
        retries: How often a run whose process was killed is started again. A run that fails by
            an error of its own is not: it would fail again.
        progress: Show a bar over the steps of all runs.

    Raises:
        ConfigError: No runs, one run with two evaluations, retries < 0, or a folder that is, or
            lies in, a file.
        CheckpointError: A run's result is damaged.
    """
    _check(specs)
    executor = executor or LocalExecutor()
    sweep = _Sweep(specs, Path(folder), executor, retries)
    try:
        sweep.run(progress)
    finally:
        executor.stop()
    return sweep.outcome()


def _check(specs: Sequence[RunSpec]) -> None:
    if not specs:
        raise ConfigError("specs has 0 runs; a sweep needs at least one")
    asked: dict[str, RunSpec] = {}
    for spec in specs:
        same = asked.setdefault(spec.key, spec)
        if same.evaluate != spec.evaluate:
            raise ConfigError(
                f"run {spec.label!r} is asked for with two evaluations, {dict(same.evaluate)} and "
                f"{dict(spec.evaluate)}; a run has one result, so leave one out"
            )


@dataclass
class _Sweep:
    specs: Sequence[RunSpec]
    folder: Path
    executor: Executor
    retries: int
    waiting: deque[RunSpec] = field(default_factory=deque)
    busy: dict[str, float] = field(default_factory=dict)  # key -> when to try again
    held: dict[str, tuple[float, float]] = field(default_factory=dict)  # since when, last said
    crashes: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # key -> how far its training is
    complete: set[str] = field(default_factory=set)
    skipped: int = 0

    def run(self, progress: bool) -> None:
        make_folder(self.folder, "folder")
        missing = [spec for spec in self.specs if not self._is_complete(spec)]
        self.skipped = len(self.specs) - len(missing)
        for spec in self.specs:
            if self._is_complete(spec):
                self._name(spec)
        self.waiting.extend(missing)
        self.steps = {spec.key: spec.train["steps"] for spec in self.specs}
        total = sum(self.steps.values())
        self.steps |= {spec.key: self._run(spec).steps_done() for spec in missing}
        done = sum(self.steps.values())  # before this call, whose rate the bar shows
        with tqdm(
            total=total, initial=done, disable=not progress, unit="step", unit_scale=True
        ) as bar:
            while self.waiting or self.executor.running:
                self._start()
                for ended in self.executor.wait(POLL):
                    self._handle(ended)
                self._show(bar)

    def outcome(self) -> SweepOutcome:
        return SweepOutcome(
            [spec for spec in self.specs if self._is_complete(spec)],
            self.skipped,
            list(self.failures.values()),
        )

    def _name(self, spec: RunSpec) -> None:
        """Have a complete run's folder call it what this sweep does, unless somebody holds it."""
        run = self._run(spec)
        if run.is_described_by(spec):
            return
        try:
            with run.locked() as held:
                if held:
                    run.begin(spec)
        except OSError as error:
            log.warning("%s: it keeps the names that it had: %s", spec.label, error)

    def _start(self) -> None:
        """Start runs while there is room; those that were held a moment ago stay for later."""
        for _ in range(len(self.waiting)):
            if not self.executor.has_room:
                return
            spec = self.waiting.popleft()
            if self._is_complete(spec):
                continue  # another sweep was here
            if time.monotonic() < self.busy.get(spec.key, 0.0):
                self.waiting.append(spec)
                continue
            self.executor.start(self.folder, spec)
        if not self.executor.running and self.waiting:
            time.sleep(POLL)  # everything left is held by somebody else

    def _handle(self, ended: Ended) -> None:
        spec = ended.spec
        if self._is_complete(spec):
            return
        if ended.outcome == "busy":
            self._wait_for_holder(spec)
        elif ended.outcome == "failed":
            self._fail(spec, ended.detail or "no reason was given")
        else:
            self._retry(spec, ended.detail or "it was asked to stop")

    def _wait_for_holder(self, spec: RunSpec) -> None:
        """Try a run later that somebody else holds; say so at once, and again if it lasts."""
        now = time.monotonic()
        self.busy[spec.key] = now + BUSY_AGAIN
        self.waiting.append(spec)
        since, said = self.held.get(spec.key, (now, None))
        if said is not None and now - said < BUSY_SAID_AGAIN:
            return
        self.held[spec.key] = (since, now)
        holder = self._run(spec).holder() or {}
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        if said is None:
            log.info("%s: %s works on it, so it waits", spec.label, who)
        else:
            minutes = (now - since) / 60
            log.warning("%s: %s still has it, after %.0f minutes", spec.label, who, minutes)

    def _retry(self, spec: RunSpec, why: str) -> None:
        self.crashes[spec.key] += 1
        if self.crashes[spec.key] > self.retries:
            self._give_up(spec, why)
            return
        log.warning("%s: %s; it is started again", spec.label, why)
        self.waiting.appendleft(spec)

    def _give_up(self, spec: RunSpec, why: str) -> None:
        """Write for a run whose processes left no reason what is known of it."""
        run, times = self._run(spec), self.crashes[spec.key]
        words = run.last_words()
        reason = why + (f", {times} times" if times > 1 else "")
        reason += f"; the last line of its log.txt: {words}" if words else ""
        try:
            with run.locked() as held:
                if held:  # else another sweep works on it
                    run.begin(spec)
                    run.fail(CrashedError(reason))
        except (OSError, CheckpointError) as error:
            log.error("%s: its failure cannot be written: %s", spec.label, error)
        self._fail(spec, reason)

    def _fail(self, spec: RunSpec, reason: str) -> None:
        log.error("%s: %s", spec.label, reason)
        self.failures[spec.key] = Failure(spec, reason, self._run(spec).path)

    def _run(self, spec: RunSpec) -> RunFolder:
        return RunFolder.of(self.folder, spec)

    def _is_complete(self, spec: RunSpec) -> bool:
        if spec.key not in self.complete and self._run(spec).is_complete_as(spec):
            self.complete.add(spec.key)
        return spec.key in self.complete

    def _show(self, bar: tqdm) -> None:
        if bar.disable:
            return
        complete = [spec for spec in self.specs if self._is_complete(spec)]
        others = [spec for spec in self.executor.running if not self._is_complete(spec)]
        self.steps |= {spec.key: self._run(spec).steps_done() for spec in others}
        self.steps |= {spec.key: spec.train["steps"] for spec in complete}
        before = (bar.n, bar.desc, bar.postfix)
        bar.n = sum(self.steps.values())
        bar.set_description(f"{len(complete)}/{len(self.specs)} runs", refresh=False)
        bar.set_postfix({"running": len(others), "failed": len(self.failures)}, refresh=False)
        if (bar.n, bar.desc, bar.postfix) != before:
            bar.refresh()

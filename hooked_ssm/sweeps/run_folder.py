"""A run's folder: what is in it, who may write there, and when it is complete.

sweep/<key>/spec.json        what the run is, and what tables call it
sweep/<key>/training/        the trainer's own folder, with the checkpoints it resumes from
sweep/<key>/evaluation.csv   every site of the mechanistic evaluation
sweep/<key>/result.json      one row of the table, with the evaluation's settings; written last: it
                             is what completes the run
sweep/<key>/failure.json     why the last attempt failed, while there is no result
sweep/<key>/log.txt          what the attempts printed and logged
sweep/<key>/lock             held by whoever works on the run
"""

from __future__ import annotations

import errno
import inspect
import os
import re
import socket
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, SoftFileLock, Timeout

from hooked_ssm.errors import CheckpointError, ConfigError, FileError
from hooked_ssm.files import new_file, read_json, write_json
from hooked_ssm.rules import is_number
from hooked_ssm.sweeps.spec import RunSpec, outcome_settings
from hooked_ssm.training.checkpoint import checkpoint_folders, step_of

STEP = re.compile(rb'"step": (\d+)')
# A soft lock is a marker file, which a killed holder leaves behind for ever.
NO_MARKER: dict[str, Any] = (
    {"fallback_to_soft": False}
    if "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters
    else {}
)


class RunFolder:
    """The folder of one run inside a sweep's folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.training = self.path / "training"
        self.log = self.path / "log.txt"
        self._spec = self.path / "spec.json"
        self._result = self.path / "result.json"
        self._failure = self.path / "failure.json"
        self._holder = self.path / "holder.json"

    @classmethod
    def of(cls, sweep: Path | str, spec: RunSpec) -> RunFolder:
        """Return the folder that a sweep keeps a run in."""
        return cls(Path(sweep) / spec.key)

    @property
    def is_complete(self) -> bool:
        """Whether the run has a result, evaluated as its spec.json asks.

        Raises:
            CheckpointError: result.json or spec.json is damaged.
        """
        return self._result.exists() and self.is_complete_as(self.spec())

    def is_complete_as(self, spec: RunSpec) -> bool:
        """Whether the run has a result, evaluated as a spec asks.

        Raises:
            CheckpointError: result.json is damaged.
        """
        if not self._result.exists():
            return False
        return outcome_settings(self._evaluated()) == outcome_settings(spec.evaluate)

    def is_described_by(self, spec: RunSpec) -> bool:
        """Whether spec.json says what a spec says, names included."""
        try:
            return read_json(self._spec) == _described(spec)
        except CheckpointError:
            return False

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the run's lock if it is free; yield whether it is held.

        The system lets go of the lock when its holder's process ends, however it ends, so no lock
        is ever stale. On a cluster the file system has to support `flock` between machines, as
        NFS does. `holder.json` says who has it, for people.

        Raises:
            FileError: The lock cannot be made, or the file system has none.
        """
        with _lock(self.path / "lock") as held:
            if not held:
                yield False
                return
            try:
                write_json(self._holder, {"pid": os.getpid(), "host": socket.gethostname()})
                yield True
            finally:
                self._holder.unlink(missing_ok=True)

    def holder(self) -> dict[str, Any] | None:
        """Return {"pid", "host"} of who holds the lock, or held it when it was killed."""
        try:
            return read_json(self._holder)
        except CheckpointError:  # let go of
            return None

    def begin(self, spec: RunSpec) -> None:
        """Write what the run is, and is called; the lock must be held."""
        if self.is_described_by(spec):
            return
        if self._result.exists():  # it keeps the settings that it was made with
            write_json(self._result, {**self.result(), "evaluate": dict(self._evaluated())})
        write_json(self._spec, _described(spec))

    def finish(self, result: dict[str, Any], evaluation: pd.DataFrame) -> None:
        """Write what came out; the lock must be held. The run is complete after the last line."""
        with new_file(self.path / "evaluation.csv") as temporary:
            evaluation.to_csv(temporary, index=False)
        self._failure.unlink(missing_ok=True)
        write_json(self._result, result)

    def fail(self, error: Exception) -> None:
        """Write why an attempt failed."""
        write_json(
            self._failure,
            {
                "error": type(error).__name__,
                "message": str(error),
                "traceback": "".join(traceback.format_exception(error)),
            },
        )

    def spec(self) -> RunSpec:
        """Read what the run is.

        Raises:
            CheckpointError: spec.json is missing or damaged.
        """
        values = read_json(self._spec)
        try:
            return RunSpec.from_json({name: values[name] for name in values if name != "key"})
        except (TypeError, ConfigError) as error:
            raise CheckpointError(
                f"{self._spec} describes no run ({error}); delete its folder and start the sweep "
                "again"
            ) from error

    def result(self) -> dict[str, Any]:
        """Read what came out.

        Raises:
            CheckpointError: There is no result, or a damaged one.
        """
        result = read_json(self._result)
        problem = _problem(result)
        if problem:
            raise CheckpointError(
                f"{self._result} is damaged: {problem}. Delete it: the sweep then evaluates again"
            )
        return result

    def _evaluated(self) -> Mapping[str, Any]:
        """Return the settings of the evaluation that the result is of; spec.json's, by default."""
        result = self.result()
        return result["evaluate"] if "evaluate" in result else self.spec().evaluate

    def checkpoint_step(self) -> int:
        """Return the step that training goes on from: that of the last checkpoint, else 0."""
        folders = checkpoint_folders(self.training)
        return step_of(folders[-1]) if folders else 0

    def failure(self) -> str | None:
        """Return the last attempt's error as one line; None if it did not fail."""
        if self.is_complete or not self._failure.exists():
            return None
        entry = read_json(self._failure)
        return f"{entry['error']}: {entry['message']}"

    def last_words(self) -> str:
        """Return the last line of the log; "" if there is none."""
        try:
            lines = _end_of(self.log).decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def steps_done(self) -> int:
        """Return how far training is, by the last row of its history; 0 before the first."""
        try:
            lines = _end_of(self.training / "history.jsonl").splitlines()
        except OSError:
            return 0
        for line in reversed(lines):  # the last one may still be in writing
            found = STEP.search(line)
            if found and line.endswith(b"}"):
                return int(found[1])
        return 0


def _end_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 512))
        return file.read()


def _problem(result: Any) -> str:
    """Return what is wrong with a result as it was read; "" if nothing is."""
    if not isinstance(result, dict):
        return "it is no mapping"
    for name in ("attribution", "attribution_error", "evaluate"):
        if not isinstance(result.get(name, {}), dict):
            return f"{name}={result[name]!r} is no mapping"
    try:
        outcome_settings(result.get("evaluate", {}))
    except ConfigError as error:
        return str(error)
    needed = {name: result.get(name) for name in ("accuracy", "dev_accuracy")}
    others = {name: result.get(name) for name in ("chance", "loss", "steps", "seconds")}
    shares = {**result.get("attribution", {}), **result.get("attribution_error", {})}
    for name, value in {**needed, **others, **shares}.items():
        if not is_number(value) and (value is not None or name in needed):
            return f"{name}={value!r} is no number"
    return ""


def _described(spec: RunSpec) -> dict[str, Any]:
    return {**spec.to_json(), "key": spec.key}


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold a lock of the system's if it is free; yield whether it is held."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, **NO_MARKER)
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError) as error:
        raise _no_lock(path, error) from error
    try:
        if isinstance(lock, SoftFileLock):  # what some versions turn a lock into, unasked
            raise _no_lock(path, OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)))
        yield True
    finally:
        lock.release()


def _no_lock(path: Path, error: Exception) -> FileError:
    return FileError(
        f"cannot lock {path}: {error}; give the sweep a folder that may be written to, on a file "
        "system with locks (flock)"
    )

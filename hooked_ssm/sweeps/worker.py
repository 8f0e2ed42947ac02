"""One run from its spec to its result, wherever it is executed."""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch

from hooked_ssm.analysis import mechanistic_evaluation
from hooked_ssm.errors import ConfigError
from hooked_ssm.model import HookedModel
from hooked_ssm.sweeps.run_folder import RunFolder
from hooked_ssm.sweeps.spec import EvaluationConfig, RunSpec
from hooked_ssm.training import TrainRun, train

log = logging.getLogger(__name__)

Outcome = Literal["done", "failed", "busy", "interrupted"]
"""How an attempt ended: with a result; with an error, kept in the run's folder; at once, because
somebody else holds the run; or early, because it was asked to stop."""


class Attempt(NamedTuple):
    """How an attempt ended and, if it failed, why."""

    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True)
class Setup:
    """What a worker's process needs besides a run.

    Attributes:
        device: Where runs train; None: on the CPU.
        threads: Of torch.
        imports: Modules that register tasks and mixers.
    """

    device: str | None = None
    threads: int = 1
    imports: tuple[str, ...] = ()


def import_modules(names: Sequence[str]) -> None:
    """Import modules for the tasks and mixers that they register.

    Raises:
        ConfigError: One of them cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module does
            raise ConfigError(
                f"imports: module {name!r} cannot be imported ({type(error).__name__}: {error}); "
                "give a name as an import statement has it, of a module on sys.path"
            ) from error


def attempt(sweep: Path | str, values: dict[str, Any], setup: Setup) -> Attempt:
    """Execute a run, given as `RunSpec.to_json`; every error is an outcome.

    What is printed and logged meanwhile goes to the run's log.txt.
    """
    run = None
    try:
        spec = RunSpec.from_json(values)
        run = RunFolder.of(sweep, spec)
        with _output_to(run.log):
            try:
                import_modules(setup.imports)
                torch.set_num_threads(setup.threads)
                return execute(run, spec, setup.device)
            except Exception:
                log.exception("%s", spec.label)
                raise
    except KeyboardInterrupt:
        return Attempt("interrupted")
    except Exception as error:  # whatever it is, the other runs go on
        reason = f"{type(error).__name__}: {error}"
        try:
            if run is not None:
                run.fail(error)
        except Exception as second:
            reason += f" (failure.json cannot be written either: {second})"
            log.error("%s", reason)
        return Attempt("failed", reason)


def execute(run: RunFolder, spec: RunSpec, device: str | None = None) -> Attempt:
    """Train and evaluate a run if it is not complete, from its last checkpoint if there is one.

    A run that was evaluated in another way is evaluated again, without training.
    """
    with run.locked() as held:
        if not held:
            return Attempt("busy")
        run.begin(spec)
        if run.is_complete:
            return Attempt("done")
        done, steps = run.checkpoint_step(), spec.train["steps"]
        now = f"training from step {done}" if done < steps else "trained; evaluation"
        log.info("%s: %s", spec.label, now)
        found = train_and_evaluate(spec, run.training, device)
        if found is None:
            return Attempt("interrupted")
        run.finish(*found)
        return Attempt("done")


def train_and_evaluate(
    spec: RunSpec, folder: Path, device: str | None = None
) -> tuple[dict[str, Any], pd.DataFrame] | None:
    """Return a run's row and its evaluation site by site; None if training was interrupted."""
    model = HookedModel(spec.model_config())
    task = spec.build_task()
    config = spec.train_config(folder, device)
    model.token_names = task.token_names
    run = train(model, spec.build_train_task(), config, eval_task=task, progress=False)
    if run.interrupted:
        return None
    how = spec.evaluation_config()
    evaluation = mechanistic_evaluation(
        model,
        task,
        how.documents,
        generator=torch.Generator().manual_seed(how.seed),
        split=how.split,
        sites=how.sites,
        directions=how.directions,
        max_batch=how.max_batch,
    )
    return _row(run, evaluation.to_row(), how), evaluation.frame


def _row(run: TrainRun, evaluation: dict[str, Any], how: EvaluationConfig) -> dict[str, Any]:
    return _finite(
        {
            **evaluation,
            "evaluate": asdict(how),
            "split": how.split,
            "dev_accuracy": run.accuracy,
            "dev_split": run.config.eval_split,
            "loss": run.rows[-1]["loss"],
            "steps": run.steps,
            "seconds": run.seconds,
        }
    )


def _finite(value: Any) -> Any:
    """Put None for what JSON has no number for: attributions where corrupting changes nothing."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Have everything that the process prints and logs end up in a file, for a while."""
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    with open(path, "a", encoding="utf-8", buffering=1) as file:
        kept = {stream: os.dup(stream) for stream in (1, 2)}
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        try:
            _flush()
            for stream in kept:
                os.dup2(file.fileno(), stream)
            root.handlers[:] = [handler]
            root.setLevel(logging.INFO)
            yield
        finally:
            _flush()
            root.handlers[:] = before[0]
            root.setLevel(before[1])
            for stream, copy in kept.items():
                os.dup2(copy, stream)
                os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # none, on a full disk, closed
            stream.flush()

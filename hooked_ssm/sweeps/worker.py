"""One run from its spec to its result, wherever it is executed."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch

from hooked_ssm.analysis import mechanistic_evaluation
from hooked_ssm.model import HookedModel
from hooked_ssm.sweeps.run_folder import RunFolder
from hooked_ssm.sweeps.spec import EvaluationConfig, RunSpec
from hooked_ssm.training import TrainRun, train

log = logging.getLogger(__name__)

Outcome = Literal["done", "failed", "busy", "interrupted"]
"""How an attempt ended: with a result; with an error, kept in the run's folder; at once, because
somebody else holds the run; or early, because it was asked to stop."""


def execute(sweep: Path | str, spec: RunSpec, device: str | None = None) -> Outcome:
    """Train and evaluate a run if it is not complete, from its last checkpoint if there is one.

    A run that was evaluated in another way is evaluated again, without training.
    """
    run = RunFolder.of(sweep, spec)
    with run.locked() as held:
        if not held:
            return "busy"
        run.begin(spec)
        if run.is_complete:
            return "done"
        done, steps = run.steps_done(), spec.train["steps"]
        now = f"training from step {done}" if done < steps else "trained; evaluation"
        log.info("%s: %s", spec.label, now)
        try:
            found = train_and_evaluate(spec, run.training, device)
        except KeyboardInterrupt:
            return "interrupted"
        except Exception as error:  # whatever it is, the other runs go on; the folder keeps it
            log.exception("%s", spec.label)
            run.fail(error)
            return "failed"
        if found is None:
            return "interrupted"
        run.finish(*found)
        return "done"


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

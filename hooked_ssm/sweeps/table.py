"""The results of a sweep's folder as one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hooked_ssm.errors import CheckpointError, ConfigError, TaskError
from hooked_ssm.sweeps.run_folder import RunFolder
from hooked_ssm.sweeps.spec import RunSpec, digest

CELL = ("task", "architecture", "variant", "n_layers", "d_model")
"""What a run is compared under: learning rates and seeds of one cell compete or are averaged."""
MEASURED = (
    "accuracy",
    "dev_accuracy",
    "chance",
    *(f"attribution_{position}" for position in ("key", "query", "value")),
    *(f"attribution_error_{position}" for position in ("key", "query", "value")),
    "mechanism",
    "timing",
    "loss",
    "steps",
    "seconds",
    "split",
    "dev_split",
)
WORDS = ("mechanism", "timing", "split", "dev_split")
COLUMNS = ("run", *CELL, "lr", "seed", "state", *MEASURED, "reason", "recipe")


def results_table(folder: Path | str) -> pd.DataFrame:
    """Return a row per run of a sweep's folder, in order of task, architecture and sizes.

    `state` is "complete", "failed" (then `reason` says why) or "unfinished"; what was not measured
    is NaN. `accuracy` is that of the evaluation, on documents of `split` ("test" by default),
    `dev_accuracy` the trainer's, on those of `dev_split`. `recipe` names all settings of a run but
    its learning rate and seed: it is equal where runs compete, or are averaged.

    Raises:
        CheckpointError: The folder holds no run, or a damaged one.
    """
    rows = []
    for path in Path(folder).glob("*/spec.json"):
        try:
            rows.append(_row(RunFolder(path.parent)))
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise CheckpointError(
                f"{path.parent} holds a damaged run ({type(error).__name__}: {error}); delete that "
                "folder and start the sweep again"
            ) from error
    if not rows:
        raise CheckpointError(
            f"{folder} holds no runs; give the folder that hooked-ssm sweep wrote to"
        )
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    numbers = [name for name in MEASURED if name not in WORDS]
    frame = frame.astype({**dict.fromkeys(numbers, "float64"), "steps": "Int64"})
    return frame.sort_values([*CELL, "lr", "seed", "run"], ignore_index=True)


def task_descriptions(folder: Path | str) -> dict[str, str]:
    """Return what each task of a sweep's folder looks like and asks: name -> words.

    Raises:
        CheckpointError: A run is damaged.
        ConfigError: Two runs call different tasks by one name, or a task of one's own is not known.
    """
    found: dict[str, RunSpec] = {}
    for path in sorted(Path(folder).glob("*/spec.json")):
        spec = RunFolder(path.parent).spec()
        first = found.setdefault(spec.task_name, spec)
        if first.task != spec.task:
            raise ConfigError(
                f"runs {first.key} and {spec.key} both call their task {spec.task_name!r}, but "
                f"the one is {dict(first.task)} and the other {dict(spec.task)}. Put sweeps into "
                "separate folders, or give the tasks different names"
            )
    return {name: _describe(spec) for name, spec in found.items()}


def _describe(spec: RunSpec) -> str:
    try:
        return spec.build_task().describe()
    except TaskError as error:
        raise ConfigError(f"task {spec.task_name!r} of run {spec.key}: {error}") from error


def best_over_lr(frame: pd.DataFrame, by: Sequence[str] = CELL) -> pd.DataFrame:
    """Return the complete runs at the learning rate that is best in their cell, all seeds of it.

    The best is the one of the most complete runs, since a rate at which some seeds fail is not
    judged by those that are left; then of the highest mean accuracy on the trainer's evaluation
    documents, so that the test documents do not choose; then the smaller one.

    Raises:
        KeyError: A column is missing.
        ConfigError: Several rows are of one cell, learning rate and seed, or complete ones of a
            cell differ in other settings.
    """
    refuse_other_runs(frame, by)
    complete = frame[frame["state"] == "complete"]
    rates = complete.groupby([*by, "lr"], as_index=False)["dev_accuracy"].agg(["size", "mean"])
    order = ["size", "mean", "lr"]
    rates = rates.sort_values(order, ascending=[False, False, True], kind="stable")
    best = rates.drop_duplicates(list(by))[[*by, "lr"]]
    return complete.merge(best, on=[*by, "lr"]).sort_values([*by, "seed"], ignore_index=True)


def refuse_other_runs(frame: pd.DataFrame, by: Sequence[str] = CELL) -> None:
    """Refuse a table in which seeds cannot be averaged: rows that differ in something else.

    Raises:
        KeyError: A column is missing.
        ConfigError: Several rows are of one cell, learning rate and seed, or complete ones of one
            cell have several recipes, so that they are runs of something that the table does not
            name.
    """
    _refuse_other_recipes(frame, list(dict.fromkeys([*CELL, *by])))
    names = list(dict.fromkeys([*CELL, *by, "lr", "seed"]))
    again = frame[frame.duplicated(names, keep=False)]
    if again.empty:
        return
    first = again.iloc[0]
    same = again[(again[names] == first[names]).all(axis=1)]
    runs = same.get("run", same.index)
    what = ", ".join(f"{name} {first[name]}" for name in names if first[name] != "")
    raise ConfigError(
        f"{len(same)} runs are all {what}: {', '.join(map(str, runs))}; they differ in something "
        "else and are no seeds of one run. Allowed: one run per cell, learning rate and seed. Put "
        "sweeps into separate folders, give what differs a name (a variant, another task name), or "
        "remove the runs that are not wanted"
    )


def _refuse_other_recipes(frame: pd.DataFrame, names: list[str]) -> None:
    complete = frame[frame["state"] == "complete"]
    if "recipe" not in complete:  # of a table made by hand
        return
    for cell, runs in complete.groupby(names, sort=False):
        if runs["recipe"].nunique() > 1:
            one, other = runs.drop_duplicates("recipe")["run"].head(2)
            what = ", ".join(f"{n} {value}" for n, value in zip(names, cell, strict=True) if value)
            raise ConfigError(
                f"runs {one} and {other} are both {what}, but differ in more than learning rate "
                "and seed: compare their spec.json. Put sweeps into separate folders, or give what "
                "differs a name (a variant, another task name)"
            )


def _row(run: RunFolder) -> dict[str, Any]:
    spec = run.spec()
    row = {
        "run": run.path.name,
        "task": spec.task_name,
        "variant": spec.variant,
        "architecture": spec.architecture,
        "n_layers": spec.n_layers,
        **{name: spec.model[name] for name in ("d_model", "seed")},
        "lr": spec.train["lr"],
        "recipe": digest(spec.recipe),
    }
    if not run.is_complete:
        reason = run.failure()
        return {**row, "state": "failed" if reason else "unfinished", "reason": reason}
    result = run.result()
    for name in ("attribution", "attribution_error"):
        for position, value in result[name].items():
            row[f"{name}_{position}"] = value
    measured = {name: value for name, value in result.items() if name in MEASURED}
    return {**row, **measured, "state": "complete"}

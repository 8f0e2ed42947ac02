"""From a file to runs: a grid, or several, of everything that varies.

    tasks: {short: {setting: ar_32, num_pairs: 4}}     # names for tasks; the paper's need none
    variants: {conv 2: {model: {options: {d_conv: 2}}}}     # names for changes
    grid:                                    # or a list of grids
      architecture: [attention, mamba]       # every axis: a value or a list
      d_model: [32, 64]
      n_layers: 2
      lr: [1e-3, 3e-3]
      seed: 0
      task: ar_32
      variant: [conv 2]                      # optional
      train: {steps: 100}                    # optional: for this grid only
    model: {init: paper}                     # fields of ModelConfig
    train: {steps: 50016, batch_size: 32}    # fields of TrainConfig
    train_task: {}                           # fields in which training documents differ
    evaluate: {documents: 320}               # fields of EvaluationConfig
    small: {grid: ..., train: ...}           # what read_sweep(path, small=True) puts instead

What is more special wins: variant, then grid, then file; sections are merged field by field, the
options of model setting by setting (null takes them all away). Axes stand on the grid alone. Files
are YAML or JSON.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hooked_ssm.errors import ConfigError, HookedSSMError, unknown
from hooked_ssm.sweeps.spec import RunSpec
from hooked_ssm.tasks import PAPER_TASKS

AXES = ("architecture", "d_model", "n_layers", "lr", "seed", "task")
SECTIONS = ("model", "train", "train_task", "evaluate")
NAMED = ("tasks", "variants")
ENTRIES = ("grid", *NAMED, *SECTIONS)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-3 for a word, because it has no point: here it is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_sweep(path: Path | str, *, small: bool = False) -> list[RunSpec]:
    """Return the runs of a sweep's file, checked, each once.

    Args:
        path: YAML or JSON, as the module describes.
        small: Put the entries under `small` in place of the file's.

    Raises:
        ConfigError: The file cannot be read, or an entry is unknown, missing, or does not fit.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())  # YAML's messages draw the place, over several lines
        raise ConfigError(f"cannot read the sweep {path}: {why}") from error
    try:
        return parse_sweep(content, small=small)
    except HookedSSMError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_sweep(content: Any, *, small: bool = False) -> list[RunSpec]:
    """Return the runs of a sweep that was read from a file.

    Raises:
        ConfigError: An entry is unknown, missing, or does not fit.
    """
    content = _mapping(content, "a sweep")
    _only(content, (*ENTRIES, "small"), "entry of a sweep")
    smaller = _mapping(content.get("small", {}), "small")
    _only(smaller, ENTRIES, "entry of small")
    if small and not smaller:
        raise ConfigError("this sweep has no small version; add an entry small: {grid: ...}")
    if small:
        content = _merged(content, smaller)
    grids = content.get("grid")
    runs: list[tuple[int, RunSpec]] = []
    for number, grid in enumerate(grids if isinstance(grids, list) else [grids], 1):
        for run in _runs(content, _mapping(grid, "grid")):
            try:
                run.check()
            except (HookedSSMError, TypeError) as error:
                raise ConfigError(f"run {run.label!r}: {error}") from error
            runs.append((number, run))
    return _each_once(runs)


def _each_once(runs: Sequence[tuple[int, RunSpec]]) -> list[RunSpec]:
    """Return the runs of numbered grids, those that recur once.

    Raises:
        ConfigError: One run under two names or evaluated in two ways, or two runs of one name.
    """
    keys: dict[str, RunSpec] = {}
    names: dict[tuple[Any, ...], tuple[int, RunSpec]] = {}
    for number, run in runs:
        same = keys.setdefault(run.key, run)
        if _name(same) != _name(run):
            raise ConfigError(
                f"{run.label!r} and {same.label!r} are the same run under two names; leave one out"
            )
        if same != run:
            raise ConfigError(
                f"{run.label!r} stands here twice, trained alike, with {_difference(same, run)}; "
                "a run has one evaluation and one way to be kept. Leave one out, or put it into a "
                "sweep of its own"
            )
        first, other = names.setdefault(_name(run), (number, run))
        if other.key != run.key:
            raise ConfigError(
                f"{run.label!r} of grid {first} and {run.label!r} of grid {number} are two runs of "
                f"one name, with {_difference(other, run)}; tables would average them as seeds. "
                "Name what differs: put it into a variant, or give the task another name"
            )
    return list(keys.values())


def _name(run: RunSpec) -> tuple[Any, ...]:
    """What tables tell runs apart by."""
    axes = [run.model[name] for name in ("architecture", "n_layers", "d_model")]
    return (run.task_name, run.variant, *axes, run.train["lr"], run.train["seed"])


def _difference(one: RunSpec, other: RunSpec) -> str:
    """Say in what two runs differ, such as "train.steps 2 and 5"."""

    def differences(a: Any, b: Any, path: str) -> Iterator[str]:
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
            if a != b:
                yield f"{path} {a!r} and {b!r}"
            return
        for name in dict.fromkeys([*a, *b]):
            inner = f"{path}.{name}" if path else name
            yield from differences(a.get(name), b.get(name), inner)

    return ", ".join(differences(one.to_json(), other.to_json(), ""))


def _merged(content: Mapping[str, Any], smaller: Mapping[str, Any]) -> dict[str, Any]:
    """Put a small version's grid in place, and its other entries into the file's."""
    merged = {**content, **smaller}
    for name in NAMED:
        merged[name] = {**content.get(name, {}), **smaller.get(name, {})}
    for name in SECTIONS:
        merged[name] = _over(content.get(name, {}), smaller.get(name, {}))
    return merged


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Put a section's entries over those of another, and options setting by setting."""
    merged = {**below, **above}
    options = [layer["options"] for layer in (below, above) if "options" in layer]
    if len(options) == 2 and all(isinstance(some, Mapping) for some in options):
        merged["options"] = {**options[0], **options[1]}
    return merged


def _runs(content: Mapping[str, Any], grid: Mapping[str, Any]) -> Iterator[RunSpec]:
    _only(grid, (*AXES, "variant", *SECTIONS), "entry of a grid")
    missing = [axis for axis in AXES if axis not in grid and axis != "seed"]
    if missing:
        raise ConfigError(f"the grid needs {', '.join(missing)}; it has {', '.join(grid)}")
    values = {"seed": 0, "variant": "", **grid}
    axes = [_listed(values[axis]) for axis in (*AXES, "variant")]
    for architecture, d_model, n_layers, lr, seed, task, variant in itertools.product(*axes):
        name, spec = _task(task, content)
        parts = _sections(content, grid, _variant(variant, content))
        sizes = {"architecture": architecture, "d_model": d_model, "n_layers": n_layers}
        yield RunSpec(
            model={**sizes, "seed": seed, **parts["model"]},
            task=spec,
            train={"lr": _number(lr), "seed": seed, **parts["train"]},
            train_task=parts["train_task"],
            evaluate=parts["evaluate"],
            task_name=name,
            variant=str(variant),
        )


def _sections(*layers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every section with the entries of all layers; those of later layers win."""
    parts: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        parts[section] = {}
        for layer in layers:
            values = _mapping(layer.get(section, {}), section)
            _refuse_axes(section, values)
            parts[section] = _over(parts[section], values)
    return parts


def _refuse_axes(section: str, values: Mapping[str, Any]) -> None:
    """Refuse a section that would override the grid; seeds of tasks and evaluations are others."""
    own = ("seed",) if section in ("evaluate", "train_task") else ()
    for name in values:
        if name in (*AXES, "variant") and name not in own:
            raise ConfigError(
                f"{section}: {name}={values[name]!r} would override an axis; put it on the grid: "
                f"grid: {{{name}: ...}}, where every run says what it is"
            )
        if section in ("model", "train") and name == "device":
            raise ConfigError(
                f"{section}: device={values[name]!r} is no part of a run; leave it out, and give "
                "it to the sweep: --device or LocalExecutor(device=...)"
            )


def _task(name: Any, content: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a task's name and its spec for `Task.from_json`."""
    own = _mapping(content.get("tasks", {}), "tasks")
    if name not in own and name not in PAPER_TASKS:
        raise ConfigError(unknown("task", name, [*own, *PAPER_TASKS]))
    spec = dict(_mapping(own.get(name, {"setting": name}), f"tasks: {name}"))
    if "setting" in spec:
        setting = spec.pop("setting")
        if setting not in PAPER_TASKS:
            raise ConfigError(unknown("paper setting", setting, PAPER_TASKS))
        spec = {**PAPER_TASKS[setting], **spec}
    return str(name), spec


def _variant(name: Any, content: Mapping[str, Any]) -> Mapping[str, Any]:
    if name == "":
        return {}
    variants = _mapping(content.get("variants", {}), "variants")
    if name not in variants:
        raise ConfigError(unknown("variant", name, variants))
    changes = _mapping(variants[name] or {}, f"variants: {name}")
    _only(changes, SECTIONS, f"entry of variant {name!r}")
    return changes


def _listed(value: Any) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError("an axis of the grid is an empty list; give at least one value")
    return values


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"lr={value!r}; allowed: a number > 0")
    return float(value)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be a mapping of names to values, got {value!r}")
    return value


def _only(given: Mapping[str, Any], allowed: tuple[str, ...], kind: str) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigError(unknown(kind, name, allowed))

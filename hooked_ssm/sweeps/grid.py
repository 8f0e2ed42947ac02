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

A stack of one's own has no architecture: architecture: null and n_layers: null on the grid, and
model: {mixers: [mamba, attention]}. Runs of one task, variant, architecture and size differ in
learning rate and seed only.

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

from hooked_ssm.checks import Positive, check_value, checked
from hooked_ssm.errors import ConfigError, HookedSSMError, unknown
from hooked_ssm.sweeps.spec import SEEDS, RunSpec
from hooked_ssm.tasks import PAPER_TASKS

AXES = ("architecture", "d_model", "n_layers", "lr", "seed", "task")
SECTIONS = ("model", "train", "train_task", "evaluate")
NAMED = ("tasks", "variants")
PLAIN = "as is"  # what figures call the variant ""
ENTRIES = ("grid", *NAMED, *SECTIONS)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-3 for a word, because it has no point: here it is a number.

    It also lets a key that comes again hide the first: here it is refused.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise yaml.YAMLError(
                    f"the key {key.value!r} on line {line} is in this mapping already, on line "
                    f"{lines[key.tag, key.value]}; allowed: each key once. Leave one out, or "
                    "rename it"
                )
            lines[key.tag, key.value] = line
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@checked
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
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
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
    content = _checked(content)
    smaller = content.get("small", {})
    if small and not smaller:
        raise ConfigError("this sweep has no small version; add an entry small: {grid: ...}")
    if small:
        content = _merged(content, smaller)
    if "grid" not in content:
        raise ConfigError(
            "a sweep needs a grid; write grid: {architecture: mamba, d_model: 32, ...}"
        )
    runs: list[tuple[int, RunSpec]] = []
    for number, grid in enumerate(_grids(content["grid"]), 1):
        for run in _runs(content, grid):
            try:
                run.check()
            except (HookedSSMError, TypeError, OverflowError) as error:
                raise ConfigError(f"run {run.label!r}: {error}") from error
            runs.append((number, run))
    return _each_once(runs)


def _each_once(runs: Sequence[tuple[int, RunSpec]]) -> list[RunSpec]:
    """Return the runs of numbered grids, those that recur once.

    Raises:
        ConfigError: One run under two names or evaluated in two ways, or runs of one cell that
            differ in more than learning rate and seed.
    """
    keys: dict[str, RunSpec] = {}
    cells: dict[tuple[Any, ...], tuple[int, RunSpec]] = {}
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
        first, other = cells.setdefault(_cell(run), (number, run))
        if other.recipe != run.recipe:
            raise ConfigError(
                f"{other.label!r} of grid {first} and {run.label!r} of grid {number} differ in "
                f"more than learning rate and seed, with {_difference(other, run, SEEDS)}; tables "
                "would let them compete, or average them. Name what differs: put it into a "
                "variant, or give the task another name"
            )
    return list(keys.values())


def _name(run: RunSpec) -> tuple[Any, ...]:
    """What tables tell runs apart by."""
    return (*_cell(run), run.train["lr"], run.train["seed"])


def _cell(run: RunSpec) -> tuple[Any, ...]:
    """What tables compare runs under, each at its best learning rate, averaged over seeds."""
    sizes = (run.architecture, run.n_layers, run.model["d_model"])
    return (run.task_name, run.variant, *sizes)


def _difference(one: RunSpec, other: RunSpec, but: Sequence[tuple[str, str]] = ()) -> str:
    """Say in what two runs differ, such as "train.steps 2 and 5", but for some entries."""

    def differences(a: Any, b: Any, path: str) -> Iterator[str]:
        if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
            if a != b and tuple(path.split(".")) not in but:
                yield f"{path} {a!r} and {b!r}"
            return
        for name in dict.fromkeys([*a, *b]):
            inner = f"{path}.{name}" if path else name
            yield from differences(a.get(name), b.get(name), inner)

    return ", ".join(differences(one.to_json(), other.to_json(), ""))


def _checked(content: Any) -> dict[str, Any]:
    """Return a sweep's content as plain values, every entry of the right shape, used or not."""
    content = dict(_mapping(_plain(content, "a sweep"), "a sweep"))
    _only(content, (*ENTRIES, "small"), "entry of a sweep")
    smaller = _mapping(content.get("small", {}), "small")
    _only(smaller, ENTRIES, "entry of small")
    for part, where in ((content, ""), (smaller, "small: ")):
        _check_sections(part, where)
        for name in NAMED:
            _mapping(part.get(name, {}), f"{where}{name}")
        for name, task in part.get("tasks", {}).items():
            _check_setting(_mapping(task, f"{where}tasks: {name}"))
        for name, changes in part.get("variants", {}).items():
            place = f"{where}variants: {name}"
            if name in ("", PLAIN):
                raise ConfigError(
                    f"{place} has the name {name!r}, by which tables and figures call the run "
                    "without changes. Give it another one"
                )
            if changes is not None:
                _only(_mapping(changes, place), SECTIONS, f"entry of variant {name!r}")
                _check_sections(changes, f"{place}: ")
        for grid in _grids(part["grid"], where) if "grid" in part else ():
            _only(grid, (*AXES, "variant", *SECTIONS), "entry of a grid")
            _check_sections(grid, f"{where}grid: ")
    return content


def _plain(value: Any, place: str, around: tuple[Any, ...] = ()) -> Any:
    """Return a value as JSON has it, lists for tuples and words for names that are numbers.

    Raises:
        ConfigError: It is a date, contains itself, or is otherwise nothing that JSON has.
    """
    if isinstance(value, str):
        _check_text(value, place)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if any(value is outer for outer in around):
        raise ConfigError(f"{place} contains itself; write it out, without an alias to itself")
    if isinstance(value, list | tuple):
        inner = (*around, value)
        return [_plain(entry, f"{place}[{i}]", inner) for i, entry in enumerate(value)]
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{place} is {value!r}, a {type(value).__name__}; allowed: words, numbers, true, "
            "false, null, and lists and mappings of them. Put it in quotes if a word is meant"
        )
    plain: dict[str, Any] = {}
    for key, entry in value.items():
        name = _word(key, f"{place}: a name")
        _check_text(name, f"{place}: a name")
        if name in plain:
            raise ConfigError(f"{place} has {name!r} twice; leave one out, or rename it")
        plain[name] = _plain(entry, f"{place}: {name}", (*around, value))
    return plain


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place} is {text!r}, which no file can hold: {error}") from error


def _grids(value: Any, where: str = "") -> list[Mapping[str, Any]]:
    if value == []:
        raise ConfigError(f"{where}grid is an empty list, of 0 runs; give at least one grid")
    return [
        _mapping(grid, f"{where}grid") for grid in (value if isinstance(value, list) else [value])
    ]


def _check_sections(layer: Mapping[str, Any], where: str) -> None:
    """Refuse sections that are no mappings, or would override the grid."""
    for section in SECTIONS:
        values = _mapping(layer.get(section, {}), f"{where}{section}")
        own = ("seed",) if section in ("evaluate", "train_task") else ()  # no axis: other seeds
        for name, value in values.items():
            if name in (*AXES, "variant") and name not in own:
                raise ConfigError(
                    f"{where}{section}: {name}={value!r} would override an axis; put it on the "
                    f"grid: grid: {{{name}: ...}}, where every run says what it is"
                )
            if section in ("model", "train") and name == "device":
                raise ConfigError(
                    f"{where}{section}: device={value!r} is no part of a run; leave it out, and "
                    "give it to the sweep: --device or LocalExecutor(device=...)"
                )


def _check_setting(task: Mapping[str, Any]) -> None:
    if "setting" in task:
        setting = _word(task["setting"], "setting")
        if setting not in PAPER_TASKS:
            raise ConfigError(unknown("paper setting", setting, PAPER_TASKS))


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
    missing = [axis for axis in AXES if axis not in grid and axis != "seed"]
    if missing:
        has = ", ".join(grid) or "nothing"
        raise ConfigError(f"the grid needs {', '.join(missing)}; it has {has}")
    values = {"seed": 0, "variant": "", **grid}
    axes = [_listed(values[axis]) for axis in (*AXES, "variant")]
    for architecture, d_model, n_layers, lr, seed, task, variant in itertools.product(*axes):
        name, spec = _task(_word(task, "task"), content)
        variant = _word(variant, "variant")
        parts = _sections(content, grid, _variant(variant, content))
        sizes = {"architecture": architecture, "d_model": d_model, "n_layers": n_layers}
        yield RunSpec(
            model={**sizes, "seed": seed, **parts["model"]},
            task=spec,
            train={"lr": _number(lr), "seed": seed, **parts["train"]},
            train_task=parts["train_task"],
            evaluate=parts["evaluate"],
            task_name=name,
            variant=variant,
        )


def _sections(*layers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every section with the entries of all layers; those of later layers win."""
    parts: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        parts[section] = {}
        for layer in layers:
            parts[section] = _over(parts[section], layer.get(section, {}))
    return parts


def _task(name: str, content: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a task's name and its spec for `Task.from_json`."""
    own = content.get("tasks", {})
    if name not in own and name not in PAPER_TASKS:
        raise ConfigError(unknown("task", name, [*own, *PAPER_TASKS]))
    spec = dict(own.get(name, {"setting": name}))
    if "setting" in spec:
        spec = {**PAPER_TASKS[str(spec.pop("setting"))], **spec}
    return name, spec


def _variant(name: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    variants = content.get("variants", {})
    if name and name not in variants:
        raise ConfigError(unknown("variant", name, variants))
    return variants[name] or {} if name else {}


def _listed(value: Any) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError("an axis of the grid is an empty list; give at least one value")
    return values


def _number(value: Any) -> float:
    check_value("lr", value, Positive)
    return float(value)


def _word(value: Any, what: str) -> str:
    """Return a name; a number that names something is the word for it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        remedy = {
            bool: "YAML reads yes, no, on and off as true and false: put it in quotes",
            type(None): "Leave it out, or give a name; '' is the variant without changes",
            dict: "Define it under tasks or variants, and give its name here",
        }.get(type(value), "Put it in quotes if a word is meant")
        raise ConfigError(f"{what}={value!r}; allowed: a word. {remedy}")
    return str(value)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{what} must be a mapping of names to values, got {value!r}; write "
            "{name: value, ...}, or leave it out if there is nothing to say"
        )
    return value


def _only(given: Mapping[str, Any], allowed: tuple[str, ...], kind: str) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigError(unknown(kind, name, allowed))

"""What one run of a sweep is, and the name that follows from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import torch

from hooked_ssm.analysis.interchange import KEY, POSITIONS, Direction
from hooked_ssm.analysis.sites import find_sites
from hooked_ssm.checks import Count, Words, check_fields
from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import ConfigError, HookNameError, TaskError, unknown
from hooked_ssm.model import HookedModel
from hooked_ssm.rules import Rule
from hooked_ssm.tasks import Task
from hooked_ssm.tasks.base import Split
from hooked_ssm.training import TrainConfig
from hooked_ssm.training.config import RESULT_FREE

SEEDS = (("train", "lr"), ("train", "seed"), ("model", "seed"))
"""In which entries runs may differ that compete for the best learning rate, or are averaged."""
FORMAT = 1  # of a spec's identity: another number gives every run another name

GeneratorSeed = Annotated[
    int, Rule("an integer from 0 to 2**64 - 1", lambda value: 0 <= value < 2**64)
]

Directions = Annotated[
    Sequence[Direction],
    Rule(
        "a list of 'restore' and, if wanted, 'corrupt', each once",
        lambda words: "restore" in words and len(set(words)) == len(words),
    ),
]
"""What the headline attributions need, and what may be measured beside it."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How a trained model is evaluated: arguments of `mechanistic_evaluation`.

    Attributes:
        documents: How many.
        split: The task's split they come from.
        seed: Of documents and corruptions: the same ones for every run of a sweep.
        sites: Where activations are restored; None: inputs and outputs of blocks, mixers, MLPs.
        directions: "restore", or both "restore" and "corrupt".
        max_batch: Most documents in one forward.

    Raises:
        ConfigError: A value does not fit.
    """

    documents: Count = 320
    split: Split = "test"
    seed: GeneratorSeed = 0
    sites: Words | None = None
    directions: Directions = ("restore",)
    max_batch: Count = 512

    def __post_init__(self) -> None:
        check_fields(self, prefix="evaluate: ")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EvaluationConfig:
        """Build it from plain values.

        Raises:
            ConfigError: A field is unknown, or its value does not fit.
        """
        names = [f.name for f in fields(cls)]
        for name in values:
            if name not in names:
                raise ConfigError(unknown("evaluate field", name, names))
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A model to train and evaluate, as plain JSON values.

    Attributes:
        model: Fields of `ModelConfig`; d_vocab and n_ctx are the task's where they are left out.
        task: A spec of `Task.from_json`; its `single_query()` documents are evaluated.
        train: Fields of `TrainConfig`, but where it runs (folder, device).
        train_task: Fields of the task that the training documents differ in; neither its
            vocabulary nor the task's `shared_fields`, which decide what is compared.
        evaluate: Fields of `EvaluationConfig`. No part of what the run is: evaluating in another
            way trains nothing again.
        task_name: What tables call the task. Names are no part of what the run is either.
        variant: What tables call whatever else makes this run different; "" if nothing does.
    """

    model: Mapping[str, Any]
    task: Mapping[str, Any]
    train: Mapping[str, Any]
    train_task: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Mapping[str, Any] = field(default_factory=dict)
    task_name: str
    variant: str = ""

    def __post_init__(self) -> None:
        check_fields(self, prefix="a run's ")

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the trained model, as it was written: no defaults, no names.

        How it is evaluated, and what the trainer calls `RESULT_FREE`, are no part of it.
        """
        train = {name: value for name, value in self.train.items() if name not in RESULT_FREE}
        parts = {
            "format": FORMAT,
            "model": dict(self.model),
            "task": dict(self.task),
            "train": train,
            "train_task": dict(self.train_task),
        }
        return json.loads(json.dumps(parts))

    @property
    def key(self) -> str:
        """The run's name: a hash of its identity, the same on every machine and in any order."""
        return digest(self.identity)

    @property
    def architecture(self) -> str:
        """The architecture, or the mixers of a stack of one's own, such as "mamba+attention"."""
        named = self.model.get("architecture")
        mixers = self.model.get("mixers")
        if named is not None or not isinstance(mixers, list):
            return str(named)
        return "+".join(str(m["mixer"] if isinstance(m, Mapping) else m) for m in mixers)

    @property
    def n_layers(self) -> int:
        """How many layers, or mixers of a stack of one's own."""
        given = self.model.get("n_layers")
        return len(self.model.get("mixers") or ()) if given is None else given

    @property
    def recipe(self) -> dict[str, Any]:
        """The identity without learning rate and seeds, and the evaluation: what runs share that
        compete for the best learning rate, or are averaged as seeds.
        """
        recipe = self.identity
        for part, name in SEEDS:
            recipe[part].pop(name, None)
        return {**recipe, "evaluate": outcome_settings(self.evaluate)}

    @property
    def label(self) -> str:
        """One line for people, such as "mamba d64 l2 lr 0.003 seed 0, ar_32, conv 2"."""
        parts = [
            f"{self.architecture} d{self.model['d_model']} l{self.n_layers} "
            f"lr {self.train['lr']:g} seed {self.train['seed']}",
            self.task_name,
            self.variant,
        ]
        return ", ".join(part for part in parts if part)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunSpec:
        """Build the spec of `to_json`'s values.

        Raises:
            ConfigError: They are not those of a spec.
        """
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"no spec of a run: {error}") from error

    def build_task(self) -> Task:
        """Return the task that is evaluated.

        Raises:
            TaskError: The task cannot be built.
        """
        return _task(json.dumps(self.task)).single_query()

    def build_train_task(self) -> Task:
        """Return the task that is trained on.

        Raises:
            TaskError: The task cannot be built.
        """
        return _task(json.dumps({**self.task, **self.train_task}))

    def model_config(self) -> ModelConfig:
        """Return the model's config.

        Raises:
            ConfigError: A value does not fit, or the model is too small for the documents.
        """
        tasks = (self.build_task(), self.build_train_task())
        given = {name: value for name, value in self.model.items() if value is not None}
        sizes = {
            "d_vocab": max(task.d_vocab for task in tasks),
            "n_ctx": max(task.max_length for task in tasks),
        }
        config = ModelConfig.from_dict({**sizes, **given})
        for name, least in sizes.items():
            if getattr(config, name) < least:
                raise ConfigError(
                    f"model: {name}={getattr(config, name)}, but documents of the task or of the "
                    f"training task need {least}; allowed: an integer >= {least}. Leave {name} "
                    "out: it is then what they need"
                )
        return config

    def train_config(
        self, folder: Path | str | None = None, device: str | None = None
    ) -> TrainConfig:
        """Return the training's config, kept in a folder, on a device.

        Raises:
            ConfigError: A value does not fit.
        """
        for name in ("folder", "device"):
            if name in self.train:
                raise ConfigError(f"train: {name} is no part of a run; give it to the sweep")
        where = {"folder": None if folder is None else str(folder), "device": device}
        return TrainConfig.from_dict({**self.train, **where})

    def evaluation_config(self) -> EvaluationConfig:
        """Return how the model is evaluated.

        Raises:
            ConfigError: A value does not fit.
        """
        return EvaluationConfig.from_dict(self.evaluate)

    def check(self) -> None:
        """Try everything that a run does but training, so that what is wrong shows before it.

        Documents are drawn and corrupted, and sites are looked up in a model that holds no values;
        what many runs share is tried once.

        Raises:
            HookedSSMError: A value does not fit; the message names it.
        """
        train, evaluate = self.train_config(), self.evaluation_config()
        task, train_task = json.dumps(self.task), json.dumps({**self.task, **self.train_task})
        if train.eval_split == evaluate.split:
            raise ConfigError(
                f"train: eval_split={train.eval_split!r} is evaluate's split too: the learning "
                "rate would be chosen on the split it is judged by. Allowed: two different ones, "
                "such as eval_split 'dev' and split 'test', the defaults"
            )
        _check_same_words(task, train_task)
        _check_documents(task, train_task, train.eval_split, evaluate.split)
        config = self.model_config().with_(seed=0)
        _check_sites(json.dumps(config.to_dict()), tuple(evaluate.sites or ()))


def digest(values: Mapping[str, Any]) -> str:
    """Return a hash of JSON values, the same on every machine and in any order."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def outcome_settings(evaluate: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides an evaluation's outcome, defaults filled in.

    Raises:
        ConfigError: A field is unknown, or its value does not fit.
    """
    settings = asdict(EvaluationConfig.from_dict(evaluate))
    del settings["max_batch"]
    return json.loads(json.dumps(settings))


@lru_cache(maxsize=64)
def _task(spec: str) -> Task:
    return Task.from_json(json.loads(spec))  # a grammar is drawn and tried: once is enough


@lru_cache(maxsize=256)
def _check_same_words(spec: str, train_spec: str) -> None:
    """Hold the training task to the vocabulary and the fixed fields of the task.

    Raises:
        ConfigError: It has others.
    """
    task, train = _task(spec), _task(train_spec)
    fixed, trained = task.to_json(), train.to_json()
    for name in ("task", *task.shared_fields):
        if fixed.get(name) != trained.get(name):
            raise ConfigError(
                f"train_task: {name}={trained.get(name)!r}, but the task's is {fixed.get(name)!r}: "
                "it decides what is compared, so training documents share it. Leave it out, or "
                "change it under tasks"
            )
    names, trained_names = task.token_names, train.token_names
    if names != trained_names:
        both = enumerate(zip_longest(trained_names, names))
        at, (got, wanted) = next((i, pair) for i, pair in both if pair[0] != pair[1])
        raise ConfigError(
            f"train_task: its vocabulary of {len(trained_names)} tokens is not the task's of "
            f"{len(names)}: token {at} is {got!r}, but the task's is {wanted!r}. Leave out what "
            "changes the vocabulary, or change it under tasks"
        )


@lru_cache(maxsize=256)
def _check_documents(spec: str, train_spec: str, dev: Split, test: Split) -> None:
    """Draw documents to train and evaluate on; corrupt those of split `test` as evaluations do.

    Raises:
        ConfigError: They cannot be, or lack a position that an evaluation restores at.
    """
    task = _task(spec).single_query()
    lacking = [name for name in POSITIONS if name not in task.position_names]
    lacking += [] if KEY in task.corruptions else [f"{KEY} to corrupt"]
    if lacking:
        raise ConfigError(
            f"task {task.name!r} lacks {', '.join(lacking)}: the mechanistic evaluation needs "
            f"positions {', '.join(POSITIONS)}, and to corrupt {KEY}. Use another task"
        )
    _draw(_task(train_spec), "train", "train_task")
    _draw(task, dev, "task")
    _draw(task, test, "task", task.corruptions)


def _draw(task: Task, split: Split, what: str, corruptions: tuple[str, ...] = ()) -> None:
    """Draw 2 documents of a task, and corrupt them.

    Raises:
        ConfigError: It does not go.
    """
    generator = torch.Generator().manual_seed(0)
    doing = "drawn"
    try:
        batch = task.sample(2, split, generator=generator)
        for position in corruptions:
            doing = f"corrupted at {position}"
            task.corrupt(batch, position, generator=generator)
    except TaskError as error:
        raise ConfigError(
            f"{what}: documents of split {split!r} cannot be {doing}: {error}"
        ) from error


@lru_cache(maxsize=1024)
def _check_sites(config: str, sites: tuple[str, ...]) -> None:
    """Build a model without values, and find the sites in it.

    Raises:
        ConfigError: No layer has one of them, or the model cannot be built.
    """
    try:
        model = HookedModel(ModelConfig.from_dict(json.loads(config)), initialise=False)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # torch's, of its size
        why = str(error).partition("\n")[0]  # frames of C++ may follow
        raise ConfigError(
            f"model: it cannot be built: {why}. Allowed: what fits into memory; make it smaller"
        ) from error
    try:
        if sites:
            find_sites(model, sites)
    except HookNameError as error:
        raise ConfigError(f"evaluate: sites={list(sites)}: {error}") from error

"""Everything that decides what a training run computes, in one frozen dataclass."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

from hooked_ssm.checks import Count, Fraction, NonNegative, Positive, Seed, check_fields
from hooked_ssm.devices import DeviceName
from hooked_ssm.errors import ConfigError, unknown
from hooked_ssm.rules import Rule
from hooked_ssm.tasks.base import Split

Schedule = Literal["cosine", "linear", "constant"]
"""How the learning rate falls after the warm-up: along half a cosine, on a line, or not at all."""
Loss = Literal["answer", "all"]
"""Which tokens are trained on: the answers only, or every next token of a document."""
Data = Literal["stream", "fixed"]
"""New documents at every step, or a fixed set of them, reshuffled at every pass."""
Keep = Literal["last", "all"]
"""Which checkpoints stay on disk: the newest, or every one (to study training itself)."""

Betas = Annotated[
    Sequence[int | float],
    Rule("two numbers in [0, 1)", lambda rates: len(rates) == 2 and all(0 <= b < 1 for b in rates)),
]

RESULT_FREE = ("folder", "device", "checkpoint_every", "keep_checkpoints")
"""Fields that may differ when a run is resumed: they say where and how safely, not what."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one training run (AdamW on next-token cross-entropy).

    Left out on purpose: early stopping (recall is learned as a long plateau, then a cliff),
    `torch.compile` (compiled models ignore hooks added later), and a model seed (a model is
    initialised by whoever builds it).

    Attributes:
        steps: Number of optimizer updates.
        batch_size: Documents per update.
        lr: Peak learning rate, reached at the end of the warm-up.
        seed: Decides every document trained and evaluated on, through generators of the run's own.
        folder: Where the run is kept, and resumed from if it is there already; None: nowhere.
        weight_decay: AdamW's decay of weight matrices; never of norms, biases, embeddings and
            parameters marked `_no_weight_decay`.
        warmup: Fraction of the steps over which the learning rate rises linearly.
        schedule: What the learning rate does after the warm-up.
        betas: AdamW's decay rates of the first and second moment.
        clip_norm: Largest norm of the whole gradient; None: not clipped.
        loss: "answer" trains on the answers, "all" on every next token. Decides whether some
            architectures learn recall at all, so it is part of every recipe.
        data: "stream" never repeats a document on purpose; "fixed" trains on `train_set_size` ones.
            Both are of the task's split "train".
        train_set_size: Documents in the fixed training set; only with data="fixed".
        eval_every: Steps between evaluations; the last step is always evaluated.
        eval_size: Documents in the evaluation set, the same at every evaluation.
        eval_split: The task's split that evaluation documents come from.
        log_every: Steps between rows of the history; a row's loss is the mean since the last row.
        checkpoint_every: Steps between checkpoints: what a kill can lose. Needs `folder`.
        keep_checkpoints: Which checkpoints stay on disk.
        autocast: "bfloat16" runs the training forward pass under autocast; parameters, loss and
            evaluation stay float32. None: no autocast.
        device: Where to train; None: where the model is. The model stays there afterwards.

    Raises:
        ConfigError: A value is out of range or contradicts another.
    """

    steps: Count
    batch_size: Count
    lr: Positive
    seed: Seed
    folder: str | os.PathLike[str] | None = None
    weight_decay: NonNegative = 0.0
    warmup: Fraction = 0.1
    schedule: Schedule = "cosine"
    betas: Betas = (0.9, 0.999)
    clip_norm: Positive | None = None
    loss: Loss = "answer"
    data: Data = "stream"
    train_set_size: Count | None = None
    eval_every: Count = 250
    eval_size: Count = 512
    eval_split: Split = "dev"
    log_every: Count = 25
    checkpoint_every: Count = 500
    keep_checkpoints: Keep = "last"
    autocast: Literal["bfloat16"] | None = None
    device: DeviceName | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.folder is not None:
            object.__setattr__(self, "folder", str(self.folder))
        object.__setattr__(self, "betas", tuple(self.betas))
        if (self.data == "fixed") != (self.train_set_size is not None):
            raise ConfigError(
                f"data={self.data!r} with train_set_size={self.train_set_size!r}; "
                "give train_set_size with data='fixed', and only then"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build a config from `to_dict`'s values.

        Raises:
            ConfigError: A field is unknown, missing, or its value does not fit.
        """
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise ConfigError(unknown("TrainConfig field", name, names))
        missing = [name for name in ("steps", "batch_size", "lr", "seed") if name not in values]
        if missing:
            got = ", ".join(n for n, value in values.items() if value is not None) or "nothing"
            raise ConfigError(f"TrainConfig needs {', '.join(missing)}; got {got}")
        return cls(**values)


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed for one purpose, so that no two generators of a run draw the same numbers."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1

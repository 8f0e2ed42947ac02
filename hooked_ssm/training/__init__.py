"""Training: `train(model, task, TrainConfig(...))` returns a `TrainRun`."""

from __future__ import annotations

from hooked_ssm.errors import DivergedError
from hooked_ssm.training.checkpoint import checkpoint_folders
from hooked_ssm.training.config import TrainConfig
from hooked_ssm.training.loss import answer_accuracy, training_loss
from hooked_ssm.training.optimizer import learning_rate, split_by_decay
from hooked_ssm.training.run import TrainRun
from hooked_ssm.training.trainer import train, training_stream

__all__ = [
    "DivergedError",
    "TrainConfig",
    "TrainRun",
    "answer_accuracy",
    "checkpoint_folders",
    "learning_rate",
    "split_by_decay",
    "train",
    "training_loss",
    "training_stream",
]

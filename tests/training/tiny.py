"""A tiny model and task that train in milliseconds, and how to compare two runs of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hooked_ssm.config import ModelConfig
from hooked_ssm.model import HookedModel
from hooked_ssm.tasks import AssociativeRecall
from hooked_ssm.training import TrainConfig, TrainRun, train

TASK = AssociativeRecall(num_kv=12, num_pairs=2)


def tiny_model(seed: int = 0, architecture: str = "mamba") -> HookedModel:
    return HookedModel(
        ModelConfig(
            architecture=architecture,
            d_model=8,
            n_layers=1,
            d_vocab=TASK.d_vocab,
            n_ctx=TASK.max_length,
            seed=seed,
        )
    )


def tiny_config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "steps": 20,
        "batch_size": 8,
        "lr": 1e-2,
        "seed": 3,
        "weight_decay": 0.1,
        "eval_every": 7,
        "eval_size": 32,
        "log_every": 3,
        "checkpoint_every": 5,
    }
    return TrainConfig(**{**values, **changes})


def tiny_run(config: TrainConfig, model: nn.Module | None = None) -> tuple[TrainRun, nn.Module]:
    model = tiny_model() if model is None else model
    return train(model, TASK, config, progress=False), model


def assert_same_run(got: tuple[TrainRun, nn.Module], want: tuple[TrainRun, nn.Module]) -> None:
    """Assert equal weights, bit by bit, and equal histories but for the seconds."""
    want_weights = want[1].state_dict()
    for name, weight in got[1].state_dict().items():
        assert torch.equal(weight, want_weights[name]), name
    rows = [[{**row, "seconds": 0} for row in run.rows] for run, _ in (got, want)]
    assert rows[0] == rows[1]
    assert (got[0].accuracy, got[0].steps) == (want[0].accuracy, want[0].steps)

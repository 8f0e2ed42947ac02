"""Settings, arguments and folders that training cannot use are refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from hooked_ssm.errors import CheckpointError, ConfigError, ShapeError
from hooked_ssm.training import TrainConfig, TrainRun, train
from tests.training.tiny import TASK, tiny_config, tiny_model, tiny_run

pytestmark = pytest.mark.usefixtures("as_shipped")

NAN = float("nan")
COUNTS = ("steps", "batch_size", "eval_every", "eval_size", "log_every", "checkpoint_every")
WRONG = {
    **dict.fromkeys(COUNTS, [0, -1, True, 1.5, "10", None]),
    "lr": [0, -1e-3, NAN, float("inf"), "x", "1e-3", True, None],
    "seed": [-1, True, 1.5, "0", None],
    "folder": [3, True],
    "weight_decay": [-0.1, NAN, "0", None],
    "warmup": [-0.1, 1.1, NAN, "0.1", None],
    "schedule": ["cosin", None, 1],
    "betas": ["ab", None, 0.9, (0.9,), (0.9, 1.0), (0.9, "0.99"), (NAN, 0.9)],
    "clip_norm": [0, NAN, "1", True],
    "loss": ["query", None],
    "data": ["streams", None],
    "train_set_size": [0, True, "8"],
    "eval_split": ["tests", None, 1],
    "keep_checkpoints": ["none", None],
    "autocast": ["float16", True],
    "device": ["gpu", 0],
}


def test_the_table_has_every_field():
    assert set(WRONG) == {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_settings(name, value):
    with pytest.raises(ConfigError, match=name):
        tiny_config(**{name: value})
    with pytest.raises(ConfigError, match=name):
        TrainConfig.from_dict({**tiny_config().to_dict(), name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "mamba"), ("task", "ar"), ("config", {"steps": 3}), ("eval_task", 3),
     ("progress", 1)],
)  # fmt: skip
def test_arguments(name, value):
    given = {"model": tiny_model(), "task": TASK, "config": tiny_config(), "progress": False}
    with pytest.raises((ConfigError, ShapeError), match=f"train: {name}="):
        train(**{**given, name: value})


def test_folders_under_a_file_and_of_another_run(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "run"):
        with pytest.raises(ConfigError, match="is, or lies in, a file"):
            tiny_run(tiny_config(folder=folder))
    run, _ = tiny_run(tiny_config(folder=tmp_path / "run", steps=2))
    with pytest.raises(ConfigError, match="is, or lies in, a file"):
        run.save(file / "run")
    with pytest.raises(CheckpointError, match="train.lr is .* there, .* here"):
        tiny_run(tiny_config(folder=tmp_path / "run", steps=2, lr=0.5))
    with pytest.raises(CheckpointError, match="result.json"):
        TrainRun.load(file)

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hooked_ssm.errors import ConfigError
from hooked_ssm.training import TrainConfig
from hooked_ssm.training.config import derived_seed
from tests.training.tiny import tiny_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0; allowed: an integer >= 1"),
        ({"steps": 10.0}, "steps=10.0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"lr": 0.0}, "lr=0.0; allowed: a finite number > 0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": "1e-3"}, "lr='1e-3'"),
        ({"seed": -1}, "seed=-1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"warmup": 1.5}, "warmup=1.5; allowed: a number from 0 to 1"),
        ({"betas": (0.9, 1.0)}, "betas=\\(0.9, 1.0\\)"),
        ({"betas": (0.9,)}, "betas"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"loss": "query"}, "unknown loss 'query'"),
        ({"data": "fixed"}, "give train_set_size"),
        ({"train_set_size": 8}, "give train_set_size"),
        ({"autocast": "float16"}, "unknown autocast 'float16'"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"keep_checkpoints": "none"}, "unknown keep_checkpoints"),
    ],
)
def test_bad_values_are_refused(changes, message, as_shipped):
    with pytest.raises(ConfigError, match=message):
        tiny_config(**changes)


def test_dict_round_trip_through_json():
    config = tiny_config(folder=Path("somewhere"), clip_norm=1.0, data="fixed", train_set_size=9)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        TrainConfig.from_dict({"batchsize": 3})
    with pytest.raises(ConfigError, match="needs steps, lr, seed"):
        TrainConfig.from_dict({"batch_size": 3})


def test_derived_seeds_differ_by_seed_and_purpose():
    seeds = {derived_seed(seed, purpose) for seed in range(50) for purpose in ("a", "b")}
    assert len(seeds) == 100
    assert derived_seed(7, "a") == derived_seed(7, "a")
    assert all(0 <= seed < 2**63 for seed in seeds)

"""A model's description: every field of a wrong type, or out of range, is named with a remedy."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import ConfigError
from hooked_ssm.mixers import MIXERS

pytestmark = pytest.mark.usefixtures("as_shipped")

SIZES = {"d_model": 8, "d_vocab": 11, "n_ctx": 16}
NO_COUNT = (0, -4, True, "8", 2.5, math.nan, None, [8])
NO_FLAG = ("no", 1, None, 0.0)
NO_NUMBER = (-1, "x", math.nan, math.inf, True, None)

WRONG_MODEL = {
    "d_model": NO_COUNT,
    "d_vocab": NO_COUNT,
    "n_ctx": NO_COUNT,
    "n_heads": NO_COUNT,
    "n_layers": [value for value in NO_COUNT if value is not None],
    "d_mlp": (-4, "8", 2.5, True, math.nan),
    "norm_eps": NO_NUMBER,
    "gated_mlp": NO_FLAG,
    "mlp_bias": NO_FLAG,
    "parallel_attn_mlp": NO_FLAG,
    "tie_embeddings": NO_FLAG,
    "seed": ("a", 1.5, True, None, 2**64),
    "dtype": ("float32", torch.int64, None, torch.complex64),
    "device": ("bogus", None, "cuda:x", 1.5),
    "architecture": (3, ["mamba"]),
    "mixers": ("mamba", [3], {"mixer": "mamba"}, [{3: "mamba"}], [None]),
    "options": (["d_state"], "d_state", None),
    "act": ("step", 3, None),
    "norm": ("batch", 3),
    "final_norm": ("batch", None),
    "positions": ("sine", 0),
    "init": ("xavier", None, 1),
}


def each(wrong: dict) -> list:
    return [
        pytest.param(name, v, id=f"{name}={v!r}") for name, values in wrong.items() for v in values
    ]


def test_the_table_has_every_field():
    assert set(WRONG_MODEL) == {f.name for f in fields(ModelConfig) if f.init}


@pytest.mark.parametrize(("name", "value"), each(WRONG_MODEL))
def test_a_field_that_does_not_fit_is_named(name, value):
    given = {**SIZES, "architecture": "attention", "n_layers": 1, name: value}
    with pytest.raises(ConfigError, match=rf"{name}\b.*[aA]llowed|unknown {name}"):
        ModelConfig(**given)


def wrong_for(annotation: str, default: object) -> tuple:
    """Values that a setting of this kind never takes."""
    if isinstance(default, bool):
        return NO_FLAG
    optional = "None" in annotation
    never = ("8x", [1], math.nan, -math.inf, *(() if optional else (None,)))
    number = annotation.startswith(("Positive", "NonNegative", "int | float", "float"))
    return never if number else (*never, 2.5, -1)


SETTINGS = [
    pytest.param(mixer, f.name, value, id=f"{mixer}-{f.name}={value!r}")
    for mixer, kind in MIXERS.items()
    for f in fields(kind.Options)
    for value in wrong_for(str(f.type), f.default)
]


@pytest.mark.parametrize(("mixer", "name", "value"), SETTINGS)
def test_a_setting_that_does_not_fit_is_named(mixer, name, value):
    with pytest.raises(ConfigError, match=rf"{name}=.*; allowed: |unknown {name}"):
        ModelConfig(mixers=[{"mixer": mixer, name: value}], **SIZES)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"mixer": "mamba", "expand": 1.3}, r"expand=1\.3; allowed: an integer >= 1"),
        ({"mixer": "mamba", "d_inner": 0}, "d_inner=0; allowed: an integer >= 1 or None"),
        ({"mixer": "mamba", "dt_min": 0.2}, r"dt_min=0\.2 is above dt_max=0\.1"),
        ({"mixer": "gated_delta_net", "dt_max": 1e-4}, "dt_min=0.001 is above"),
        ({"mixer": "mamba2", "dt_limit": [2, 1]}, "dt_limit.*two numbers, 0 <= lowest <= highest"),
        ({"mixer": "mamba2", "dt_limit": [1]}, "dt_limit.*two numbers"),
        ({"mixer": "mamba2", "norm": "layer"}, "unknown norm 'layer'"),
        ({"mixer": "hyena", "emb_dim": 4}, "emb_dim=4; allowed: an odd integer >= 3"),
        ({"mixer": "attention", "rotary_dim": 3}, "rotary_dim=3; allowed: an even integer"),
        ({"mixer": "attention", "n_kv_heads": 0}, "n_kv_heads=0; allowed: an integer >= 1"),
        ({"mixer": ["mamba"]}, "unknown mixer"),
        ({"mixer": 3}, "unknown mixer 3.*register_mixer"),
    ],
)
def test_settings_out_of_range_are_named(layer, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(mixers=[layer], **SIZES)


@pytest.mark.parametrize("settings", [{"d_head": 3}, {"d_head": 4, "rotary_dim": 6}])
def test_rotation_needs_pairs_of_dimensions(settings):
    layer = {"mixer": "attention", "rotary": True, **settings}
    with pytest.raises(ConfigError, match="rotary_dim=.* with d_head=.*set an even rotary_dim"):
        HookedModel(ModelConfig(mixers=[layer], **SIZES))


def test_numbers_of_numpy_are_taken_as_pythons():
    sizes = {name: np.int64(size) for name, size in SIZES.items()}
    layer = {"mixer": "mamba", "d_state": np.int32(4), "dt_max": np.float32(0.5)}
    cfg = ModelConfig(mixers=[layer], seed=np.int64(3), **sizes)
    again = ModelConfig.from_dict(json.loads(json.dumps(cfg.to_dict())))
    assert again == cfg and cfg.mixer_options(0).d_state == 4


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (None, "a mapping from field to value, got None"),
        ([1], "a mapping from field to value"),
        ({"d_model": 8}, "lacks d_vocab, n_ctx"),
        ({**SIZES, "mixers": ["mamba"], "dtype": 5}, "dtype=5; allowed: torch.float32"),
        ({**SIZES, "mixers": ["mamba"], "has_default_d_mlp": True}, "unknown config field"),
    ],
)
def test_descriptions_that_are_none_are_named(description, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(description)


def test_the_mlps_width_reads_as_a_number_and_is_saved_as_given():
    mixed = ModelConfig(mixers=["mamba", "attention"], **SIZES)
    assert mixed.d_mlp == 32 and mixed.to_dict()["d_mlp"] is None
    assert [mixed.with_(seed=1).block_d_mlp(i) for i in (0, 1)] == [0, 32]
    assert mixed.with_(d_model=4).d_mlp == 16
    given = ModelConfig(mixers=["mamba", "attention"], d_mlp=32, **SIZES)
    assert given.block_d_mlp(0) == 32 and given != mixed and given.to_dict()["d_mlp"] == 32
    assert ModelConfig(mixers=["mamba"], **SIZES).d_mlp == 0

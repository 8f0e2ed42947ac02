"""ModelConfig: completed, checked, and the same after a round trip through JSON."""

from __future__ import annotations

import json

import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.config import STACKS
from hooked_ssm.errors import ConfigError
from hooked_ssm.mixers import MIXERS, Attention, Mixer, register_mixer
from tests.models import LAYERS, MODELS

SIZES = {"d_model": 8, "d_vocab": 11, "n_ctx": 16}


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_through_json(name):
    cfg = ModelConfig(mixers=LAYERS[name], dtype=torch.bfloat16, seed=3, **{**SIZES, "d_model": 12})
    again = ModelConfig.from_dict(json.loads(json.dumps(cfg.to_dict())))
    assert again == cfg
    assert ModelConfig.from_dict(again.to_dict()) == cfg


@pytest.mark.parametrize("layer", [2, -3, True])
@pytest.mark.parametrize("reads", ["mixer_name", "mixer_options", "block_norm", "block_d_mlp"])
def test_a_layer_that_is_not_there_is_named(reads, layer):
    cfg = ModelConfig(architecture="mamba", n_layers=2, **SIZES)
    with pytest.raises(ConfigError, match=rf"layer={layer!r}; allowed: 0\.\.1, or -2\.\.-1"):
        getattr(cfg, reads)(layer)


@pytest.mark.parametrize("architecture", MIXERS)
@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_every_architecture_builds_with_its_stack(architecture, n_layers):
    cfg = ModelConfig(architecture=architecture, n_layers=n_layers, **SIZES)
    stack = [layer["mixer"] for layer in STACKS.get(architecture, ({"mixer": architecture},))]
    assert [cfg.mixer_name(i) for i in range(n_layers)] == (stack * 3)[:n_layers]
    assert cfg.n_layers == n_layers
    assert HookedModel(cfg)(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, 11)


def test_defaults_are_the_papers():
    """PAPER.md: positions for attention alone; Mamba without MLP and with RMSNorm."""
    attention = ModelConfig(architecture="attention", n_layers=2, **SIZES)
    assert (attention.positions, attention.block_norm(0), attention.block_d_mlp(0)) == (
        "learned",
        "layer",
        32,
    )
    mamba = ModelConfig(architecture="mamba", n_layers=2, **SIZES)
    assert (mamba.positions, mamba.block_norm(0), mamba.block_d_mlp(0)) == ("none", "rms", 0)
    assert mamba.final_norm == "layer" and mamba.tie_embeddings and mamba.attn_only
    mixed = ModelConfig(mixers=["mamba", "attention"], **SIZES)
    assert mixed.positions == "learned"
    assert [mixed.block_norm(i) for i in (0, 1)] == ["rms", "layer"]
    assert [mixed.block_d_mlp(i) for i in (0, 1)] == [0, 32] and not mixed.attn_only


def test_options_go_to_the_layers_that_have_them():
    cfg = ModelConfig(
        mixers=["base_conv", "based", {"mixer": "mamba", "d_conv": 2}],
        options={"feature_dim": 4, "d_state": 3},
        n_heads=2,
        **SIZES,
    )
    assert cfg.mixer_options(1).feature_dim == 4 and cfg.mixer_options(1).n_heads == 2
    assert cfg.mixer_options(2).d_state == 3 and cfg.mixer_options(2).d_conv == 2
    assert cfg.mixer_options(0).kernel_size == 3
    assert cfg.n_layers == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give architecture='mamba'"),
        ({"architecture": "mambo", "n_layers": 1}, "did you mean 'mamba'"),
        ({"architecture": "mamba"}, "n_layers=None; allowed: an integer >= 1"),
        ({"architecture": "mamba", "n_layers": 0}, "n_layers=0"),
        ({"mixers": ["mamba"], "n_layers": 2}, "mixers lists 1 layers"),
        ({"mixers": [{"d_state": 3}]}, "names no mixer"),
        ({"mixers": ["mamba"], "options": {"d_stat": 3}}, "did you mean 'd_state'"),
        ({"mixers": [{"mixer": "mamba", "dstate": 3}]}, "did you mean 'd_state'"),
        ({"mixers": ["mamba"], "d_model": 0}, "d_model=0; allowed: an integer >= 1"),
        ({"mixers": ["mamba"], "d_vocab": 1.5}, "d_vocab=1.5"),
        ({"mixers": ["mamba"], "norm": "batch"}, "unknown norm 'batch'.*Allowed: layer, rms"),
        ({"mixers": ["mamba"], "act": "step"}, "unknown act 'step'"),
        ({"mixers": ["mamba"], "init": "xavier"}, "Allowed: paper, uniform"),
        ({"mixers": ["mamba"], "positions": "sine"}, "unknown positions"),
        ({"mixers": ["mamba"], "positions": "rotary"}, "no mixer of this model rotates"),
        ({"mixers": [{"mixer": "mamba", "d_state": 0}]}, "d_state=0"),
        ({"mixers": [{"mixer": "base_conv", "kernel_size": "short"}]}, "kernel_size='short'"),
    ],
)
def test_mistakes_are_named(given, message, as_shipped):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{**SIZES, **given})


def test_sizes_that_do_not_divide_are_named():
    for mixer in ("attention", "based"):
        cfg = ModelConfig(mixers=[mixer], n_heads=3, **SIZES)
        with pytest.raises(ConfigError, match="n_heads=3 does not divide d_model=8"):
            HookedModel(cfg)


def test_unknown_fields_of_a_saved_config_are_named():
    saved = ModelConfig(mixers=["mamba"], **SIZES).to_dict()
    with pytest.raises(ConfigError, match="did you mean 'd_model'"):
        ModelConfig.from_dict({**saved, "dmodel": 3})
    with pytest.raises(ConfigError, match="unknown dtype 'float8'"):
        ModelConfig.from_dict({**saved, "dtype": "float8"})


def test_changes_are_checked_again(as_shipped):
    cfg = ModelConfig(mixers=["mamba"], **SIZES)
    assert cfg.with_(seed=4).seed == 4 and cfg.seed == 0
    with pytest.raises(ConfigError):
        cfg.with_(norm="batch")
    with pytest.raises(AttributeError):
        cfg.seed = 5


def test_a_mixer_of_ones_own():
    class Mine(Attention):
        """Attention by another name."""

    try:
        register_mixer("mine", Mine)
        register_mixer("mine", Mine)  # a notebook cell run again
        cfg = ModelConfig(architecture="mine", n_layers=1, **SIZES)
        assert type(HookedModel(cfg).blocks[0].mixer) is Mine
        with pytest.raises(ConfigError, match="'attention' is taken by Attention"):
            register_mixer("attention", Mine)
    finally:
        MIXERS.pop("mine", None)
    assert issubclass(Mine, Mixer)


def test_an_architecture_and_other_mixers_contradict_each_other():
    sizes = {"d_model": 8, "d_vocab": 5, "n_ctx": 8}
    with pytest.raises(ConfigError, match="give one of the two"):
        ModelConfig(architecture="mamba", mixers=["attention"], **sizes)
    cfg = ModelConfig(architecture="based", n_layers=2, **sizes)
    assert ModelConfig.from_dict(cfg.to_dict()) == cfg.with_(seed=cfg.seed) == cfg
    assert cfg.with_(architecture=None, mixers=["attention"], n_layers=None).n_layers == 1

"""Every mixer against independent implementations: outputs, activations by name, decoding.

A line of `RECIPES` turns the fixtures `layer_<prefix>*` on. The weights go through the layout
"zoology" of `HookedModel.from_state_dict`, so its names and shapes are under test as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.layers import MLP
from hooked_ssm.mixers import Segment
from tests.parity import Fixture, fixture_names

Config = dict[str, Any]


def as_it_is(activation: Tensor) -> Tensor:
    """Our axes are theirs."""
    return activation


def heads_first(activation: Tensor) -> Tensor:
    """Our [batch, pos, head, ...] as their [batch, head, pos, ...]."""
    return activation.transpose(1, 2)


@dataclass(frozen=True)
class Recipe:
    """How to build a mixer from a fixture, and where its activations are.

    Attributes:
        mixer: Its name.
        options: From the fixture's config to ours.
        activations: Name after `mid.` -> our hook point; with a function to their order of axes
            where it differs.
    """

    mixer: str
    options: Callable[[Config], dict[str, Any]]
    activations: dict[str, str | tuple[str, Callable[[Tensor], Tensor]]]


def attention(config: Config) -> dict[str, Any]:
    return {"n_heads": config["num_heads"], "qkv_bias": config["bias"]}


def base_conv(config: Config) -> dict[str, Any]:
    size = config["kernel_size"]
    return {"kernel_size": "long" if size == -1 else size, "act": config.get("use_act", False)}


def based(config: Config) -> dict[str, Any]:
    return {"n_heads": config["num_heads"], "feature_dim": config["feature_dim"]}


def mamba(config: Config) -> dict[str, Any]:
    names = ("d_state", "d_conv", "expand", "dt_rank", "bias", "conv_bias")
    return {name: config[name] for name in names if name in config}


def mamba_without_conv(config: Config) -> dict[str, Any]:
    return {**mamba(config), "d_conv": 0}


QKVZ = {"q": "hook_q", "k": "hook_k", "v": "hook_v", "z": "hook_z"}
BASED = {**{name: (hook, heads_first) for name, hook in QKVZ.items()}, "pattern": "hook_pattern"}
BASE_CONV = {"conv_out": "hook_conv", "proj_out": "hook_gate", "filter": "hook_filter"}
MAMBA = {
    "x_in": "hook_in_proj",
    "x_conv": "hook_x",
    "z": "hook_gate",
    "dt": "hook_ssm_dt",
    "B": "hook_ssm_B",
    "C": "hook_ssm_C",
    "states": "hook_ssm_state",
    "y_gated": "hook_gated",
}

RECIPES = {
    "attention": Recipe("attention", attention, {**QKVZ, "pattern": "hook_pattern"}),
    "base_conv": Recipe("base_conv", base_conv, BASE_CONV),
    "based": Recipe("based", based, BASED),
    "mamba": Recipe("mamba", mamba, MAMBA),
}
SPECIAL = {"layer_mamba_d16_noconv": Recipe("mamba", mamba_without_conv, MAMBA)}

RECIPE_OF = {name: r for p, r in RECIPES.items() for name in fixture_names(f"layer_{p}_")} | SPECIAL
FIXTURES = list(RECIPE_OF)
DECODED = [n for n in FIXTURES if "prefill_tokens" in Fixture(n).config] if FIXTURES else []


class Layer:
    """A fixture's mixer, in a model that holds nothing else."""

    def __init__(self, name: str, dtype: torch.dtype):
        self.fixture, self.recipe = Fixture(name), RECIPE_OF[name]
        config = self.fixture.config
        self.x = self.fixture.group("in.", dtype)["x"]
        d_model = config["d_model"]
        cfg = ModelConfig(
            mixers=[{"mixer": self.recipe.mixer, **self.recipe.options(config)}],
            d_model=d_model,
            d_vocab=2,
            n_ctx=config.get("l_max", self.x.shape[1]),
            d_mlp=0,
            norm="rms",
            final_norm="rms",
            positions="none",
            dtype=dtype,
        )
        prefix = "backbone.layers.0"
        weights = self.fixture.group("state.")
        state = {f"{prefix}.sequence_mixer.{key}": value for key, value in weights.items()}
        state["backbone.embeddings.word_embeddings.weight"] = torch.zeros(2, d_model)
        state[f"{prefix}.norm.weight"] = state["backbone.ln_f.weight"] = torch.ones(d_model)
        self.model = HookedModel.from_state_dict(state, cfg, layout="zoology")

    def run(self, first: int = 0, stop: int | None = None, carried: Any = None) -> tuple:
        """The mixer on the tokens [first, stop): outputs and what is carried on."""
        x = self.x[:, first:stop]
        positions = torch.arange(first, first + x.shape[1])[None]
        with torch.no_grad():
            return self.model.blocks[0].mixer(x, Segment(first, x.shape[1], positions), carried)

    def activations(self) -> dict[str, Tensor]:
        """What the hook points see, by the fixture's names and with its axes."""
        found: dict[str, Tensor] = {}

        def save(activation: Tensor, hook: Any, name: str, axes: Callable) -> None:
            found[name] = axes(activation.clone())

        hooks = []
        for name, where in self.recipe.activations.items():
            if f"mid.{name}" in self.fixture.tensors:
                hook, axes = (where, as_it_is) if isinstance(where, str) else where
                hooks.append((f"blocks.0.mixer.{hook}", partial(save, name=name, axes=axes)))
        with self.model.hooks(fwd_hooks=hooks):
            self.run()
        return found


@pytest.mark.parametrize("name", FIXTURES)
def test_outputs_at_float64(name):
    layer = Layer(name, torch.float64)
    y, carried = layer.run()
    layer.fixture.check("out64.y", y)
    if "out64.last_state" in layer.fixture.tensors:
        layer.fixture.check("out64.last_state", carried["state"])


@pytest.mark.parametrize("name", FIXTURES)
def test_outputs_at_float32(name):
    layer = Layer(name, torch.float32)
    layer.fixture.check("out.y", layer.run()[0])


@pytest.mark.parametrize("name", FIXTURES)
def test_activations_by_name(name):
    layer = Layer(name, torch.float64)
    found = layer.activations()
    stored = (key for key in layer.fixture.tensors if key.startswith("mid."))
    assert set(found) == {key.removeprefix("mid.") for key in stored}
    for key, activation in found.items():
        layer.fixture.check(f"mid.{key}", activation)


@pytest.mark.parametrize("name", DECODED)
def test_prefill_then_decode(name):
    layer = Layer(name, torch.float64)
    fixture, prefill = layer.fixture, layer.fixture.config["prefill_tokens"]
    y, carried = layer.run(0, prefill)
    fixture.check("out64.prefill_ssm_state", carried["state"])
    # Their window holds the current input too, ours only what the next step still needs.
    current = fixture.tensors["out64.prefill_conv_state"][..., :1]
    fixture.check("out64.prefill_conv_state", torch.cat([current, carried["window"]], dim=-1))
    outputs = [y]
    for t in range(prefill, layer.x.shape[1]):
        y, carried = layer.run(t, t + 1, carried)
        outputs.append(y)
    fixture.check("out64.y", torch.cat(outputs, dim=1))
    fixture.check("out.y_prefill_then_decode", torch.cat(outputs, dim=1))
    fixture.check("out.last_ssm_state", carried["state"])


MLPS = {
    "layer_mlp_d16": {"fc_in": "fc1", "fc_out": "fc2"},
    "layer_glu_d16": {"fc_in": "fc1", "fc_gate": "fc2", "fc_out": "fc3"},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [*fixture_names("layer_mlp"), *fixture_names("layer_glu")])
def test_mlp(name, dtype):
    fixture = Fixture(name)
    theirs, d_model = fixture.group("state.", dtype), fixture.config["d_model"]
    mlp = MLP(d_model, fixture.config["hidden_mult"] * d_model, gated="glu" in name).to(dtype)
    pairs = [(f"{a}.{k}", f"{b}.{k}") for a, b in MLPS[name].items() for k in ("weight", "bias")]
    mlp.load_state_dict({ours: theirs[key] for ours, key in pairs})
    y = mlp(fixture.group("in.", dtype)["x"])
    fixture.check("out64.y" if dtype == torch.float64 else "out.y", y)

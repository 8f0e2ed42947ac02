"""Whole models against independent implementations: logits, and the stream after every layer.

A line of `MODELS` turns the fixtures `model_<prefix>*` on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from tests.parity import Fixture, fixture_names

Config = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How to build a model from a fixture: the layout of its weights, and its config."""

    layout: str
    settings: Callable[[Config], dict[str, Any]]


def heads_of(config: Config) -> int:
    """Heads, under any of the references' names."""
    return next((config[n] for n in ("n_head", "num_heads", "heads") if n in config), 1)


def zoology(architecture: str, **options: str) -> Recipe:
    """A model of the paper's code; options: ours -> the fixture's name for it."""

    def settings(config: Config) -> dict[str, Any]:
        return {
            "architecture": architecture,
            "d_model": config["d_model"],
            "n_layers": config["n_layers"],
            "d_vocab": config["vocab_size"],
            "n_ctx": config["n_positions"],
            "n_heads": heads_of(config),
            "positions": "learned" if config["pos_emb"] else "none",
            "options": {ours: config[theirs] for ours, theirs in options.items()},
        }

    return Recipe("zoology", settings)


def state_spaces(architecture: str, *options: str) -> Recipe:
    """A model of state-spaces/mamba, its vocabulary padded."""

    def settings(config: Config) -> dict[str, Any]:
        return {
            "architecture": architecture,
            "d_model": config["d_model"],
            "n_layers": config["n_layer"],
            "d_vocab": config["padded_vocab_size"],
            "n_ctx": 32,
            "n_heads": 2 * config["d_model"] // config["ssm_cfg"].get("headdim", 1),
            "final_norm": "rms",
            "options": {name: config["ssm_cfg"][name] for name in options},
        }

    return Recipe("mamba_ssm", settings)


def hugging_face(architecture: str, **options: str) -> Recipe:
    """A Hugging Face model; options: ours -> the fixture's name for it."""
    shared = {"d_state": "state_size", "d_conv": "conv_kernel", "expand": "expand"}
    names = {**shared, "bias": "use_bias", "conv_bias": "use_conv_bias", **options}

    def settings(config: Config) -> dict[str, Any]:
        return {
            "architecture": architecture,
            "d_model": config["hidden_size"],
            "n_layers": config["num_hidden_layers"],
            "d_vocab": config["vocab_size"],
            "n_ctx": 32,
            "n_heads": heads_of(config),
            "norm_eps": config["layer_norm_epsilon"],
            "final_norm": "rms",
            "tie_embeddings": config["tie_word_embeddings"],
            "options": {ours: config[theirs] for ours, theirs in names.items()},
        }

    return Recipe("hf", settings)


MODELS = {
    "attention": zoology("attention", qkv_bias="bias"),
    "base_conv": zoology("base_conv"),
    "based": zoology("based"),
    "mamba_nope": zoology("mamba"),
    "mamba_pos": zoology("mamba"),
    "mamba_ssm_repo": state_spaces("mamba", "d_state"),
    "h3": zoology("h3"),
    "hyena": zoology("hyena"),
    "mamba2_nope": zoology("mamba2", d_state="d_state", n_groups="ngroups"),
    "mamba2_pos": zoology("mamba2", d_state="d_state", n_groups="ngroups"),
    "mamba2_ssm_repo": state_spaces("mamba2", "d_state"),
    "deltanet": zoology("delta_net"),
    "gated_deltanet": zoology("gated_delta_net"),
    "gla": zoology("gla"),
    "hf_mamba2": hugging_face("mamba2", n_groups="n_groups"),
    "hf_mamba_": hugging_face("mamba", dt_rank="time_step_rank", pad_with_bias="use_bias"),
    "hf_falcon": hugging_face("mamba", dt_rank="time_step_rank", norm_eps="mixer_rms_eps"),
}
RECIPE_OF = {name: r for prefix, r in MODELS.items() for name in fixture_names(f"model_{prefix}")}
FIXTURES = list(RECIPE_OF)
ACTIVATIONS = {
    "resid_post": "hook_resid_post",
    "mixer_out": "hook_mixer_out",
    "state_mixer_out": "hook_mlp_out",
}


def load(name: str, dtype: torch.dtype) -> tuple[Fixture, HookedModel]:
    fixture, recipe = Fixture(name), RECIPE_OF[name]
    cfg = ModelConfig(dtype=dtype, **recipe.settings(fixture.config))
    return fixture, HookedModel.from_state_dict(fixture.group("state."), cfg, recipe.layout)


def hook_of(key: str) -> str:
    """Our hook name for a key such as `mid.resid_post.0`."""
    _, name, *layer = key.split(".")
    if not layer:
        return {"embed": "blocks.0.hook_resid_pre", "ln_final_out": "ln_final.hook_normalized"}[
            name
        ]
    return f"blocks.{layer[0]}.{ACTIVATIONS[name]}"


def only_real(fixture: Fixture, key: str, got: torch.Tensor) -> torch.Tensor:
    """Ours at real tokens, theirs at padding, where nothing is promised."""
    if "in.attention_mask" not in fixture.tensors:
        return got
    real = fixture.tensors["in.attention_mask"].bool()[..., None]
    return torch.where(real, got, fixture.tensors[key].to(got.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FIXTURES)
def test_logits(name, dtype):
    fixture, model = load(name, dtype)
    ids, mask = fixture.tensors["in.ids"], fixture.tensors.get("in.attention_mask")
    key = "out64.logits" if dtype == torch.float64 else "out.logits"
    with torch.no_grad():
        fixture.check(key, only_real(fixture, key, model(ids, attention_mask=mask)))


@pytest.mark.parametrize("name", FIXTURES)
def test_the_stream_after_every_layer(name):
    fixture, model = load(name, torch.float64)
    ids, mask = fixture.tensors["in.ids"], fixture.tensors.get("in.attention_mask")
    hooks = {key: hook_of(key) for key in fixture.tensors if key.startswith("mid.")}
    assert {f"mid.resid_post.{layer}" for layer in range(model.cfg.n_layers)} <= set(hooks)
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, names_filter=list(hooks.values()), attention_mask=mask)
    for key, hook in hooks.items():
        fixture.check(key, only_real(fixture, key, cache[hook]))


STEPPED = [n for n in FIXTURES if "prefill_tokens" in Fixture(n).config]


@pytest.mark.parametrize("name", STEPPED)
def test_prefill_then_decode(name):
    fixture, model = load(name, torch.float64)
    ids, prefill = fixture.tensors["in.ids"], fixture.config["prefill_tokens"]
    with torch.no_grad():
        logits, past = model.step(ids[:, :prefill])
        parts = [logits]
        for t in range(prefill, ids.shape[1]):
            logits, past = model.step(ids[:, t : t + 1], past)
            parts.append(logits)
    fixture.check("out64.logits", torch.cat(parts, dim=1))
    fixture.check("out.logits_prefill_then_decode", torch.cat(parts, dim=1))


def test_a_padded_vocabulary_may_be_cut_to_the_real_tokens():
    fixture, padded = load("model_mamba_ssm_repo_d16", torch.float64)
    real = padded.cfg.with_(d_vocab=fixture.config["vocab_size"])
    model = HookedModel.from_state_dict(fixture.group("state."), real, "mamba_ssm")
    ids = fixture.tensors["in.ids"]
    assert real.d_vocab < padded.cfg.d_vocab
    torch.testing.assert_close(model(ids), padded(ids)[..., : real.d_vocab])

"""Tiny models of every architecture in the registry, of their variants, and of a mixed stack.

A mixer that is added to `MIXERS` is covered at once; `SMALL` shrinks whatever setting it has.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.hook_names import HookSpec
from hooked_ssm.mixers import MIXERS, Mixer

D_MODEL, D_VOCAB, N_CTX = 12, 19, 160
BATCH, LENGTH = 2, 7

SMALL: dict[str, Any] = {"d_state": 5, "feature_dim": 3, "headdim": 6, "head_dim": 6, "d_head": 6}
"""Settings that are given to every mixer that has them (unless its own default is None)."""


def _small(mixer: str, **settings: Any) -> dict[str, Any]:
    """One layer's description with the tiny sizes that fit it."""
    options = {field.name: field.default for field in fields(MIXERS[mixer].Options)}
    small = {n: v for n, v in SMALL.items() if options.get(n) is not None}
    return {"mixer": mixer, **small, **settings}


def _variants() -> dict[str, list[dict[str, Any]]]:
    found = {name: [_small(name), _small(name)] for name in MIXERS}
    found["mamba-conv0"] = [_small("mamba", d_conv=0)] * 2
    found["mamba-conv1-state1"] = [_small("mamba", d_conv=1, d_state=1)] * 2
    normed = {"norm_eps": 1e-6, "bias": True, "conv_bias": False}
    found["mamba-conv2-normed"] = [_small("mamba", d_conv=2, **normed)] * 2
    found["base_conv-long"] = [{"mixer": "base_conv", "kernel_size": "long"}] * 2
    found["base_conv-act"] = [{"mixer": "base_conv", "kernel_size": 1, "act": True}] * 2
    found["attention-2heads"] = [{"mixer": "attention", "n_heads": 2, "qkv_bias": True}] * 2
    grouped = {"n_heads": 4, "n_kv_heads": 2, "d_head": 4}
    found["attention-rotary-gqa"] = [
        {"mixer": "attention", "rotary": True, "rotary_dim": 2, **grouped}
    ] * 2
    found["based-2heads"] = [_small("based", n_heads=2)] * 2
    found["mixed"] = [_small(name) for name in MIXERS]
    return found


LAYERS = _variants()
MODELS = list(LAYERS)
"""Every model the tests run, by id."""
ONE_KIND = [name for name in MODELS if name != "mixed"]
"""For what is tried hook by hook: the mixed stack holds nothing that these lack."""


def stack(model: str, layers: int) -> list[dict[str, Any]]:
    """The layers of a model by id, cut to so many; a mixed stack is never cut."""
    return LAYERS[model] if model == "mixed" else LAYERS[model][:layers]


def fresh(
    model: str, dtype: torch.dtype = torch.float32, *, layers: int = 2, **config: Any
) -> HookedModel:
    """Build a model by id with the paper's initialisation, as users get it."""
    sizes = {"d_model": D_MODEL, "d_vocab": D_VOCAB, "n_ctx": N_CTX}
    cfg = ModelConfig(mixers=stack(model, layers), dtype=dtype, **{**sizes, **config})
    return HookedModel(cfg).eval()


def tiny(
    model: str, *, dtype: torch.dtype = torch.float32, layers: int = 2, **config: Any
) -> HookedModel:
    """Build a model by id with parameters of which every one matters (biases and skips too)."""
    sizes = {"d_model": D_MODEL, "d_vocab": D_VOCAB, "n_ctx": N_CTX, "init": "uniform"}
    cfg = ModelConfig(mixers=stack(model, layers), dtype=dtype, **{**sizes, **config})
    built = HookedModel(cfg)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in built.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.1 * noise.to(parameter.dtype)
    return built.eval()


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random token ids. [batch, pos]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, D_VOCAB, (batch, length), generator=generator)


def has_role(mixer: Mixer, role: str) -> bool:
    """Whether some hook point of the mixer has the role."""
    return any(role in spec.roles for spec in mixer.specs.values())


def _with_role(role: str) -> list[str]:
    return [n for n in MODELS if all(has_role(b.mixer, role) for b in tiny(n).blocks)]


RECURRENT = _with_role("carry")
"""Models all of whose layers carry a state of fixed size."""
WITH_PATTERN = _with_role("pattern")


def hook_names(model: HookedModel, length: int = LENGTH) -> list[str]:
    """Every hook name, with three positions of each family."""
    at = sorted({0, length // 2, length - 1})
    return [*model.hook_dict, *(f"{family}.{t}" for family in model.families for t in at)]


def axis_sizes(model: HookedModel, name: str, batch: int, length: int) -> dict[str, int]:
    """The size of every axis of a hook's activation."""
    sizes = {"batch": batch, "pos": length, "query_pos": length, "key_pos": length, "one": 1}
    sizes["d_model"] = model.cfg.d_model
    if name.startswith("blocks."):
        block = model.blocks[int(name.split(".")[1])]
        sizes |= block.mixer.axis_sizes()
        sizes["d_mlp"] = block.mlp.fc_in.out_features if block.has_mlp else 0
        if "tap" in sizes:
            sizes["tap"] = min(sizes["tap"], length)
    return sizes


def shape_of(model: HookedModel, name: str, batch: int = BATCH, length: int = LENGTH) -> tuple:
    """The shape that a hook's declared axes promise."""
    spec: HookSpec = model.find_hook(name).spec
    sizes = axis_sizes(model, name, batch, length)
    return tuple(sizes[axis] for axis in spec.axes)


def assert_near(label: str, got: Tensor, want: Tensor, atol: float, rtol: float = 0.0) -> None:
    """Assert equality to a tolerance; names what differed."""
    assert got.shape == want.shape, f"{label}: got {tuple(got.shape)}, want {tuple(want.shape)}"
    both_masked = (got == want) & got.isinf()
    error = (got - want).abs().masked_fill(both_masked, 0)
    allowed = atol + rtol * want.abs().masked_fill(both_masked, 0)
    assert (error <= allowed).all(), (
        f"{label}: error {error.max().item():.3g}, allowed {atol} + {rtol} of the value"
    )

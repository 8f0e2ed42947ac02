"""Configurations of Hugging Face and of state-spaces/mamba, as a `ModelConfig`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from hooked_ssm.config import ModelConfig, NormKind
from hooked_ssm.errors import CheckpointError, ConfigError
from hooked_ssm.mixers import find_mixer

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
UNLIMITED = 2048
"""n_ctx of models that take any length: nothing depends on it."""
_UNREADABLE = (ArithmeticError, AttributeError, ConfigError, KeyError, TypeError, ValueError)
"""What reading a setting that is missing or of a wrong type raises."""
LARGEST = torch.finfo(torch.float32).max


def config_from_hf(config: Any) -> ModelConfig:
    """Return the description of a Hugging Face model's architecture.

    Args:
        config: Its `transformers` config.

    Raises:
        CheckpointError: The model type, or a setting of it, is not supported.
    """
    kind = getattr(config, "model_type", None)
    if kind not in READERS:
        raise CheckpointError(
            f"Hugging Face models of type {kind!r} are not supported; "
            f"supported: {', '.join(READERS)}"
        )
    try:
        shared = {"d_vocab": config.vocab_size, "tie_embeddings": bool(config.tie_word_embeddings)}
        return ModelConfig(**shared, **READERS[kind](config))
    except CheckpointError:
        raise
    except _UNREADABLE as error:
        raise CheckpointError(f"the {kind} model cannot be described: {error}") from error


def hf_config(description: Mapping[str, Any]) -> Any:
    """Return the `transformers` config of a config.json, with the defaults that it leaves out.

    Raises:
        CheckpointError: The model type is not supported, or a value is not valid for it.
    """
    from transformers import AutoConfig  # slow to import; TransformerLens depends on it

    kind = description.get("model_type")
    if kind not in READERS:
        raise CheckpointError(
            f"config.json says model_type={kind!r}; supported: {', '.join(READERS)}"
        )
    values = {name: value for name, value in description.items() if name != "model_type"}
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # of transformers' own checks, which have no common class
        raise CheckpointError(f"config.json is no valid config of {kind}: {error}") from error


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _require(config: Any, name: str, *allowed: Any) -> None:
    """Refuse a setting that we would have to ignore."""
    got = getattr(config, name, allowed[0])
    if got not in allowed:
        raise CheckpointError(
            f"{config.model_type} with {name}={got!r} is not supported; allowed: "
            f"{', '.join(map(repr, allowed))}"
        )


def _mamba(config: Any) -> dict[str, Any]:
    _require(config, "hidden_act", "silu", "swish")
    layer = {
        "mixer": "mamba",
        "d_state": config.state_size,
        "d_conv": config.conv_kernel,
        "d_inner": config.intermediate_size,
        "dt_rank": int(config.time_step_rank),
        "bias": config.use_bias,
        "pad_with_bias": config.use_bias,
        "conv_bias": config.use_conv_bias,
        "dt_min": config.time_step_min,
        "dt_max": config.time_step_max,
    }
    if config.model_type == "falcon_mamba":
        layer["norm_eps"] = config.mixer_rms_eps
    return _stack_of(layer, config)


def _stack_of(layer: dict[str, Any], config: Any) -> dict[str, Any]:
    """A model of Mamba or Mamba-2 layers."""
    return {
        "architecture": layer["mixer"],
        "mixers": [layer] * config.num_hidden_layers,
        "d_model": config.hidden_size,
        "n_ctx": UNLIMITED,
        "norm_eps": config.layer_norm_epsilon,
        "final_norm": "rms",
    }


def _mamba2(config: Any) -> dict[str, Any]:
    _require(config, "hidden_act", "silu", "swish")
    layer = {
        "mixer": "mamba2",
        "n_heads": config.num_heads,
        "d_state": config.state_size,
        "n_groups": config.n_groups,
        "d_conv": config.conv_kernel,
        "d_inner": config.num_heads * config.head_dim,
        "norm_eps": config.layer_norm_epsilon,
        "bias": config.use_bias,
        "conv_bias": config.use_conv_bias,
        "dt_limit": _dt_limit(config.time_step_limit),
        "dt_min": config.time_step_min,
        "dt_max": config.time_step_max,
    }
    return _stack_of(layer, config)


def _dt_limit(limits: Sequence[float | int | str]) -> list[float] | None:
    """Limits of the step size, None if they limit nothing; finite, so that JSON can hold them."""
    low, high = map(float, limits)
    return None if low <= 0 and high == math.inf else [low, min(high, LARGEST)]


def _gpt2(config: Any) -> dict[str, Any]:
    _require(config, "add_cross_attention", False)
    d_head = config.n_embd // config.n_head
    scale = d_head**-0.5 if config.scale_attn_weights else 1.0
    by_layer = config.scale_attn_by_inverse_layer_idx
    return {
        "architecture": "attention",
        "mixers": [
            {
                "mixer": "attention",
                "qkv_bias": True,
                "scale": scale / (layer + 1) if by_layer else scale,
            }
            for layer in range(config.n_layer)
        ],
        "d_model": config.n_embd,
        "n_ctx": config.n_positions,
        "n_heads": config.n_head,
        "d_mlp": config.n_inner if config.n_inner is not None else 4 * config.n_embd,
        "act": _activation(config.activation_function),
        "norm_eps": config.layer_norm_epsilon,
        "positions": "learned",
    }


def _rotary(config: Any, d_head: int) -> dict[str, Any]:
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise CheckpointError(
            f"{config.model_type} with rope_type={rope['rope_type']!r} is not supported; "
            "allowed: 'default'"
        )
    return {
        "mixer": "attention",
        "rotary_base": float(rope["rope_theta"]),
        "rotary_dim": int(d_head * rope.get("partial_rotary_factor", 1.0)),
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
    }


def _llama(config: Any) -> dict[str, Any]:
    layer = {
        **_rotary(config, config.head_dim),
        "n_kv_heads": config.num_key_value_heads,
        "d_head": config.head_dim,
    }
    return {
        "architecture": "attention",
        "mixers": [layer] * config.num_hidden_layers,
        "d_model": config.hidden_size,
        "n_ctx": config.max_position_embeddings,
        "n_heads": config.num_attention_heads,
        "d_mlp": config.intermediate_size,
        "act": _activation(config.hidden_act),
        "gated_mlp": True,
        "mlp_bias": config.mlp_bias,
        "norm": "rms",
        "final_norm": "rms",
        "norm_eps": config.rms_norm_eps,
        "positions": "rotary",
    }


def _gpt_neox(config: Any) -> dict[str, Any]:
    layer = _rotary(config, config.hidden_size // config.num_attention_heads)
    return {
        "architecture": "attention",
        "mixers": [layer] * config.num_hidden_layers,
        "d_model": config.hidden_size,
        "n_ctx": config.max_position_embeddings,
        "n_heads": config.num_attention_heads,
        "d_mlp": config.intermediate_size,
        "act": _activation(config.hidden_act),
        "parallel_attn_mlp": config.use_parallel_residual,
        "norm_eps": config.layer_norm_eps,
        "positions": "rotary",
    }


READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "gpt2": _gpt2,
    "llama": _llama,
    "gpt_neox": _gpt_neox,
}
"""The model types that can be loaded."""

MAMBA_SSM_LAYERS = {"Mamba1": "mamba", "Mamba2": "mamba2"}
MAMBA_SSM_NAMES = {"ngroups": "n_groups", "D_has_hdim": "D_per_channel"}
# What concerns initialisation or kernels, but not what is computed.
MAMBA_SSM_INERT = {
    *("layer", "chunk_size", "use_fast_path", "use_mem_eff_path", "dt_init", "dt_scale"),
    *("dt_init_floor", "A_init_range", "conv_init"),
}


def config_from_mamba_ssm(description: Mapping[str, Any], d_vocab: int | None) -> ModelConfig:
    """Return the description of a checkpoint of state-spaces/mamba.

    Args:
        description: Its config.json.
        d_vocab: Rows of the embedding, padding included.

    Raises:
        CheckpointError: A setting is missing or not supported.
    """
    for name in ("attn_layer_idx", "d_intermediate"):
        if description.get(name):
            raise CheckpointError(f"mamba_ssm with {name}={description[name]!r} is not supported")
    norm: NormKind = "rms" if description.get("rms_norm", True) else "layer"
    try:
        layer = _mamba_ssm_layer(description)
        return ModelConfig(
            architecture=layer["mixer"],
            mixers=[layer] * description["n_layer"],
            d_model=description["d_model"],
            d_vocab=d_vocab,  # type: ignore[arg-type]  # None is refused
            n_ctx=UNLIMITED,
            norm=norm,
            final_norm=norm,
            norm_eps=description.get("norm_epsilon", 1e-5),
            tie_embeddings=description.get("tie_embeddings", True),
        )
    except CheckpointError:
        raise
    except _UNREADABLE as error:
        raise CheckpointError(f"config.json describes no model of mamba_ssm: {error}") from error


def _mamba_ssm_layer(description: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(description.get("ssm_cfg") or {})
    kind = settings.get("layer", "Mamba1")
    if kind not in MAMBA_SSM_LAYERS:
        raise CheckpointError(
            f"mamba_ssm layers of type {kind!r} are not supported; supported: "
            f"{', '.join(MAMBA_SSM_LAYERS)}"
        )
    layer: dict[str, Any] = {"mixer": MAMBA_SSM_LAYERS[kind]}
    if layer["mixer"] == "mamba2":
        d_inner = settings.get("expand", 2) * description["d_model"]
        layer["n_heads"] = d_inner // settings.pop("headdim", 64)
        if not settings.pop("rmsnorm", True):
            layer["norm"] = "none"
        if (limit := _dt_limit(settings.pop("dt_limit", (0, math.inf)))) is not None:
            layer["dt_limit"] = limit
    allowed = {f.name for f in fields(find_mixer(layer["mixer"]).Options)}
    for name, value in settings.items():
        ours = MAMBA_SSM_NAMES.get(name, name)
        if ours in allowed and value != "auto":
            layer[ours] = value
        elif name not in MAMBA_SSM_INERT and value != "auto":
            raise CheckpointError(f"mamba_ssm with {name}={value!r} is not supported")
    return layer

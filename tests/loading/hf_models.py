"""Tiny random Hugging Face models, every weight of which matters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 19


def _mamba(**settings: Any) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "state_size": 6, "num_hidden_layers": 2, "vocab_size": VOCAB}
    return MambaForCausalLM(MambaConfig(**{**sizes, **settings}))


def _falcon_mamba(**settings: Any) -> nn.Module:
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    sizes = {"hidden_size": 16, "state_size": 6, "num_hidden_layers": 2, "vocab_size": VOCAB}
    return FalconMambaForCausalLM(FalconMambaConfig(mixer_rms_eps=1e-3, **{**sizes, **settings}))


def _mamba2(**settings: Any) -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 16, "state_size": 6, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "pad_token_id": 0}
    return Mamba2ForCausalLM(Mamba2Config(**{**sizes, **heads, **settings}))


def _gpt2(**settings: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32, "vocab_size": VOCAB}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **tokens, **settings}))


def _llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "vocab_size": VOCAB, **settings}))


def _gpt_neox(**settings: Any) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "vocab_size": VOCAB}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**{**sizes, **heads, **settings}))


MODELS = {
    "mamba": (_mamba, {}),
    "mamba-bias": (_mamba, {"use_bias": True, "use_conv_bias": False, "expand": 1}),
    "mamba-untied": (_mamba, {"tie_word_embeddings": False, "conv_kernel": 3, "time_step_rank": 3}),
    "falcon_mamba": (_falcon_mamba, {}),
    "mamba2": (_mamba2, {}),
    "mamba2-limited": (_mamba2, {"time_step_limit": (0.02, 0.4), "n_groups": 1, "chunk_size": 4}),
    "gpt2": (_gpt2, {}),
    "gpt2-scaled-by-layer": (
        _gpt2,
        {"scale_attn_by_inverse_layer_idx": True, "n_inner": 20, "activation_function": "relu"},
    ),
    "llama-grouped": (_llama, {}),
    "llama-biases-tied": (
        _llama,
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        },
    ),
    "gpt_neox-parallel": (_gpt_neox, {}),
    "gpt_neox-in-series": (
        _gpt_neox,
        {"use_parallel_residual": False, "hidden_act": "gelu_new", "attention_bias": False},
    ),
}


def hf_model(name: str) -> nn.Module:
    """Build one of MODELS; all its parameters, biases and norms too, are moved off their init."""
    build, settings = MODELS[name]
    torch.manual_seed(1)
    model = build(**settings).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model

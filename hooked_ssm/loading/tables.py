"""The layouts that exist: ours, zoology's, mamba_ssm's, and Hugging Face's families of models."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch import Tensor

from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import CheckpointError, unknown
from hooked_ssm.loading.layouts import Layout, MixerPaths, Part, Take
from hooked_ssm.loading.takes import (
    depthwise,
    per_head,
    rows,
    rows_per_head,
    squeezed,
    transposed,
    transposed_rows,
    unbatched,
)


def _qkv(path: str, take: Callable[[int], Take]) -> dict[str, Part]:
    """Paths of three projections that are packed in one; take(i) takes the i-th."""
    return {f"{name}_proj": Part(path, take(i)) for i, name in enumerate("qkv")}


def _mamba(_: Any) -> MixerPaths:
    # mamba_ssm's ablation without convolution keeps its parameters in the checkpoint.
    return MixerPaths({"conv": Part("conv1d", depthwise)}, unused=(r"conv1d\..*",))


def _mamba2(options: Any) -> MixerPaths:
    return MixerPaths(
        {
            "conv": Part("conv1d", depthwise),
            "D": Part("D", per_head(options.n_heads)),
            "initial_state": "init_states",
        },
        unused=(r"conv1d\..*",),
    )


# HazyResearch/zoology and aryamanarora/tinylang (the paper's code), whose delta nets and gated
# linear attention are fla-org/flash-linear-attention's layers.


def _zoology_base_conv(options: Any) -> MixerPaths:
    if options.kernel_size != "long":
        return MixerPaths({"conv": Part("conv.conv", depthwise)})
    filters = {"conv.fc_in": "conv.mlp.0", "conv.fc_out": "conv.mlp.2"}
    return MixerPaths({**filters, "conv.z": Part("conv.pos_emb.z", unbatched)})


def _zoology_based(_: Any) -> MixerPaths:
    names = {"q_proj": "proj_q", "k_proj": "proj_k", "v_proj": "proj_v", "out_proj": "proj_o"}
    return MixerPaths(names)


def _zoology_h3(_: Any) -> MixerPaths:
    modes = {name: f"kernel.kernel.{name}" for name in ("log_dt", "A_imag", "B")}
    return MixerPaths(
        {
            "shift.B": "ssm_k_kernel.kernel.B",
            "shift.C": Part("ssm_k_kernel.kernel.C", unbatched),
            "shift.D": "ssm_k_D",
            **{f"ssm.{name}": path for name, path in modes.items()},
            "ssm.A_real_log": "kernel.kernel.inv_A_real",
            "ssm.C": Part("kernel.kernel.C", unbatched),
            "ssm.D": "D",
            "out_proj": "output_linear",
        }
    )


def _zoology_hyena(options: Any) -> MixerPaths:
    # A sequence of linear, sine, linear, ..., linear; the sines share one parameter.
    network = "filter_fn.implicit_filter"
    sines = options.num_inner_mlps + 1
    return MixerPaths(
        {
            "conv": Part("short_filter", depthwise),
            **{f"filter.layers.{i}": f"{network}.{2 * i}" for i in range(sines)},
            "filter.fc_out": f"{network}.{2 * sines}",
            "filter.freq": Part(f"{network}.1.freq", squeezed),
            "filter.z": Part("filter_fn.pos_emb.z", unbatched),
            "filter.t": Part("filter_fn.pos_emb.t", squeezed),
            "filter.deltas": Part("filter_fn.modulation.deltas", squeezed),
            "skip": "filter_fn.bias",
        },
        unused=(r"filter_fn\.bias",),  # stored also where it is switched off
        copies={f"{network}.{2 * i + 1}.freq": "filter.freq" for i in range(1, sines)},
    )


FLA: dict[str, str | Part] = {
    **{f"conv.{name}": Part(f"{name}_conv1d", depthwise) for name in "qkv"},
    "gate_proj": "g_proj",
    "out_proj": "o_proj",
}
DELTA_NET: dict[str, str | Part] = {**FLA, "beta_proj": "b_proj", "norm": "o_norm"}
GATED_DELTA_NET: dict[str, str | Part] = {**DELTA_NET, "decay_proj": "a_proj"}
GLA: dict[str, str | Part] = {
    **FLA,
    "decay_down": "gk_proj.0",
    "decay_up": "gk_proj.1",
    "norm": "g_norm_swish_gate",
}


ZOOLOGY = Layout(
    name="zoology",
    top={
        "embed": "backbone.embeddings.word_embeddings",
        "pos_embed": "backbone.embeddings.position_embeddings",
        "ln_final": "backbone.ln_f",
        "unembed": "lm_head",
    },
    block="backbone.layers.{layer}",
    inside={
        "ln1": "norm1|norm",
        "ln2": "norm2",
        "mixer": "sequence_mixer|sequence_mixer.mixer",
        "mlp.fc_in": "state_mixer.fc1",
        "mlp.fc_gate": "state_mixer.fc2",
        "mlp.fc_out": "state_mixer.fc2",
    },
    mixers={
        "attention": lambda _: MixerPaths(_qkv("Wqkv", lambda i: rows(i, 3))),
        "base_conv": _zoology_base_conv,
        "based": _zoology_based,
        "h3": _zoology_h3,
        "hyena": _zoology_hyena,
        "mamba": _mamba,
        "mamba2": _mamba2,
        "delta_net": lambda _: MixerPaths(DELTA_NET),
        "gated_delta_net": lambda _: MixerPaths(GATED_DELTA_NET, unused=("D",)),
        "gla": lambda _: MixerPaths(GLA),
    },
)

# With a gated MLP zoology's fc2 is the activated branch, and fc3 the output.
ZOOLOGY_GATED = replace(ZOOLOGY, inside={**ZOOLOGY.inside, "mlp.fc_out": "state_mixer.fc3"})

# state-spaces/mamba, and Hugging Face's copies of it.

MAMBA_MIXERS = {"mamba": _mamba, "mamba2": _mamba2}
"""Mixers that state-spaces/mamba and Hugging Face name alike."""


def mamba_ssm(d_vocab: int) -> Layout:
    """Return the layout of state-spaces/mamba's own checkpoints.

    Their vocabulary is padded to a multiple of 8 or 16: where d_vocab is the size without the
    padding, its rows are left out.
    """

    def real_tokens(table: Tensor) -> Tensor:
        padded = {-(-d_vocab // multiple) * multiple for multiple in (8, 16)}
        return table[:d_vocab] if table.shape[0] in padded else table

    embed = "backbone.embedding|backbone.embeddings"
    return Layout(
        name="mamba_ssm",
        top={
            "embed": Part(embed, real_tokens),
            "ln_final": "backbone.norm_f",
            "unembed": Part("lm_head", real_tokens),
        },
        block="backbone.layers.{layer}",
        inside={"ln1": "norm"},
        mixers=MAMBA_MIXERS,
    )


# Hugging Face. A model saved without its head has no prefix, hence the second spellings.

HF_MAMBA = Layout(
    name="hf",
    top={
        "embed": "backbone.embeddings|embeddings|backbone.embedding",
        "ln_final": "backbone.norm_f|norm_f",
        "unembed": "lm_head",
    },
    block="backbone.layers.{layer}|layers.{layer}",
    inside={"ln1": "norm"},
    mixers=MAMBA_MIXERS,
)


def _gpt2_attention(_: Any) -> MixerPaths:
    qkv = _qkv("c_attn", lambda i: transposed_rows(i, 3))
    # The causal mask was saved with the weights once.
    return MixerPaths({**qkv, "out_proj": Part("c_proj", transposed)}, (r"(masked_)?bias",))


HF_GPT2 = Layout(
    name="hf",
    top={
        "embed": "transformer.wte|wte",
        "pos_embed": "transformer.wpe|wpe",
        "ln_final": "transformer.ln_f|ln_f",
        "unembed": "lm_head",
    },
    block="transformer.h.{layer}|h.{layer}",
    inside={
        "ln1": "ln_1",
        "ln2": "ln_2",
        "mixer": "attn",
        "mlp.fc_in": Part("mlp.c_fc", transposed),
        "mlp.fc_out": Part("mlp.c_proj", transposed),
    },
    mixers={"attention": _gpt2_attention},
)

HF_LLAMA = Layout(
    name="hf",
    top={
        "embed": "model.embed_tokens|embed_tokens",
        "ln_final": "model.norm|norm",
        "unembed": "lm_head",
    },
    block="model.layers.{layer}|layers.{layer}",
    inside={
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "mixer": "self_attn",
        "mlp.fc_in": "mlp.up_proj",
        "mlp.fc_gate": "mlp.gate_proj",
        "mlp.fc_out": "mlp.down_proj",
    },
    mixers={"attention": lambda _: MixerPaths({"out_proj": "o_proj"})},
    unused=(r".*rotary_emb\.inv_freq",),
)


def _neox_attention(options: Any) -> MixerPaths:
    qkv = _qkv("query_key_value", lambda i: rows_per_head(i, 3, options.n_heads))
    unused = (r"(masked_)?bias", r"rotary_emb\.inv_freq")
    return MixerPaths({**qkv, "out_proj": "dense"}, unused)


HF_NEOX = Layout(
    name="hf",
    top={
        "embed": "gpt_neox.embed_in|embed_in",
        "ln_final": "gpt_neox.final_layer_norm|final_layer_norm",
        "unembed": "lm_head|embed_out",
    },
    block="gpt_neox.layers.{layer}|layers.{layer}",
    inside={
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "mixer": "attention",
        "mlp.fc_in": "mlp.dense_h_to_4h",
        "mlp.fc_out": "mlp.dense_4h_to_h",
    },
    mixers={"attention": _neox_attention},
)

HF_FAMILIES = (HF_MAMBA, HF_GPT2, HF_LLAMA, HF_NEOX)
LAYOUTS = ("hooked_ssm", "hf", "mamba_ssm", "zoology")


def find_layout(name: str, cfg: ModelConfig, keys: Collection[str]) -> Layout:
    """Return a layout by name; which Hugging Face family it is shows in the embedding's key.

    Raises:
        CheckpointError: Unknown name, or no known family's embedding among the keys.
    """
    if name == "hooked_ssm":
        return Layout("hooked_ssm")
    if name == "zoology":
        return ZOOLOGY_GATED if cfg.gated_mlp else ZOOLOGY
    if name == "mamba_ssm":
        return mamba_ssm(cfg.d_vocab)
    if name != "hf":
        raise CheckpointError(unknown("layout", name, LAYOUTS))
    for family in HF_FAMILIES:
        if family.place("embed.weight", cfg).key_among(keys):
            return family
    wanted = ", ".join(family.place("embed.weight", cfg).keys[0] for family in HF_FAMILIES)
    raise CheckpointError(
        f"no Hugging Face layout fits: none of {wanted} is among the {len(keys)} keys "
        f"({', '.join(sorted(keys)[:3])}, ...); layouts: {', '.join(LAYOUTS)}"
    )

"""Hugging Face models in memory: parity at every layer, padding, and refusals."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from hooked_ssm import HookedModel
from hooked_ssm.errors import CheckpointError
from tests.loading.hf_models import MODELS, VOCAB, hf_model

ATOL = 1e-4


@cache
def both(name: str) -> tuple[nn.Module, HookedModel]:
    theirs = hf_model(name)
    return theirs, HookedModel.from_hf(theirs)


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(3))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The list of a Hugging Face model's blocks."""
    return next(list(m) for m in model.modules() if isinstance(m, nn.ModuleList))


@torch.no_grad()
def compare(name: str, tokens: Tensor, mask: Tensor | None = None) -> None:
    """Assert equal logits and equal residual streams after every layer, at real tokens."""
    theirs, ours = both(name)
    streams: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _m, _i, out: streams.append(out))
        for layer in layers_of(theirs)
    ]
    settings = {"use_cache": False}
    if mask is not None:
        settings["attention_mask"] = mask
        if ours.cfg.architecture == "attention":  # Mamba knows no positions
            settings["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    try:
        wanted = theirs(tokens, **settings).logits
    finally:
        for handle in handles:
            handle.remove()
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(len(streams))]
    logits, cached = ours.run_with_cache(tokens, names_filter=names, attention_mask=mask)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    assert len(streams) == ours.cfg.n_layers
    for name_, stream in zip(names, streams, strict=True):
        torch.testing.assert_close(cached[name_][real], stream[real], atol=ATOL, rtol=0)
    torch.testing.assert_close(logits[real], wanted[real], atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_equals_the_original(name):
    compare(name, ids(2, 12))


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_long_sequence_equals_the_original(name):
    compare(name, ids(1, 300))


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@torch.no_grad()
def test_final_states_and_probabilities_equal_the_original_s(name):
    theirs, ours = both(name)
    tokens = ids(2, 300)
    wanted = theirs(tokens, use_cache=True)
    logits, past = ours.step(tokens)
    torch.testing.assert_close(
        logits.log_softmax(-1), wanted.logits.log_softmax(-1), atol=ATOL, rtol=0
    )
    for layer, carried in enumerate(past.layers):
        state = wanted.cache.get_recurrent_state(layer, state_idx=0)
        torch.testing.assert_close(carried["state"], state, atol=ATOL, rtol=0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_left_padding_equals_the_original(name, batch):
    mask = torch.ones(batch, 12, dtype=torch.long)
    for row in range(batch):
        mask[row, : 3 * row + 2] = 0
    compare(name, ids(batch, 12), mask)


@pytest.mark.parametrize("name", MODELS)
def test_the_original_is_left_as_it_is(name):
    theirs = hf_model(name)
    before = {key: value.clone() for key, value in theirs.state_dict().items()}
    ours = HookedModel.from_hf(theirs)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(7)
    after = theirs.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_dtype_follows_the_original():
    theirs = hf_model("mamba").to(torch.bfloat16)
    ours = HookedModel.from_hf(theirs)
    assert ours.cfg.dtype == torch.bfloat16
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}


def test_trainable_and_marked_as_a_fresh_model():
    ours = both("mamba")[1]
    fresh = HookedModel(ours.cfg)
    mark = "_no_weight_decay"
    for (name, loaded), (same, made) in zip(
        ours.named_parameters(), fresh.named_parameters(), strict=True
    ):
        assert (name, loaded.requires_grad) == (same, True)
        assert getattr(loaded, mark, False) == getattr(made, mark, False)


def test_a_parallel_block_has_no_stream_in_the_middle():
    parallel, in_series = both("gpt_neox-parallel")[1], both("gpt_neox-in-series")[1]
    assert "blocks.0.hook_resid_mid" not in parallel.hook_dict
    assert "blocks.0.hook_resid_mid" in in_series.hook_dict
    _, cached = parallel.run_with_cache(ids(1, 5))
    parts = [cached[f"blocks.0.hook_{n}"] for n in ("resid_pre", "mixer_out", "mlp_out")]
    torch.testing.assert_close(sum(parts), cached["blocks.0.hook_resid_post"])


def test_a_gated_mlp_shows_both_branches():
    _, cached = both("llama-grouped")[1].run_with_cache(ids(1, 5))
    pre, linear, post = (cached[f"blocks.1.mlp.hook_{n}"] for n in ("pre", "pre_linear", "post"))
    torch.testing.assert_close(nn.functional.silu(pre) * linear, post)


def test_an_unsupported_type_names_the_supported_ones():
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 8, "ffn_dim": 8, "word_embed_proj_dim": 8, "vocab_size": 5}
    small = OPTConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)
    with pytest.raises(CheckpointError, match="'opt'.*supported: mamba, falcon_mamba, .*gpt2"):
        HookedModel.from_hf(OPTForCausalLM(small))


def test_what_is_no_hugging_face_model_is_refused():
    with pytest.raises(CheckpointError, match="got Linear"):
        HookedModel.from_hf(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("gpt2", "activation_function", "mish"),
        ("gpt2", "add_cross_attention", True),
        ("mamba", "hidden_act", "gelu"),
        ("llama-grouped", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused(name, setting, value):
    theirs = hf_model(name)
    setattr(theirs.config, setting, value)
    with pytest.raises(CheckpointError, match="not supported; (supported|allowed)"):
        HookedModel.from_hf(theirs)


def test_weights_without_values_are_refused():
    with pytest.raises(CheckpointError, match="on the meta device"):
        HookedModel.from_hf(hf_model("mamba").to("meta"))

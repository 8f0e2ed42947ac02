"""State dicts in several layouts: everything is assigned, or one error lists all that is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import CheckpointError
from hooked_ssm.mixers import MIXERS
from tests.loading.hf_models import hf_model

SIZES = {"d_model": 16, "d_vocab": 13, "n_ctx": 32, "n_layers": 2}


def config(architecture: str = "attention", **changes) -> ModelConfig:
    return ModelConfig(**{**SIZES, "architecture": architecture, **changes})


def weights(architecture: str = "attention", **changes) -> dict[str, Tensor]:
    return dict(HookedModel(config(architecture, **changes)).state_dict())


def message(state_dict: dict[str, Tensor], cfg: ModelConfig, layout: str = "hooked_ssm") -> str:
    with pytest.raises(CheckpointError) as caught:
        HookedModel.from_state_dict(state_dict, cfg, layout)
    return str(caught.value)


def zoology_attention(
    n_layers: int = 2, d_model: int = 16, bias: bool = False
) -> dict[str, Tensor]:
    """A checkpoint of the paper's attention model, random."""
    draw = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    embed = random(13, d_model)
    state = {
        "backbone.embeddings.word_embeddings.weight": embed,
        "backbone.embeddings.position_embeddings.weight": random(32, d_model),
        "backbone.ln_f.weight": random(d_model),
        "backbone.ln_f.bias": random(d_model),
        "lm_head.weight": embed.clone(),
    }
    for layer in range(n_layers):
        block = {
            "sequence_mixer.Wqkv.weight": random(3 * d_model, d_model),
            "sequence_mixer.out_proj.weight": random(d_model, d_model),
            "sequence_mixer.out_proj.bias": random(d_model),
            "state_mixer.fc1.weight": random(4 * d_model, d_model),
            "state_mixer.fc1.bias": random(4 * d_model),
            "state_mixer.fc2.weight": random(d_model, 4 * d_model),
            "state_mixer.fc2.bias": random(d_model),
        }
        if bias:
            block["sequence_mixer.Wqkv.bias"] = random(3 * d_model)
        for norm in ("norm1", "norm2"):
            block |= {f"{norm}.weight": random(d_model), f"{norm}.bias": random(d_model)}
        state |= {f"backbone.layers.{layer}.{key}": value for key, value in block.items()}
    return state


@pytest.mark.parametrize("architecture", MIXERS)
def test_our_own_layout_gives_the_same_model(architecture):
    model = HookedModel(config(architecture, seed=3))
    loaded = HookedModel.from_state_dict(model.state_dict(), config(architecture, seed=4))
    tokens = torch.arange(12)[None]
    assert torch.equal(model(tokens), loaded(tokens))


def test_the_callers_tensors_are_copied():
    mine = weights()
    before = {key: value.clone() for key, value in mine.items()}
    loaded = HookedModel.from_state_dict(mine, config())
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    assert all(torch.equal(mine[key], value) for key, value in before.items())


def test_no_two_tensors_share_memory():
    loaded = HookedModel.from_state_dict(zoology_attention(), config(), "zoology")
    starts = [tensor.untyped_storage().data_ptr() for tensor in loaded.state_dict().values()]
    assert len(set(starts)) == len(starts)


def test_dtype_and_device_are_the_configs():
    loaded = HookedModel.from_state_dict(weights(), config(dtype=torch.float64))
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    assert loaded.cfg.dtype == torch.float64


def test_every_missing_unexpected_and_misshapen_key_is_listed_at_once():
    state = weights()
    del state["blocks.0.mixer.q_proj.weight"], state["ln_final.bias"]
    state["blocks.1.mixer.gate_proj.weight"] = torch.ones(2)
    state["extra"] = torch.ones(1)
    state["blocks.1.mlp.fc_in.weight"] = torch.ones(60, 16)
    state["blocks.0.ln1.weight"] = torch.ones(16, dtype=torch.int64)
    text = message(state, config())
    assert "missing (2): blocks.0.mixer.q_proj.weight; ln_final.bias" in text
    assert "unexpected (2): blocks.1.mixer.gate_proj.weight; extra" in text
    assert "misshapen (2)" in text
    assert "blocks.1.mlp.fc_in.weight: (60, 16), but the config wants (64, 16)" in text
    assert "blocks.0.ln1.weight: torch.int64 of shape (16,)" in text


def test_foreign_keys_are_listed_by_their_own_names():
    state = zoology_attention(bias=True)
    state["backbone.layers.0.sequence_mixer.Wqkv.weight"] = torch.ones(50, 16)
    state["backbone.layers.1.state_mixer.fc1.weight"] = torch.ones(48, 16)
    del state["backbone.layers.1.sequence_mixer.Wqkv.weight"]
    text = message(state, config(), "zoology")
    assert "missing (1): backbone.layers.1.sequence_mixer.Wqkv.weight" in text
    assert "unexpected (2): " in text and "backbone.layers.1.sequence_mixer.Wqkv.bias" in text
    assert "backbone.layers.0.sequence_mixer.Wqkv.weight: (50, 16), but the config" in text
    assert "fc1.weight: (48, 16), but the config wants (64, 16) for blocks.1.mlp.fc_in" in text


def test_a_config_that_contradicts_the_tensors_is_told_what_they_say():
    wrong = config(n_layers=3, d_model=24, d_vocab=11, n_ctx=16)
    text = message(zoology_attention(), wrong, "zoology")
    for said in (
        "d_vocab=13 (the config: 11)",
        "d_model=16 (the config: 24)",
        "n_ctx=32 (the config: 16)",
        "n_layers=2 (the config: 3)",
    ):
        assert said in text


def test_too_few_layers_in_the_config_leave_keys_over():
    text = message(zoology_attention(n_layers=3), config(), "zoology")
    assert text.count("backbone.layers.2.") == 11
    assert "n_layers=3 (the config: 2)" in text


def test_a_tied_head_must_equal_the_embedding():
    state = zoology_attention()
    HookedModel.from_state_dict(state, config(), "zoology")
    state["lm_head.weight"] = state["lm_head.weight"] + 1e-3
    text = message(state, config(), "zoology")
    assert "lm_head.weight must equal backbone.embeddings.word_embeddings.weight" in text
    assert "tie_embeddings=False" in text
    untied = HookedModel.from_state_dict(state, config(tie_embeddings=False), "zoology")
    assert torch.equal(untied.W_U.T, state["lm_head.weight"])


def test_a_tied_head_may_be_left_out():
    state = zoology_attention()
    whole = HookedModel.from_state_dict(state, config(), "zoology")
    del state["lm_head.weight"]
    assert torch.equal(HookedModel.from_state_dict(state, config(), "zoology").W_U, whole.W_U)
    assert "missing (1): lm_head.weight" in message(state, config(tie_embeddings=False), "zoology")


def test_the_hf_layout_finds_its_family():
    theirs = hf_model("gpt_neox-parallel")
    cfg = HookedModel.from_hf(theirs).cfg
    loaded = HookedModel.from_state_dict(theirs.state_dict(), cfg, layout="hf")
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(loaded(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_keys_of_no_family_are_refused():
    text = message(weights(), config(), "hf")
    assert "transformer.wte.weight" in text and "blocks.0" in text


def test_an_unknown_layout_is_refused():
    assert "did you mean 'zoology'" in message(weights(), config(), "zoolgy")


def test_a_layout_without_the_mixer_says_which_it_has():
    assert "no mixer 'attention'" in message(weights(), config(), "mamba_ssm")

"""The token-mixing matrix of every mixer rebuilds what the mixer computes, values or whole way."""

from __future__ import annotations

import pytest
import torch
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis.token_mixing import TokenMixing, token_mixing
from hooked_ssm.errors import ConfigError, HookNameError
from hooked_ssm.mixers import MIXERS
from tests.loading.hf_models import hf_model

VARIANTS = [
    *((name, {}) for name in MIXERS),
    ("attention", {"n_heads": 4, "n_kv_heads": 2}),
    ("mamba", {"d_conv": 0}),
    ("mamba2", {"n_heads": 2, "n_groups": 2, "d_state": 4, "D_per_channel": True}),
    ("mamba2", {"d_conv": 0, "norm": "none", "learn_initial_state": True, "d_state": 4}),
    ("base_conv", {"kernel_size": "long"}),
    ("hyena", {"skip": True}),
    ("delta_net", {"n_heads": 2, "d_conv": 0, "use_gate": True}),
    ("gla", {"n_heads": 2, "n_kv_heads": 1, "d_conv": 3}),
]


def tiny(name: str, options: dict | None = None) -> HookedModel:
    cfg = ModelConfig(
        architecture=name, d_model=8, n_layers=2, d_vocab=13, n_ctx=12, init="uniform",
        options=options or {},
    )  # fmt: skip
    model = HookedModel(cfg).double().eval()
    with torch.no_grad():  # what starts at zero must count as well
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def documents() -> torch.Tensor:
    return torch.randint(0, 13, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("through", ["values", "mixer"])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_rebuilds_the_output(name: str, options: dict, through: str) -> None:
    mixing = token_mixing(tiny(name, options), documents(), -1, through=through)
    assert mixing.error < 1e-9
    assert mixing.matrix.triu(1).abs().max() == 0
    assert mixing.layer == 1


@pytest.mark.parametrize("through", ["values", "mixer"])
@pytest.mark.parametrize("name", MIXERS)
def test_rebuilds_the_output_beside_padding(name: str, through: str) -> None:
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, :4] = mask[1, 7:] = False
    model = tiny(name)
    mixing = token_mixing(model, documents(), 0, through=through, attention_mask=mask)
    assert mixing.error < 1e-9


def test_the_error_is_measured_against_what_the_model_computes() -> None:
    model = tiny("mamba")
    model.blocks[0].mixer.hook_y.add_hook(lambda y, hook: y * 1.5, is_permanent=True)
    assert token_mixing(model, documents(), 0).error == pytest.approx(1 / 3)


def test_whole_mixer_of_mamba_is_the_gated_convolved_pattern() -> None:
    """Against the formula written out: gate[q] sum_s (M + D)[q, s] sigmoid(c[s]) taps[s - k]."""
    model, tokens = tiny("mamba"), documents()
    mixer = model.blocks[0].mixer
    names = ["hook_pattern", "hook_conv", "hook_gate"]
    _, cache = model.run_with_cache(tokens, names_filter=[f"blocks.0.mixer.{n}" for n in names])
    pattern, conv, gate = (cache[f"blocks.0.mixer.{n}"] for n in names)
    taps, got = mixer.conv.weight, token_mixing(model, tokens, 0, through="mixer").matrix
    batch, channel, query = 1, 5, 7
    for key in range(query + 1):
        want = 0.0
        for s in range(key, min(key + 4, query + 1)):
            mixed = pattern[batch, channel, query, s] + (s == query) * mixer.D[channel]
            want += mixed * conv[batch, s, channel].sigmoid() * taps[channel, 3 - (s - key)]
        want *= torch.nn.functional.silu(gate[batch, query, channel])
        torch.testing.assert_close(got[batch, channel, query, key], want)


def test_reductions_by_hand() -> None:
    matrix = torch.tensor([[[[1.0, 0.0], [2.0, -1.0]], [[3.0, 0.0], [0.0, 4.0]]]])
    values = torch.tensor([[[[3.0, 4.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]]])
    gradient = torch.ones(1, 2, 2, 2)
    mixing = TokenMixing(
        matrix, values, torch.zeros(1, 2, 2, 2), 0.0, "head", 0, "values", ["a", "b"],
        lambda at, token: gradient,
    )  # fmt: skip
    norm = torch.tensor([[[[5.0, 0.0], [10.0, -2.0]], [[3.0, 0.0], [0.0, 0.0]]]])
    torch.testing.assert_close(mixing.reduce("norm"), norm)
    torch.testing.assert_close(mixing.reduce("norm", 1), norm.sum(1, keepdim=True))
    torch.testing.assert_close(mixing.reduce(groups=1), matrix.mean(1, keepdim=True))
    place = torch.zeros(1, dtype=torch.long)
    logit = torch.tensor([[[[7.0, 0.0], [14.0, -2.0]], [[3.0, 0.0], [0.0, 0.0]]]])
    torch.testing.assert_close(mixing.reduce("logit", at=place, token=place), logit)
    assert mixing.strongest() == [0, 1]


@pytest.mark.parametrize("through", ["values", "mixer"])
@pytest.mark.parametrize("name", ["attention", "mamba", "mamba2", "delta_net", "base_conv"])
def test_logit_contributions_are_a_gradient(name: str, through: str) -> None:
    """Growing one weight of the matrix a little changes the logit by what the reduction says."""
    model, tokens = tiny(name), documents()
    at, token = torch.tensor([8, 6, 7]), torch.tensor([1, 2, 3])
    mixing = token_mixing(model, tokens, 0, through=through)
    contribution = mixing.reduce("logit", at=at, token=token)
    assert contribution.shape == mixing.matrix.shape
    if through == "mixer":
        return
    unit, query, key, step = 0, 5, 3, 1e-6

    def grow(pattern: torch.Tensor, hook: object) -> torch.Tensor:
        pattern = pattern.clone()
        pattern[:, unit, query, key] *= 1 + step
        return pattern

    rows = torch.arange(3)
    plain = model(tokens)[rows, at, token]
    grown = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.mixer.hook_pattern", grow)])
    change = (grown[rows, at, token] - plain) / step
    torch.testing.assert_close(contribution[:, unit, query, key], change, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_equals_the_effective_attention_of_transformer_lens(name: str) -> None:
    """`cache.compute_ssm_effective_attention`, reconstruction form, on the same weights."""
    theirs = hf_model(name)
    ours = HookedModel.from_hf(theirs).eval()
    architecture = type(theirs).__name__
    bridge = build_bridge_from_module(theirs, architecture, hf_config=theirs.config)
    for block in bridge.blocks:
        block.mixer.eager_scan = True
    tokens = documents()
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(tokens, use_cache=False)
    torch.testing.assert_close(ours(tokens), logits, atol=1e-4, rtol=1e-4)
    for layer in (0, 1):
        want = cache.compute_ssm_effective_attention(layer, include_dt_scaling=True)
        got = token_mixing(ours, tokens, layer)
        assert got.error < 1e-5
        torch.testing.assert_close(got.matrix, want, atol=1e-6, rtol=1e-4)


def test_refuses_what_makes_no_sense(as_shipped: None) -> None:
    model, tokens = tiny("attention"), documents()
    mixing = token_mixing(model, tokens, 0)
    with pytest.raises(ConfigError, match="unknown weight 'norms'; did you mean 'norm'"):
        mixing.reduce("norms")
    with pytest.raises(ConfigError, match="whose logit"):
        mixing.reduce("logit")
    with pytest.raises(ConfigError, match=r"groups=3: there are 1 heads; allowed 1..1"):
        mixing.reduce(groups=3)
    with pytest.raises(HookNameError, match="layer 2 does not exist"):
        token_mixing(model, tokens, 2)


def test_shows_itself() -> None:
    mixing = token_mixing(tiny("mamba"), documents(), 0)
    assert "reconstruction error" in mixing._repr_html_()
    assert len(mixing.plot().data) == 6

"""Gated linear attention: parity with fla and zoology, shared heads, segments, edits."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.errors import ConfigError
from hooked_ssm.mixers.gla import GLA, GLAOptions
from hooked_ssm.ops.linear_attention import linear_attention
from tests.mixers.layers import (
    LayerCase,
    assert_edits_in_place_keep_gradients,
    build,
    call,
    look,
    segment,
)
from tests.parity import Fixture, fixture_names

KEYS = {
    **{f"conv.{name}.weight": f"{name}_conv1d.weight" for name in "qkv"},
    "decay_down.weight": "gk_proj.0.weight",
    "decay_up.weight": "gk_proj.1.weight",
    "decay_up.bias": "gk_proj.1.bias",
    "gate_proj.weight": "g_proj.weight",
    "norm.weight": "g_norm_swish_gate.weight",
    "out_proj.weight": "o_proj.weight",
}


def make(config: dict) -> GLA:
    """Our mixer for a fixture's configuration."""
    options = GLAOptions(
        n_heads=config["num_heads"],
        n_kv_heads=config.get("num_kv_heads"),
        expand_k=config.get("expand_k", 0.5),
        d_conv=4 if config.get("use_short_conv") else 0,
        gate_logit_normalizer=config.get("gate_logit_normalizer", 16),
    )
    return GLA(config["d_model"], 64, options)


def case(name: str) -> LayerCase:
    return LayerCase(Fixture(name), make, KEYS)


LAYERS = [*fixture_names("layer_gla"), *fixture_names("layer_zoology_gla")]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_matches_the_authors(name, dtype):
    case(name).check_outputs(dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_show_the_authors_activations(name):
    names = {
        "q": "hook_q",
        "k": "hook_k",
        "v": "hook_v",
        "gk": "hook_ssm_decay",
        "states": "hook_ssm_state",
        "o": "hook_z",
    }
    case(name).check_activations(names)


VARIANTS = {
    "plain": {"n_heads": 2},
    "shared_conv": {"n_heads": 4, "n_kv_heads": 2, "d_conv": 3, "expand_k": 1.0},
    "no_gate": {"n_heads": 1, "use_gate": False, "gate_logit_normalizer": 1.0},
}


@pytest.fixture(params=VARIANTS)
def mixer(request) -> GLA:
    return build(GLA, 8, GLAOptions(**VARIANTS[request.param]))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1)).double()


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_segments_go_on_where_the_last_one_stopped(mixer, x):
    want, carried = mixer(x, segment(9))
    first, between = mixer(x[:, :4], segment(4))
    second, end = mixer(x[:, 4:], segment(5, 4), between)
    close(torch.cat([first, second], 1), want)
    assert end.keys() == carried.keys()
    for name in end:
        close(end[name], carried[name])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_invisible(mixer, x, side):
    want, carried = mixer(x, segment(9))
    parts, real = [5 + torch.zeros(2, 3, 8).double(), x], [False] * 3 + [True] * 9
    if side == "right":
        parts, real = parts[::-1], real[::-1]
    mask = torch.tensor(real).expand(2, -1)
    got, state = mixer(torch.cat(parts, 1), segment(12, real=mask))
    close(got[:, torch.tensor(real)], want)
    close(state["state"], carried["state"])


def test_pattern_is_exact(mixer, x):
    seen = look(mixer, x, "hook_pattern", "hook_v", "hook_z")
    pattern = seen["hook_pattern"]
    value = seen["hook_v"].repeat_interleave(pattern.shape[1] // mixer.n_kv_heads, dim=2)
    close(torch.einsum("bhqk,bkhd->bqhd", pattern, value), seen["hook_z"])


def test_without_decay_it_is_linear_attention(x):
    mixer = build(GLA, 8, GLAOptions(n_heads=2))
    ones = {"hook_ssm_decay": lambda value, hook: torch.ones_like(value)}
    seen = look(mixer, x, "hook_q", "hook_k", "hook_v", "hook_z", hooks=ones)
    want = linear_attention(seen["hook_q"] * 2**-0.5, seen["hook_k"], seen["hook_v"])
    close(seen["hook_z"], want.y)


def test_every_key_channel_decays_by_itself(mixer, x):
    """Forgetting channel 0 at t = 4 empties that row of the state, but for what is written."""

    def forget(decay, hook):
        decay = decay.clone()
        decay[:, 4, :, 0] = 0
        return decay

    names = ("hook_ssm_state", "hook_ssm_write")
    clean = look(mixer, x, *names)
    seen = look(mixer, x, *names, hooks={"hook_ssm_decay": forget})
    state, was = seen["hook_ssm_state"], clean["hook_ssm_state"]
    close(state[:, 4, :, 0], clean["hook_ssm_write"][:, 4, :, 0])
    close(state[..., 1:, :], was[..., 1:, :])
    close(state[:, :4], was[:, :4])


def test_looking_at_the_decay_keeps_the_fast_path(mixer, x, monkeypatch):
    def slow(*_):
        raise AssertionError("a cached decay must not force the loop over states")

    monkeypatch.setattr("hooked_ssm.mixers.gla.linear_scan", slow)
    assert "hook_ssm_decay" in look(mixer, x, "hook_ssm_decay")


def test_query_heads_that_share_keys_have_equal_states(x):
    mixer = build(GLA, 8, GLAOptions(n_heads=4, n_kv_heads=2))
    state = look(mixer, x, "hook_ssm_state")["hook_ssm_state"]
    close(state[:, :, 0], state[:, :, 1])
    assert (state[:, :, 1] - state[:, :, 2]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"n_heads": 3}, "n_heads=3"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads=3"),
        ({"gate_logit_normalizer": 0.0}, "gate_logit_normalizer"),
    ],
)
def test_impossible_sizes_are_refused(settings, names, as_shipped):
    with pytest.raises(ConfigError, match=names):
        GLA(8, 64, GLAOptions(**settings))


def test_core_is_float32_under_bfloat16(x):
    mixer = GLA(8, 64, GLAOptions(n_heads=2))
    mixer.initialise(torch.Generator().manual_seed(0))
    seen = {}

    def keep(value, hook):
        seen[hook.name] = value.dtype

    names = ("hook_ssm_decay", "hook_ssm_write", "hook_ssm_state", "hook_z")
    y, carried = call(mixer.bfloat16(), x.bfloat16(), dict.fromkeys(names, keep))
    assert y.dtype == seen.pop("hook_z") == torch.bfloat16
    assert set(seen.values()) == {torch.float32} == {carried["state"].dtype}


def test_edits_in_place_keep_gradients(mixer, x):
    assert_edits_in_place_keep_gradients(mixer, x)

"""Mamba-2: parity with the authors' layers, padding, segments, edits, and what it is made of."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.errors import ConfigError
from hooked_ssm.mixers.gated_norm import GatedNorm
from hooked_ssm.mixers.mamba2 import Mamba2, Mamba2Options
from hooked_ssm.ops.ssd import decayed_linear_attention
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
    "conv.weight": "conv1d.weight",
    "conv.bias": "conv1d.bias",
    "initial_state": "init_states",
}


def make(config: dict) -> Mamba2:
    """Our mixer for a fixture's configuration."""
    d_inner = 2 * config["d_model"]
    simple = "learnable_init_states" in config
    norm = ("all" if simple else "group") if config.get("rmsnorm", True) else "none"
    options = Mamba2Options(
        n_heads=d_inner // config["headdim"],
        d_state=config["d_state"],
        n_groups=config.get("ngroups", 1),
        d_conv=config.get("d_conv", 4),
        norm=norm,
        norm_before_gate=config.get("norm_before_gate", False),
        D_per_channel=config.get("D_has_hdim", False),
        bias=config.get("bias", False),
        conv_bias=config.get("conv_bias", True),
        dt_limit=config.get("dt_limit"),
        learn_initial_state=simple,
    )
    return Mamba2(config["d_model"], 64, options)


def case(name: str) -> LayerCase:
    return LayerCase(Fixture(name), make, KEYS)


LAYERS = fixture_names("layer_mamba2")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_matches_the_authors(name, dtype):
    case(name).check_outputs(dtype)


@pytest.mark.parametrize("name", [n for n in LAYERS if "simple" not in str(n)])
def test_hooks_show_the_authors_activations(name):
    config = Fixture(name).config
    normed = config["rmsnorm"]  # without a norm the authors' scan applies the gate as well
    names = {
        "z": "hook_gate",
        "x_conv": "hook_x",
        "B": "hook_ssm_B",
        "C": "hook_ssm_C",
        "dt": "hook_ssm_dt",
        "states": "hook_ssm_state",
        "y_ssm": "hook_y_skip" if normed else "hook_gated",
        "y_normed": "hook_normed" if normed else "hook_gated",
    }
    case(name).check_activations(names)


def test_prefill_and_decode_match_the_authors_caches():
    fixture = Fixture("layer_mamba2_d16_h4_g1_n16")
    mixer = case(fixture.name).mixer(torch.float64)
    x = fixture.tensors["in.x"].double()
    prefill = fixture.config["prefill_tokens"]
    y, carried = mixer(x[:, :prefill], segment(prefill))
    fixture.check("out64.prefill_ssm_state", carried["state"])
    window = fixture.tensors["out.prefill_conv_state"][..., 1:]  # theirs has one column more
    torch.testing.assert_close(carried["window"].float(), window, atol=1e-5, rtol=1e-5)
    outputs = [y]
    for t in range(prefill, x.shape[1]):
        y, carried = mixer(x[:, t : t + 1], segment(1, t), carried)
        outputs.append(y)
    fixture.check("out64.y", torch.cat(outputs, dim=1))
    fixture.check("out64.last_state", carried["state"])


@pytest.mark.parametrize("name", fixture_names("op_gated_rmsnorm"))
def test_gated_norm_matches_the_authors(name):
    fixture = Fixture(name)
    config, inputs = fixture.config, fixture.group("in.", torch.float64)
    channels = config["dim"]
    groups = channels // (config["group_size"] or channels)
    norm = GatedNorm(channels, config["eps"], groups).double()
    with torch.no_grad():
        norm.weight.copy_(inputs["weight"])
    if config["norm_before_gate"]:
        got = norm(inputs["x"], inputs["z"])
    else:
        got = norm(inputs["x"] * torch.nn.functional.silu(inputs["z"]))
    fixture.check("out64.y", got)


SMALL = {"n_heads": 4, "n_groups": 2, "d_state": 3}
VARIANTS = {
    "plain": SMALL,
    "one_group": {**SMALL, "n_groups": 1},
    "norm_first": {**SMALL, "norm_before_gate": True, "D_per_channel": True},
    "no_norm": {**SMALL, "norm": "none", "dt_limit": (0.01, 0.4)},
    "no_conv": {**SMALL, "d_conv": 0, "bias": True},
    "learned_start": {**SMALL, "learn_initial_state": True},
}


@pytest.fixture(params=VARIANTS)
def mixer(request) -> Mamba2:
    return build(Mamba2, 8, Mamba2Options(**VARIANTS[request.param]))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1)).double()


def test_segments_go_on_where_the_last_one_stopped(mixer, x):
    want, carried = mixer(x, segment(9))
    first, between = mixer(x[:, :4], segment(4))
    second, end = mixer(x[:, 4:], segment(5, 4), between)
    torch.testing.assert_close(torch.cat([first, second], 1), want, atol=1e-12, rtol=0)
    assert end.keys() == carried.keys()
    for name in end:
        torch.testing.assert_close(end[name], carried[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_invisible(mixer, x, side):
    want, carried = mixer(x, segment(9))
    junk = 5 + torch.zeros(2, 3, 8).double()
    parts, real = ([junk, x], [False] * 3 + [True] * 9)
    if side == "right":
        parts, real = parts[::-1], real[::-1]
    mask = torch.tensor(real).expand(2, -1)
    got, state = mixer(torch.cat(parts, 1), segment(12, real=mask))
    torch.testing.assert_close(got[:, torch.tensor(real)], want, atol=1e-12, rtol=0)
    torch.testing.assert_close(state["state"], carried["state"], atol=1e-12, rtol=0)


def test_pattern_is_exact(mixer, x):
    names = ("hook_pattern", "hook_x", "hook_y", "hook_ssm_decay", "hook_ssm_C")
    seen = look(mixer, x, *names)
    mixed = torch.einsum("bhqk,bkhd->bqhd", seen["hook_pattern"], seen["hook_x"])
    mixed = mixed + mixer.pattern_offset(lambda name: seen[name])
    torch.testing.assert_close(mixed, seen["hook_y"], atol=1e-12, rtol=0)


def test_it_is_linear_attention_whose_state_decays(x):
    """A scalar A: C is the query, B the key, dt x the value, exp(dt A) the decay."""
    mixer = build(Mamba2, 8, Mamba2Options(**SMALL))
    seen = look(mixer, x, "hook_x", "hook_ssm_B", "hook_ssm_C", "hook_ssm_dt", "hook_y")
    want = decayed_linear_attention(
        seen["hook_ssm_C"],
        seen["hook_ssm_B"],
        seen["hook_ssm_dt"][..., None] * seen["hook_x"],
        -mixer.A_log.detach().exp() * seen["hook_ssm_dt"],
    )
    torch.testing.assert_close(seen["hook_y"], want.y, atol=1e-12, rtol=0)


def test_an_edited_decay_reruns_the_recurrence(mixer, x):
    """Forgetting everything at t = 4 leaves nothing of the past at t = 4 and later."""

    def forget(decay, hook):
        decay = decay.clone()
        decay[:, 4] = 0
        return decay

    names = ("hook_ssm_write", "hook_ssm_state", "hook_ssm_decay")
    seen = look(mixer, x, *names[:2], hooks={"hook_ssm_decay": forget})
    state = seen["hook_ssm_state"]
    torch.testing.assert_close(state[:, 4], seen["hook_ssm_write"][:, 4], atol=1e-12, rtol=0)
    clean = look(mixer, x, *names)
    want = clean["hook_ssm_decay"][:, 5, :, None, None] * state[:, 4]
    torch.testing.assert_close(state[:, 5], want + clean["hook_ssm_write"][:, 5])
    torch.testing.assert_close(state[:, :4], clean["hook_ssm_state"][:, :4])


def test_looking_at_the_decay_keeps_the_fast_path(mixer, x, monkeypatch):
    def slow(*_):
        raise AssertionError("a cached decay must not force the loop over states")

    monkeypatch.setattr("hooked_ssm.mixers.mamba2.linear_scan", slow)
    assert look(mixer, x, "hook_ssm_decay")["hook_ssm_decay"].shape == (2, 9, 4)


def test_parameters_are_drawn_as_the_authors_do():
    mixer = Mamba2(8, 64, Mamba2Options(n_heads=4, learn_initial_state=True))
    mixer.initialise(torch.Generator().manual_seed(0))
    A, dt = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert A.min() >= 1 and A.max() <= 16
    assert dt.min() >= 1e-3 and dt.max() <= 0.1
    assert torch.equal(mixer.D, torch.ones(4, 1)) and not mixer.initial_state.any()
    exempt = [n for n, p in mixer.named_parameters() if getattr(p, "_no_weight_decay", False)]
    assert sorted(exempt) == ["A_log", "D", "dt_bias", "initial_state"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"n_heads": 3}, "n_heads=3"),
        ({"n_heads": 2, "n_groups": 4}, "n_groups=4"),
        ({"norm": "layer"}, "norm"),
        ({"d_state": 0}, "d_state=0"),
    ],
)
def test_impossible_sizes_are_refused(settings, names, as_shipped):
    with pytest.raises(ConfigError, match=names):
        Mamba2(8, 64, Mamba2Options(**settings))


def test_core_is_float32_under_bfloat16(x):
    mixer = Mamba2(8, 64, Mamba2Options(**SMALL))
    mixer.initialise(torch.Generator().manual_seed(0))
    seen = {}

    def keep(value, hook):
        seen[hook.name] = value.dtype

    names = ("hook_ssm_dt", "hook_ssm_decay", "hook_ssm_write", "hook_ssm_state", "hook_y")
    y, carried = call(mixer.bfloat16(), x.bfloat16(), dict.fromkeys(names, keep))
    assert y.dtype == seen.pop("hook_y") == torch.bfloat16
    assert set(seen.values()) == {torch.float32} == {carried["state"].dtype}


def test_edits_in_place_keep_gradients(mixer, x):
    assert_edits_in_place_keep_gradients(mixer, x)

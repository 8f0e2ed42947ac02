"""Hyena against the authors' layer and filter, and against its formula."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import ConfigError, HookNameError, ShapeError
from hooked_ssm.mixers.hyena import Hyena, HyenaOptions
from hooked_ssm.mixers.implicit_filter import SineFilter, filter_features
from hooked_ssm.ops.long_conv import long_conv
from tests.mixers.layers import (
    LayerCase,
    assert_edits_in_place_keep_gradients,
    build,
    call,
    load,
    look,
    segment,
)
from tests.parity import Fixture, fixture_names


def filter_keys(prefix: str, layers: int) -> dict[str, str]:
    """Our filter's parameters -> theirs."""
    mlp = f"{prefix}implicit_filter"
    named = {"z": f"{prefix}pos_emb.z", "t": f"{prefix}pos_emb.t", "freq": f"{mlp}.1.freq"}
    named |= {"deltas": f"{prefix}modulation.deltas", "fc_out.weight": f"{mlp}.{2 * layers}.weight"}
    parts = [(i, part) for i in range(layers) for part in ("weight", "bias")]
    return named | {f"layers.{i}.{part}": f"{mlp}.{2 * i}.{part}" for i, part in parts}


KEYS = {f"filter.{ours}": key for ours, key in filter_keys("filter_fn.", 3).items()}
KEYS |= {"conv.weight": "short_filter.weight", "conv.bias": "short_filter.bias"}
KEYS |= {"skip": "filter_fn.bias"}
ACTIVATIONS = {
    "x1": "hook_x1",
    "x2": "hook_x2",
    "v": "hook_v",
    "long_conv_in": "hook_ssm_write",
    "filter": "hook_filter",
    "long_conv_out": "hook_long_conv",
    "pre_out": "hook_y",
}
D_MODEL, LENGTH = 4, 13
SKIP = pytest.mark.parametrize("skip", [False, True])


def make(config: dict) -> Hyena:
    skip = config["bias_argument"] is not False
    options = HyenaOptions(
        filter_order=config["filter_order"], d_conv=config["short_filter_order"], skip=skip
    )
    return Hyena(config["d_model"], config["l_max"], options)


def tiny(**options) -> Hyena:
    return build(Hyena, D_MODEL, HyenaOptions(**{"filter_order": 8, **options}))


def inputs(length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, length, D_MODEL, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", fixture_names("layer_hyena"))
class TestParity:
    def test_outputs(self, name):
        case = LayerCase(Fixture(name), make, KEYS)
        for dtype, key in ((torch.float64, "out64.y"), (torch.float32, "out.y")):
            x = case.fixture.tensors["in.x"].to(dtype)
            case.fixture.check(key, call(case.mixer(dtype), x)[0])

    def test_activations(self, name):
        LayerCase(Fixture(name), make, KEYS).check_activations(ACTIVATIONS)

    def test_pattern(self, name):
        case = LayerCase(Fixture(name), make, KEYS)
        x, mixer = case.fixture.tensors["in.x"].double(), case.mixer(torch.float64)
        seen = look(mixer, x, "hook_pattern", "hook_v", "hook_y")
        got = torch.einsum("bmqk,bkm->bqm", seen["hook_pattern"], seen["hook_v"])
        torch.testing.assert_close(got, seen["hook_y"], atol=1e-10, rtol=0)
        case.fixture.check("out64.y", seen["out"])

    def test_the_three_copies_of_the_frequency_are_equal(self, name):
        """So one is read; theirs are one parameter under three names."""
        theirs = Fixture(name).group("state.filter_fn.implicit_filter.")
        assert torch.equal(theirs["1.freq"], theirs["3.freq"])
        assert torch.equal(theirs["1.freq"], theirs["5.freq"])


@pytest.mark.parametrize("name", fixture_names("op_hyena_filter"))
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float64, "out64"), (torch.float32, "out")])
def test_filter_fixture(name, dtype, kind):
    fixture = Fixture(name)
    config, theirs = fixture.config, fixture.group("state.", dtype)
    layers = 1 + config["num_inner_mlps"]
    ours = SineFilter(
        config["channels"], config["l_max"], config["order"], config["emb_dim"], layers - 1,
        config["w"], modulate=config["modulate"], normalized=config["normalized"],
    )  # fmt: skip
    filter = load(ours.to(dtype), theirs, filter_keys("", layers))(config["seq"])
    fixture.check(f"{kind}.filter", filter)
    u = fixture.tensors["in.u"].to(dtype).transpose(1, 2)
    y = long_conv(u, filter, skip=theirs["bias"])
    fixture.check(f"{kind}.y", y.transpose(1, 2))


def test_filter_options():
    """Without its window, normalised: each tap's channels have absolute values that add up to 1."""
    x = inputs()
    plain, flat = tiny(), tiny(modulate=False)
    flat.load_state_dict(plain.state_dict(), strict=False)
    window = torch.exp(-plain.filter.t[:, None] * plain.filter.deltas.abs()).T
    taps = {m: look(m, x, "hook_filter")["hook_filter"] for m in (plain, flat)}
    torch.testing.assert_close(taps[plain], taps[flat] * window[:, :LENGTH])
    normal = tiny(normalized=True)
    normal.load_state_dict(plain.state_dict())
    got = look(normal, x, "hook_filter")["hook_filter"]
    torch.testing.assert_close(got, taps[plain] / taps[plain].abs().sum(0))


@SKIP
def test_each_hook_is_what_the_formula_goes_through(skip):
    """An edit of one activation is the formula with it replaced."""
    mixer, x = tiny(skip=skip), inputs()
    names = ("hook_x1", "hook_x2", "hook_v", "hook_ssm_write", "hook_filter", "hook_long_conv")
    seen = look(mixer, x, *names)
    D = 0 if mixer.skip is None else mixer.skip

    def formula(x1, x2, v, write=None, filter=None, long_conv=None):
        write = x1 * v if write is None else write
        mixed = D * write
        for lag in range(LENGTH):
            mixed[:, lag:] = mixed[:, lag:] + filter[:, lag] * write[:, : LENGTH - lag]
        return x2 * (mixed if long_conv is None else long_conv)

    plain = {n: seen[f"hook_{n}"] for n in ("x1", "x2", "v", "filter")}
    for name in names:
        generator = torch.Generator().manual_seed(3)
        value = torch.randn(seen[name].shape, generator=generator, dtype=torch.float64)
        got = look(mixer, x, "hook_y", hooks={name: lambda v, hook, new=value: v.copy_(new)})
        short = name.removeprefix("hook_").removeprefix("ssm_")
        want = formula(**{**plain, short: value})
        torch.testing.assert_close(got["hook_y"], want, atol=1e-10, rtol=0)


@SKIP
def test_an_edited_pattern_adds_what_it_changes(skip):
    """Beside an edited write, and where there is a past."""
    mixer, x = tiny(skip=skip), inputs()

    def drop(pattern, hook):
        pattern[..., 2] = 0

    def halve(write, hook):
        write[:, 1] /= 2

    for hooks, carried, start in (
        ({}, None, 0),
        ({"hook_ssm_write": halve}, None, 0),
        ({}, call(mixer, x)[1], LENGTH),
    ):
        where = {"segment": segment(LENGTH, start=start), "carried": carried}
        seen = look(mixer, x, "hook_pattern", "hook_v", "hook_y", hooks=hooks, **where)
        got = look(mixer, x, "hook_y", hooks={**hooks, "hook_pattern": drop}, **where)["hook_y"]
        share = torch.einsum("bmq,bm->bqm", seen["hook_pattern"][..., 2], seen["hook_v"][:, 2])
        torch.testing.assert_close(got, seen["hook_y"] - share, atol=1e-10, rtol=0)


@pytest.mark.parametrize("splits", [(1,) * LENGTH, (4, 9), (9, 1, 3)])
@SKIP
def test_segments_join(splits, skip):
    mixer, x = tiny(skip=skip), inputs()
    want, at_end = call(mixer, x)
    outputs, carried, start = [], None, 0
    for part in x.split(splits, dim=1):
        where = segment(part.shape[1], start=start)
        y, carried = call(mixer, part, segment=where, carried=carried)
        outputs.append(y)
        start += part.shape[1]
    torch.testing.assert_close(torch.cat(outputs, dim=1), want, atol=1e-10, rtol=0)
    for key, value in at_end.items():
        torch.testing.assert_close(carried[key], value, atol=1e-10, rtol=0)


@pytest.mark.parametrize("padded", [slice(0, 4), slice(9, None)])
@SKIP
def test_padding_changes_nothing(padded, skip):
    mixer, x = tiny(skip=skip), inputs()
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[:, padded] = False
    want, _ = call(mixer, x[:, real[0]])
    seen = look(mixer, x, "hook_pattern", "hook_ssm_write", segment=segment(LENGTH, real=real))
    torch.testing.assert_close(seen["out"][:, real[0]], want, atol=1e-10, rtol=0)
    assert not seen["hook_ssm_write"][:, padded].any()
    assert not seen["hook_pattern"][..., padded].any()


def test_the_window_of_the_short_convolution_is_carried_and_hooked():
    mixer, x = tiny(), inputs()
    seen = look(mixer, x, "hook_in_proj", "hook_conv_carry.5", "hook_conv")
    torch.testing.assert_close(
        seen["hook_conv_carry.5"], seen["hook_in_proj"][:, 4:6].transpose(1, 2)
    )
    zero = {"hook_conv_carry.5": lambda value, hook: torch.zeros_like(value)}
    cut = look(mixer, x, "hook_conv", hooks=zero)["hook_conv"]
    difference = (cut - seen["hook_conv"]).abs().amax((0, 2))
    assert [t for t in range(LENGTH) if difference[t] > 0] == [6, 7]


def test_roles_and_their_absence():
    mixer = tiny()
    roles = {"key": "hook_x1", "query": "hook_x2", "value": "hook_v", "write": "hook_ssm_write"}
    roles |= {"conv": "hook_conv", "pattern": "hook_pattern", "mixed": "hook_y"}
    assert {role: mixer.hook_for(role) for role in roles} == roles
    for role in ("state", "carry"):
        with pytest.raises(HookNameError, match=f"no {role}: .*no state of finite size"):
            mixer.hook_for(role)
    for role in ("decay", "gate"):
        with pytest.raises(HookNameError, match=f"no {role}: "):
            mixer.hook_for(role)


def test_a_later_token_changes_nothing_before_it():
    mixer, x = tiny(), inputs()
    changed = x.clone()
    changed[:, 6] += 1
    before, after = call(mixer, x)[0], call(mixer, changed)[0]
    assert (before - after)[:, :6].abs().max() < 1e-13  # the transform's rounding
    assert ((before - after)[:, 6:].abs().amax((0, 2)) > 1e-6).all()


@SKIP
def test_edits_in_place_keep_gradients(skip):
    assert_edits_in_place_keep_gradients(tiny(skip=skip), inputs())


def test_the_filter_is_float32_in_a_bfloat16_model():
    mixer, x = tiny(skip=True), inputs()
    want = call(mixer, x)[0]
    seen = look(mixer.bfloat16(), x.bfloat16(), "hook_filter", "hook_ssm_write", "hook_pattern")
    assert seen["hook_filter"].dtype == seen["hook_pattern"].dtype == torch.float32
    assert seen["hook_ssm_write"].dtype == seen["out"].dtype == torch.bfloat16
    assert seen["carried"]["window"].dtype == torch.float32
    assert (seen["out"] - want).abs().max() < 0.05 * want.abs().max()


def test_initialisation_is_the_authors():
    """zoology redraws every linear layer, the filter's too; the rest keeps its own."""
    sizes = {"d_model": 32, "d_vocab": 5, "n_ctx": 40, "n_layers": 1, "architecture": "hyena"}
    by_init = {
        init: HookedModel(ModelConfig(init=init, options={"skip": True, "w": 10}, **sizes))
        for init in ("paper", "uniform")
    }
    mixer, other = (by_init[init].blocks[0].mixer for init in ("paper", "uniform"))
    linear = ("in_proj", "out_proj", "filter.layers", "filter.fc_out")
    for name, parameter in mixer.named_parameters():
        assert name.startswith(linear) != torch.equal(parameter, other.get_parameter(name)), name
    assert torch.equal(mixer.filter.z, filter_features(40, 3))
    assert torch.equal(mixer.filter.freq, torch.full((64,), 10.0))
    assert abs(mixer.skip.std() - 1) < 0.3
    assert 0.9 * 3**-0.5 < mixer.conv.weight.abs().max() <= 3**-0.5
    assert abs(mixer.filter.layers[1].weight.std() - 0.02) < 0.002
    assert abs(mixer.out_proj.weight.std() - 0.02 / 2**0.5) < 0.002
    assert other.filter.layers[1].weight.abs().max() > 0.1


def test_the_filter_is_not_decayed():
    mixer = tiny(skip=True)
    marked = {n for n, p in mixer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {n for n, _ in mixer.named_parameters() if n.startswith("filter.")}


def test_the_papers_default_has_no_skip_and_errors_name_what_is_wrong():
    assert HyenaOptions().skip is False and "skip" not in dict(tiny().named_parameters())
    with pytest.raises(ConfigError, match="d_conv=0; allowed: an integer >= 1"):
        HyenaOptions(d_conv=0)
    with pytest.raises(ConfigError, match="emb_dim=4; allowed: an odd integer >= 3"):
        tiny(emb_dim=4)
    cfg = ModelConfig(architecture="hyena", d_model=6, d_vocab=5, n_ctx=8, n_layers=1)
    with pytest.raises(ShapeError, match="n_ctx=8"):
        HookedModel(cfg)(torch.zeros(1, 9, dtype=torch.long))

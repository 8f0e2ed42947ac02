"""H3 against the authors' layer and kernels, and against its recurrence as a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import ConfigError, HookNameError, HookUnavailableError, ShapeError
from hooked_ssm.mixers import h3
from hooked_ssm.mixers.h3 import H3, DiagonalSSM, H3Options
from hooked_ssm.mixers.h3_ssms import DiagonalModes, ShiftSSM
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

KEYS = {
    "shift.B": "ssm_k_kernel.kernel.B",
    "shift.C": "ssm_k_kernel.kernel.C",
    "shift.D": "ssm_k_D",
    "ssm.log_dt": "kernel.kernel.log_dt",
    "ssm.A_real_log": "kernel.kernel.inv_A_real",
    "ssm.A_imag": "kernel.kernel.A_imag",
    "ssm.B": "kernel.kernel.B",
    "ssm.C": "kernel.kernel.C",
    "ssm.D": "D",
    "out_proj.weight": "output_linear.weight",
    "out_proj.bias": "output_linear.bias",
}
DIAGONAL = {name: f"diag.{name}" for name in ("log_dt", "A_imag", "B", "C")}
DIAGONAL["A_real_log"] = "diag.inv_A_real"
ACTIVATIONS = {"q": "hook_q", "k": "hook_k", "v": "hook_v", "shift_out": "hook_shift"}
ACTIVATIONS |= {"diag_kernel": "hook_filter", "pre_out": "hook_y"}
D_MODEL, LENGTH = 6, 11
TINY = H3Options(d_state=8, head_dim=2)


def make(config: dict) -> H3:
    options = H3Options(d_state=config["d_state"], head_dim=config["head_dim"])
    return H3(config["d_model"], config["l_max"], options)


def tiny(**options) -> H3:
    return build(H3, D_MODEL, H3Options(**{"d_state": 8, **options}))


def inputs(length: int = LENGTH, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, length, D_MODEL, generator=generator, dtype=torch.float64)


def clone(value, hook):
    return value.clone()


@pytest.mark.parametrize("name", fixture_names("layer_h3"))
class TestParity:
    def test_outputs(self, name):
        case = LayerCase(Fixture(name), make, KEYS)
        for dtype, key in ((torch.float64, "out64.y"), (torch.float32, "out.y")):
            x = case.fixture.tensors["in.x"].to(dtype)
            case.fixture.check(key, call(case.mixer(dtype), x)[0])

    def test_through_the_states(self, name):
        """The same from all states one by one, where the filter is not cut."""
        case = LayerCase(Fixture(name), make, KEYS)
        x, mixer = case.fixture.tensors["in.x"].double(), case.mixer(torch.float64)
        if x.shape[1] > mixer.n_ctx:
            with pytest.raises(HookUnavailableError):
                call(mixer, x, {"hook_ssm_state": clone})
        else:
            case.fixture.check("out64.y", call(mixer, x, {"hook_ssm_state": clone})[0])

    def test_activations(self, name):
        case = LayerCase(Fixture(name), make, KEYS)
        x, mixer = case.fixture.tensors["in.x"].double(), case.mixer(torch.float64)
        seen = look(mixer, x, *ACTIVATIONS.values())
        seen["hook_y"] = seen["hook_y"].transpose(2, 3)  # theirs has the value index first
        stored = {key.removeprefix("mid.") for key in case.fixture.tensors if "mid." in key}
        assert stored == {*ACTIVATIONS, "shift_kernel"}
        for key, hook in ACTIVATIONS.items():
            want = case.fixture.tensors[f"mid.{key}"]
            case.fixture.check(f"mid.{key}", seen[hook].reshape(want.shape))
        taps, want = mixer.shift.filter(), case.fixture.tensors["mid.shift_kernel"]
        padded = torch.nn.functional.pad(taps, (0, max(want.shape[1] - taps.shape[1], 0)))
        case.fixture.check("mid.shift_kernel", padded[:, : want.shape[1]])

    def test_pattern(self, name):
        """Also where the filter is cut."""
        case = LayerCase(Fixture(name), make, KEYS)
        x, mixer = case.fixture.tensors["in.x"].double(), case.mixer(torch.float64)
        seen = look(mixer, x, "hook_pattern", "hook_v", "hook_y")
        got = torch.einsum("bhqk,bkhd->bqhd", seen["hook_pattern"], seen["hook_v"])
        torch.testing.assert_close(got, seen["hook_y"], atol=1e-9, rtol=1e-9)
        case.fixture.check("out64.y", seen["out"])


@pytest.mark.parametrize("name", fixture_names("op_h3_kernels"))
def test_modules_give_the_kernels_and_states_of_the_reference(name):
    fixture = Fixture(name)
    theirs, given = fixture.group("state.", torch.float64), fixture.group("in.", torch.float64)
    heads, channels = given["u_diag"].shape[-1], given["u_shift"].shape[-1]
    ssm = DiagonalModes(heads, theirs["diag.A_imag"].shape[1]).double()
    load(ssm, {**theirs, "D": torch.zeros(heads)}, DIAGONAL)
    modes = ssm.discrete()
    fixture.check("mid64.dA", torch.view_as_real(modes.dA))
    fixture.check("mid64.dB", torch.view_as_real(modes.dB))
    u = given["u_diag"][..., None]
    recurrence = DiagonalSSM(q=torch.ones_like(u), k=u, v=torch.ones_like(u), modes=modes, D=ssm.D)
    scanned = recurrence.scan(None, True)
    fixture.check("out64.diag_conv", scanned.y[..., 0])
    states = torch.view_as_real(scanned.states)[:, :, :, 0, 0]
    fixture.check("mid64.diag_states", states)

    shift = ShiftSSM(channels, theirs["shift.B"].shape[1], n_ctx=1000).double()
    load(shift, {**theirs, "D": torch.zeros(channels)}, {"B": "shift.B", "C": "shift.C"})
    y, _ = shift(given["u_shift"], tiny().hook_conv_carry, 0)
    fixture.check("out64.shift_conv", y)


def loop(mixer: H3, seen: dict, write=None, decay=None, carry=None, state=None) -> torch.Tensor:
    """The recurrence over cached activations, token by token; what is added where, by position."""
    modes, D = mixer.ssm.discrete(), mixer.ssm.D[:, None, None]
    h, mixed = 0, []
    for t in range(seen["hook_v"].shape[1]):
        outer = torch.einsum("bhi,bhj->bhij", seen["hook_shift"][:, t], seen["hook_v"][:, t])
        dA = modes.dA * (decay or {}).get(t, 1)
        h = dA[:, None, None] * h + modes.dB[:, None, None] * outer[..., None]
        h = h + (write or {}).get(t, 0) + (carry or {}).get(t, 0)
        read = 2 * ((h + (state or {}).get(t, 0)) * modes.C[:, None, None]).sum(-1).real
        mixed.append(torch.einsum("bhi,bhij->bhj", seen["hook_q"][:, t], read + D * outer))
    return torch.stack(mixed, dim=1)


def test_edits_of_write_decay_carry_and_state_are_those_of_the_recurrence():
    mixer, x = tiny(head_dim=3), inputs()
    seen = look(mixer, x, "hook_q", "hook_shift", "hook_v", "hook_y", "hook_ssm_carry.4")
    torch.testing.assert_close(loop(mixer, seen), seen["hook_y"], atol=1e-10, rtol=0)
    generator = torch.Generator().manual_seed(2)
    shape = seen["hook_ssm_carry.4"].shape
    at = {t: torch.randn(shape, generator=generator, dtype=torch.complex128) for t in (2, 4, 8)}

    def add(t):
        def hook(value, hook):
            value[:, t] += at[t]

        return hook

    def double(value, hook):
        value[:, 6] *= 2

    one = {
        "write": ({"hook_ssm_write": add(2)}, {"write": {2: at[2]}}),
        "decay": ({"hook_ssm_decay": double}, {"decay": {6: 2}}),
        "carry": ({"hook_ssm_carry.4": lambda v, hook: v + at[4]}, {"carry": {4: at[4]}}),
        "state": ({"hook_ssm_state": add(8)}, {"state": {8: at[8]}}),
    }
    hooks = {name: hook for edits, _ in one.values() for name, hook in edits.items()}
    every = (hooks, {name: where for _, wanted in one.values() for name, where in wanted.items()})
    for edits, wanted in [*one.values(), every]:
        got = look(mixer, x, "hook_y", hooks=edits)["hook_y"]
        assert (got - seen["hook_y"]).abs().max() > 1e-3
        torch.testing.assert_close(got, loop(mixer, seen, **wanted), atol=1e-10, rtol=0)


@pytest.mark.parametrize("elsewhere", [(), ("hook_ssm_carry.3",), ("hook_ssm_state",)])
def test_an_edited_filter_is_what_is_convolved_with(elsewhere):
    mixer, x = tiny(), inputs()

    def halve_late_taps(filter, hook):
        filter[:, 2:] /= 2

    names = ("hook_q", "hook_shift", "hook_v", "hook_filter")
    seen = look(mixer, x, *names)
    filter = seen["hook_filter"]
    halve_late_taps(filter, None)
    outer = torch.einsum("bphi,bphj->bphij", seen["hook_shift"], seen["hook_v"])
    mixed = mixer.ssm.D[:, None, None] * outer
    for lag in range(LENGTH):
        tap = filter[:, lag, None, None]
        mixed[:, lag:] = mixed[:, lag:] + tap * outer[:, : LENGTH - lag]
    want = torch.einsum("bphi,bphij->bphj", seen["hook_q"], mixed)
    hooks = {"hook_filter": halve_late_taps, **dict.fromkeys(elsewhere, clone)}
    got = look(mixer, x, "hook_y", "hook_pattern", hooks=hooks)
    torch.testing.assert_close(got["hook_y"], want, atol=1e-10, rtol=0)
    by_pattern = torch.einsum("bhqk,bkhd->bqhd", got["hook_pattern"], seen["hook_v"])
    torch.testing.assert_close(by_pattern, want, atol=1e-10, rtol=0)


def test_an_edited_filter_cannot_reach_earlier_calls_and_says_so():
    mixer, x = tiny(), inputs()
    _, carried = call(mixer, x[:, :6])
    rest = {"segment": segment(5, start=6), "carried": carried}
    want = call(mixer, x)[0][:, 6:]
    got, _ = call(mixer, x[:, 6:], {"hook_filter": clone}, **rest)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
    assert look(mixer, x[:, 6:], "hook_filter", **rest)["hook_filter"].shape == (3, LENGTH)
    with pytest.raises(HookUnavailableError, match="earlier calls.*one call"):
        call(mixer, x[:, 6:], {"hook_filter": lambda value, hook: 0 * value}, **rest)


def test_beyond_n_ctx_it_is_no_recurrence():
    mixer, x = H3(D_MODEL, 8, TINY).double(), inputs()
    mixer.initialise(torch.Generator().manual_seed(0))
    for name in ("hook_ssm_state", "hook_ssm_write", "hook_ssm_decay", "hook_ssm_carry.9"):
        with pytest.raises(HookUnavailableError, match="ends at n_ctx=8 taps, and position 10"):
            call(mixer, x, {name: clone})
    y, carried = call(mixer, x)
    assert set(carried) == {"window"} and y.isfinite().all()
    _, carried = call(mixer, x[:, :8])
    with pytest.raises(ShapeError, match="no state stands for the past"):
        call(mixer, x[:, 8:], segment=segment(3, start=8), carried=carried)


@pytest.mark.parametrize("splits", [(1,) * LENGTH, (4, 7), (7, 1, 3)])
@pytest.mark.parametrize("d_state", [2, 5, 8, 64])
def test_segments_join_and_what_is_carried_keeps_its_size(splits, d_state):
    mixer, x = tiny(d_state=d_state), inputs()
    want, at_end = call(mixer, x)
    outputs, carried, start = [], None, 0
    for part in x.split(splits, dim=1):
        where = segment(part.shape[1], start=start)
        y, carried = call(mixer, part, segment=where, carried=carried)
        outputs.append(y)
        start += part.shape[1]
    torch.testing.assert_close(torch.cat(outputs, dim=1), want, atol=1e-10, rtol=0)
    assert carried["window"].shape == (2, D_MODEL, d_state - 1)
    for key, value in at_end.items():
        torch.testing.assert_close(carried[key], value, atol=1e-10, rtol=0)
    state = look(mixer, x, "hook_ssm_state")["hook_ssm_state"]
    torch.testing.assert_close(state[:, -1], at_end["state"], atol=1e-10, rtol=0)


def test_window_and_state_of_another_prompt_are_its_whole_past():
    mixer, base, source = tiny(), inputs(), inputs().flip(1)
    names = ("hook_conv_carry.5", "hook_ssm_carry.5")
    seen = look(mixer, source, *names)
    want, _ = call(mixer, torch.cat([source[:, :6], base[:, 6:]], dim=1))
    hooks = {name: lambda value, hook: seen[hook.name] for name in names}
    got, _ = call(mixer, base, hooks)
    torch.testing.assert_close(got[:, 6:], want[:, 6:], atol=1e-10, rtol=0)
    for name in names:
        alone, _ = call(mixer, base, {name: hooks[name]})
        assert (alone[:, 6:] - want[:, 6:]).abs().max() > 1e-3


@pytest.mark.parametrize("padded", [slice(0, 4), slice(7, None)])
def test_padding_changes_nothing(padded):
    mixer, x = tiny(), inputs()
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[:, padded] = False
    want, carried = call(mixer, x[:, real[0]])
    states = look(mixer, x[:, real[0]], "hook_ssm_state")["hook_ssm_state"]
    for hooks in ({}, {"hook_ssm_carry.5": clone}, {"hook_ssm_carry.8": clone}):
        got, handed_on = call(mixer, x, hooks, segment=segment(LENGTH, real=real))
        torch.testing.assert_close(got[:, real[0]], want, atol=1e-10, rtol=0)
        torch.testing.assert_close(handed_on["state"], carried["state"], atol=1e-10, rtol=0)
        if padded.start == 0:
            torch.testing.assert_close(handed_on["window"], carried["window"], atol=1e-10, rtol=0)
    for hooks in ({}, {"hook_ssm_carry.5": clone}, {"hook_ssm_decay": clone}):
        where = {"hooks": hooks, "segment": segment(LENGTH, real=real)}
        seen = look(mixer, x, "hook_ssm_state", **where)
        got, handed_on = seen["hook_ssm_state"], seen["carried"]["state"]
        torch.testing.assert_close(got[:, real[0]], states, atol=1e-10, rtol=0)
        torch.testing.assert_close(got[:, -1], states[:, -1], atol=1e-10, rtol=0)
        torch.testing.assert_close(handed_on, states[:, -1], atol=1e-10, rtol=0)


def test_short_and_long_convolutions_agree(monkeypatch):
    mixer, x = tiny(), inputs(40)
    want, _ = call(mixer, x)
    monkeypatch.setattr(h3, "FEW_TAPS", 0)
    torch.testing.assert_close(call(mixer, x)[0], want, atol=1e-10, rtol=0)


def test_a_later_token_changes_nothing_before_it():
    mixer, x = tiny(), inputs()
    changed = x.clone()
    changed[:, 6] += 1
    before, after = call(mixer, x)[0], call(mixer, changed)[0]
    assert (before - after)[:, :6].abs().max() < 1e-13  # the transform's rounding in the shift
    assert ((before - after)[:, 6:].abs().amax((0, 2)) > 1e-6).all()


def test_gradients_are_those_through_the_states():
    mixer, x = tiny(), inputs()
    gradients = []
    for hooks in ({}, {"hook_ssm_state": clone}, {"hook_ssm_decay": clone}):
        mixer.zero_grad()
        call(mixer, x, hooks)[0].square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in mixer.named_parameters()})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert gradient.abs().max() > 0, name
            torch.testing.assert_close(other[name], gradient, atol=1e-9, rtol=1e-9)


def test_edits_in_place_keep_gradients():
    assert_edits_in_place_keep_gradients(tiny(), inputs())


def test_the_core_is_float32_in_a_bfloat16_model():
    mixer, x = tiny(), inputs()
    want = call(mixer, x)[0]
    names = ("hook_filter", "hook_ssm_state", "hook_ssm_write", "hook_pattern", "hook_shift")
    seen = look(mixer.bfloat16(), x.bfloat16(), *names, "hook_conv_carry.3", "hook_y")
    dtypes = [seen[name].dtype for name in names]
    assert dtypes == [
        torch.float32,
        torch.complex64,
        torch.complex64,
        torch.float32,
        torch.bfloat16,
    ]
    assert seen["hook_conv_carry.3"].dtype == seen["carried"]["window"].dtype == torch.float32
    assert seen["hook_y"].dtype == seen["out"].dtype == torch.bfloat16
    assert (seen["out"] - want).abs().max() < 0.05 * want.abs().max()


def test_initialisation_is_the_authors_and_only_linear_layers_are_redrawn():
    sizes = {"d_model": 32, "d_vocab": 5, "n_ctx": 40, "n_layers": 1, "architecture": "h3"}
    by_init = {i: HookedModel(ModelConfig(init=i, **sizes)) for i in ("paper", "uniform")}
    mixer = by_init["paper"].blocks[0].mixer
    assert (mixer.d_state, mixer.n_heads, mixer.shift.taps) == (40, 16, 40)
    A = torch.complex(-mixer.ssm.A_real_log.exp(), mixer.ssm.A_imag)
    want = torch.complex(torch.full((20,), -0.5), math.pi * torch.arange(20.0))
    torch.testing.assert_close(A, want.expand(16, -1))
    dt = mixer.ssm.log_dt.exp()
    assert ((dt >= 1e-3) & (dt <= 0.1)).all() and dt.std() > 0.01
    assert torch.equal(torch.view_as_complex(mixer.ssm.B), torch.ones(16, 20) + 0j)
    assert abs(torch.view_as_complex(mixer.ssm.C).abs().square().mean() - 1) < 0.2
    assert torch.equal(mixer.shift.B, torch.eye(40)[0].expand(32, -1))
    assert 0.9 * 40**-0.5 < mixer.shift.C.abs().max() <= 40**-0.5
    assert abs(mixer.k_proj.weight.std() - 0.02) < 0.002 and not mixer.k_proj.bias.any()
    assert abs(mixer.out_proj.weight.std() - 0.02 / 2**0.5) < 0.002
    other = by_init["uniform"].blocks[0].mixer
    for name, parameter in mixer.named_parameters():
        assert ("proj" in name) != torch.equal(parameter, other.get_parameter(name)), name


def test_what_the_authors_do_not_decay_is_marked():
    marked = {n for n, p in tiny().named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"shift.B", "ssm.log_dt", "ssm.A_real_log", "ssm.A_imag", "ssm.B"}


def test_errors_name_what_is_wrong():
    with pytest.raises(ConfigError, match="d_state=1; allowed: an integer >= 2"):
        H3Options(d_state=1)
    with pytest.raises(ConfigError, match="head_dim=4 must divide d_model=6"):
        H3(6, 16, H3Options(head_dim=4))
    with pytest.raises(ConfigError, match="now 1; n_ctx unless given"):
        H3(6, 1, H3Options())
    with pytest.raises(HookNameError, match="no gate: it has no gate"):
        tiny().hook_for("gate")
    cfg = ModelConfig(architecture="h3", d_model=6, d_vocab=5, n_ctx=8, n_layers=1)
    with pytest.raises(ShapeError, match="n_ctx=8"):
        HookedModel(cfg)(torch.zeros(1, 9, dtype=torch.long))

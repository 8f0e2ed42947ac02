"""DeltaNet and Gated DeltaNet: parity with fla and zoology, laws of the delta rule, edits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hooked_ssm.errors import ConfigError, HookUnavailableError
from hooked_ssm.mixers.delta_net import DeltaNet, DeltaNetOptions
from hooked_ssm.mixers.delta_rule_mixer import DeltaRuleMixer
from hooked_ssm.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetOptions
from hooked_ssm.mixers.gated_norm import GatedNorm
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
    **{f"conv.{name}.weight": f"{name}_conv1d.weight" for name in "qkv"},
    "beta_proj.weight": "b_proj.weight",
    "decay_proj.weight": "a_proj.weight",
    "gate_proj.weight": "g_proj.weight",
    "norm.weight": "o_norm.weight",
    "out_proj.weight": "o_proj.weight",
}


def make(config: dict) -> DeltaRuleMixer:
    """Our mixer for a fixture's configuration."""
    shared = {
        "n_heads": config["num_heads"],
        "allow_neg_eigval": config.get("allow_neg_eigval", False),
    }
    if "head_dim" not in config:
        options = DeltaNetOptions(use_gate=config.get("use_gate", False), **shared)
        return DeltaNet(config["d_model"], 64, options)
    options = GatedDeltaNetOptions(
        use_gate=config.get("use_gate", True),
        d_key=config["head_dim"],
        expand_v=config.get("expand_v", 2),
        **shared,
    )
    return GatedDeltaNet(config["d_model"], 64, options)


def case(name: str) -> LayerCase:
    return LayerCase(Fixture(name), make, KEYS)


LAYERS = [
    *fixture_names("layer_deltanet"),
    *fixture_names("layer_zoology_deltanet"),
    *fixture_names("layer_gated_deltanet"),
    *fixture_names("layer_zoology_gated_deltanet"),
]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_matches_the_authors(name, dtype):
    case(name).check_outputs(dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_show_the_authors_activations(name):
    names = {
        "q": "hook_q_normed",
        "k": "hook_k_normed",
        "v": "hook_x",
        "beta": "hook_beta",
        "g": "hook_ssm_decay",
        "states": "hook_ssm_state",
        "o": "hook_z",
    }
    case(name).check_activations(names)


@pytest.mark.parametrize("name", fixture_names("layer_zoology_gated_deltanet"))
def test_bfloat16_comes_near_zoologys(name):
    fixture = Fixture(name)
    mixer = case(name).mixer(torch.bfloat16)
    x = fixture.tensors["in.x"].bfloat16()
    fixture.check("out.y_bf16", mixer(x, segment(x.shape[1]))[0])


@pytest.mark.parametrize("name", fixture_names("op_fla_gated_rmsnorm"))
def test_gated_norm_matches_flas(name):
    fixture = Fixture(name)
    inputs = fixture.group("in.", torch.float64)
    norm = GatedNorm(fixture.config["dim"], fixture.config["eps"]).double()
    with torch.no_grad():
        norm.weight.copy_(fixture.tensors["state.weight"])
    fixture.check("out64.y", norm(inputs["x"], inputs["g"]))


KINDS = {
    "plain": (DeltaNet, DeltaNetOptions(n_heads=2)),
    "plain_gate_neg": (
        DeltaNet,
        DeltaNetOptions(n_heads=2, use_gate=True, allow_neg_eigval=True, expand_k=0.5),
    ),
    "plain_no_conv": (DeltaNet, DeltaNetOptions(n_heads=4, d_conv=0, expand_v=2)),
    "gated": (GatedDeltaNet, GatedDeltaNetOptions(n_heads=2)),
    "gated_neg_no_conv": (
        GatedDeltaNet,
        GatedDeltaNetOptions(
            n_heads=2, d_key=3, d_conv=0, use_gate=False, allow_neg_eigval=True, expand_v=1
        ),
    ),
}
GATED = [name for name in KINDS if name.startswith("gated")]


def a_mixer(kind: str) -> DeltaRuleMixer:
    mixer_class, options = KINDS[kind]
    return build(mixer_class, 8, options)


@pytest.fixture(params=KINDS)
def mixer(request) -> DeltaRuleMixer:
    return a_mixer(request.param)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1)).double()


def close(got, want, atol=1e-11):
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


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
    seen = look(mixer, x, "hook_pattern", "hook_x", "hook_z")
    mixed = torch.einsum("bhqk,bkhd->bqhd", seen["hook_pattern"], seen["hook_x"])
    close(mixed, seen["hook_z"])


# Laws.


@pytest.mark.parametrize("kind", ["gated", "gated_neg_no_conv"])
def test_a_decay_of_one_leaves_the_plain_delta_rule(kind, x):
    gated = a_mixer(kind)
    options = gated.options
    plain = DeltaNet(
        8,
        64,
        DeltaNetOptions(
            n_heads=gated.n_heads,
            expand_k=gated.n_heads * gated.d_key / 8,
            expand_v=gated.n_heads * gated.d_head / 8,
            d_conv=options.d_conv,
            use_gate=options.use_gate,
            allow_neg_eigval=options.allow_neg_eigval,
        ),
    ).double()
    names = plain.state_dict()
    plain.load_state_dict({n: v for n, v in gated.state_dict().items() if n in names})
    want, carried = call(plain, x)
    # by the parameters, on the fast path: A so small that nothing decays
    with torch.no_grad():
        gated.A_log.fill_(-100)
    got, state = call(gated, x)
    close(got, want)
    # and by an edit of the decay, on the path that steps
    gated = a_mixer(kind)
    got, state = call(gated, x, {"hook_ssm_decay": lambda value, hook: torch.ones_like(value)})
    close(got, want)
    close(state["state"], carried["state"])


def test_orthogonal_keys_leave_linear_attention(x):
    """Nothing is erased where no key has a share in an earlier one: S = sum of beta k v^T."""
    mixer = build(DeltaNet, 8, DeltaNetOptions(n_heads=1))
    basis = torch.eye(8).double().expand(2, 8, 8)[:, :, None]

    def orthogonal(keys, hook):
        return basis.clone()

    names = ("hook_q_normed", "hook_x", "hook_beta", "hook_z")
    seen = look(mixer, x[:, :8], *names, hooks={"hook_k_normed": orthogonal})
    want = decayed_linear_attention(
        seen["hook_q_normed"] * 8**-0.5,
        basis,
        seen["hook_beta"][..., None] * seen["hook_x"],
        torch.zeros_like(seen["hook_beta"]),
    )
    close(seen["hook_z"], want.y)


def test_a_key_written_twice_holds_its_last_value_only(x):
    """With beta = 1 and equal keys the second write replaces the first; linear attention adds."""
    mixer = build(DeltaNet, 8, DeltaNetOptions(n_heads=2))

    def same_key(keys, hook):
        return F.one_hot(torch.zeros(keys.shape[:3]).long(), keys.shape[-1]).double()

    hooks = {
        "hook_k_normed": same_key,
        "hook_beta": lambda value, hook: torch.ones_like(value),
    }
    seen = look(mixer, x, "hook_ssm_state", "hook_x", "hook_delta", hooks=hooks)
    close(seen["hook_ssm_state"][..., 0, :], seen["hook_x"])
    before = F.pad(seen["hook_x"][:, :-1], (0, 0, 0, 0, 1, 0))
    close(seen["hook_delta"], seen["hook_x"] - before)


def test_beta_two_flips_what_the_key_held(x):
    mixer = build(DeltaNet, 8, DeltaNetOptions(n_heads=2, allow_neg_eigval=True))
    hooks = {
        "hook_k_normed": lambda k, hook: F.one_hot(torch.zeros(k.shape[:3]).long(), 4).double(),
        "hook_beta": lambda value, hook: torch.full_like(value, 2.0),
    }
    state = look(mixer, x, "hook_ssm_state", "hook_x", hooks=hooks)
    held = state["hook_ssm_state"][..., 0, :]
    close(held[:, 1], 2 * state["hook_x"][:, 1] - held[:, 0])


# The prediction error.


def recurrence_inputs(mixer, x, **hooks):
    names = ["hook_k_normed", "hook_x", "hook_beta", "hook_delta", "hook_ssm_state"]
    names += ["hook_ssm_decay"] if mixer.decays else []
    seen = look(mixer, x, *[n for n in names if n not in hooks], hooks=hooks)
    return {n.removeprefix("hook_"): seen.get(n) for n in (*names, "out", "carried")}


def assert_delta_is_the_error(seen, decay=1.0):
    state = seen["ssm_state"]
    before = F.pad(state[:, :-1], (0, 0) * 3 + (1, 0))
    decay = decay if seen.get("ssm_decay") is None else seen["ssm_decay"][..., None]
    recalled = decay * torch.einsum("bphf,bphfd->bphd", seen["k_normed"], before)
    close(seen["delta"], seen["x"] - recalled)


def test_delta_is_the_prediction_error(mixer, x):
    assert_delta_is_the_error(recurrence_inputs(mixer, x))


def test_delta_answers_to_edited_writes_and_carries(mixer, x):
    """It is the error of what the state really holds, and cached without changing anything."""

    def drop(write, hook):
        write = write.clone()
        write[:, 2] = 0
        return write

    edits = {"hook_ssm_write": drop, "hook_ssm_carry.4": lambda value, hook: 0.5 * value + 1}
    seen = recurrence_inputs(mixer, x, **edits)
    state = seen["ssm_state"].clone()
    assert_delta_is_the_error(seen)
    assert (state[:, 2] - recurrence_inputs(mixer, x)["ssm_state"][:, 2]).abs().max() > 1e-3
    close(call(mixer, x, edits)[0], seen["out"])


def test_an_edited_delta_is_written_as_given(mixer, x):
    """S[t] = decay S[t-1] + beta k delta^T, with the later deltas as they were."""

    def edit(delta, hook):
        delta = delta.clone()
        delta[:, 3] = 1.5
        return delta

    clean = recurrence_inputs(mixer, x)
    edited = recurrence_inputs(mixer, x, hook_delta=edit)
    change = edited["ssm_state"] - clean["ssm_state"]
    assert not change[:, :3].any()
    step = clean["beta"][:, 3, :, None] * (1.5 - clean["delta"][:, 3])
    want = clean["k_normed"][:, 3][..., None] * step[..., None, :]
    close(change[:, 3], want)
    for t in range(4, 9):
        decay = clean["ssm_decay"][:, t, :, None, None] if mixer.decays else 1.0
        want = decay * want
        close(change[:, t], want)
    close(edited["carried"]["state"], edited["ssm_state"][:, -1])
    close(call(mixer, x, {"hook_delta": edit})[0], edited["out"])


def test_a_delta_edited_in_place_counts(mixer, x):
    def edit(delta, hook):
        delta[:, 3] = 1.5

    want = call(mixer, x, {"hook_delta": lambda d, hook: d.index_fill(1, torch.tensor(3), 1.5)})
    close(call(mixer, x, {"hook_delta": edit})[0], want[0])


def test_a_carry_that_would_miss_an_edited_delta_is_refused(mixer, x):
    def edit(delta, hook):
        return delta.index_fill(1, torch.tensor(5), 0.0)

    seen = look(mixer, x, "hook_ssm_carry.4", hooks={"hook_delta": edit})
    assert "hook_ssm_carry.4" in seen  # handed on before the edit: nothing is missed
    with pytest.raises(HookUnavailableError, match="hook_ssm_state"):
        look(mixer, x, "hook_ssm_carry.5", hooks={"hook_delta": edit})


# Writes and decays.


def test_an_unchanged_write_changes_nothing(mixer, x):
    want, carried = call(mixer, x)
    for name in ("hook_ssm_write", *(["hook_ssm_decay"] if mixer.decays else [])):
        got, state = call(mixer, x, {name: lambda value, hook: value.clone()})
        close(got, want)
        close(state["state"], carried["state"])


def test_an_edited_write_is_still_erased(mixer, x):
    """Adding w to the write at t = 2 puts (I - beta k k^T) decay w into the state at t = 3."""
    clean = recurrence_inputs(mixer, x)
    added = torch.ones_like(clean["ssm_state"][:, 0])

    def edit(write, hook):
        write[:, 2] += added

    state = look(mixer, x, "hook_ssm_state", hooks={"hook_ssm_write": edit})["hook_ssm_state"]
    kept = added * (clean["ssm_decay"][:, 3, :, None, None] if mixer.decays else 1.0)
    key, beta = clean["k_normed"][:, 3], clean["beta"][:, 3]
    erased = key[..., None] * torch.einsum("bhf,bhfd->bhd", key, kept)[..., None, :]
    close(state[:, 2] - clean["ssm_state"][:, 2], added)
    close(state[:, 3] - clean["ssm_state"][:, 3], kept - beta[..., None, None] * erased)


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("value", [0.0, -0.5, 1.2])
def test_an_edited_decay_reruns_the_recurrence(kind, value, x):
    mixer = a_mixer(kind)

    def edit(decay, hook):
        return decay.index_fill(1, torch.tensor(4), value)

    clean = recurrence_inputs(mixer, x)
    seen = recurrence_inputs(mixer, x, hook_ssm_decay=edit)
    decay = edit(clean["ssm_decay"], None)
    assert_delta_is_the_error(seen, decay[..., None])
    before = F.pad(seen["ssm_state"][:, :-1], (0, 0) * 3 + (1, 0))
    strong = clean["beta"][..., None] * seen["delta"]
    write = torch.einsum("bphf,bphd->bphfd", clean["k_normed"], strong)
    close(seen["ssm_state"], decay[..., None, None] * before + write)


@pytest.mark.parametrize("kind", GATED)
def test_an_edited_delta_under_an_edited_decay(kind, x):
    mixer = a_mixer(kind)
    half = {"hook_ssm_decay": lambda decay, hook: 0.5 * torch.ones_like(decay)}
    clean = look(mixer, x, "hook_ssm_state", hooks=half)["hook_ssm_state"]
    edit = {"hook_delta": lambda d, hook: d.index_fill(1, torch.tensor(3), 0.0)}
    change = look(mixer, x, "hook_ssm_state", hooks=half | edit)["hook_ssm_state"] - clean
    assert change[:, 3].abs().max() > 1e-3
    close(change[:, 5], 0.25 * change[:, 3])


@pytest.mark.parametrize("kind", GATED)
def test_looking_at_decay_and_delta_keeps_the_fast_path(kind, x, monkeypatch):
    def slow(*_):
        raise AssertionError("cached activations must not force the loop over states")

    monkeypatch.setattr("hooked_ssm.mixers.delta_rule.DeltaRule.scan_writes", slow)
    assert look(a_mixer(kind), x, "hook_ssm_decay", "hook_delta").keys() > {"hook_delta"}


def test_gradients_pass_every_hook(mixer, x):
    """Gradients of the inputs are the same whether somebody listens or not."""
    inputs = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(call(mixer, inputs)[0].square().sum(), inputs)
    names = [n for n, s in mixer.specs.items() if not s.per_position] + ["hook_ssm_carry.4"]
    for name in names:
        y, _ = call(mixer, inputs, {name: lambda value, hook: value.clone()})
        (got,) = torch.autograd.grad(y.square().sum(), inputs)
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize(
    ("mixer_class", "options", "names"),
    [
        (DeltaNet, {"n_heads": 3}, "n_heads=3"),
        (GatedDeltaNet, {"n_heads": 3}, "n_heads=3"),
        (GatedDeltaNet, {"n_heads": 2, "expand_v": 0.1}, "expand_v"),
        (DeltaNet, {"d_conv": -1}, "d_conv=-1"),
    ],
)
def test_impossible_sizes_are_refused(mixer_class, options, names, as_shipped):
    with pytest.raises(ConfigError, match=names):
        mixer_class(8, 64, mixer_class.Options(**options))


def test_core_is_float32_under_bfloat16(x):
    mixer = GatedDeltaNet(8, 64, GatedDeltaNetOptions(n_heads=2))
    mixer.initialise(torch.Generator().manual_seed(0))
    seen = {}

    def keep(value, hook):
        seen[hook.name] = value.dtype

    core = ("k_normed", "q_normed", "beta", "delta", "ssm_decay", "ssm_write", "ssm_state")
    names = [f"hook_{name}" for name in (*core, "z")]
    y, carried = call(mixer.bfloat16(), x.bfloat16(), dict.fromkeys(names, keep))
    assert y.dtype == seen.pop("hook_z") == torch.bfloat16
    assert set(seen.values()) == {torch.float32} == {carried["state"].dtype}


def test_parameters_are_drawn_as_the_authors_do():
    mixer = GatedDeltaNet(8, 64, GatedDeltaNetOptions(n_heads=8))
    mixer.initialise(torch.Generator().manual_seed(0))
    assert mixer.A_log.exp().min() > 0 and mixer.A_log.exp().max() <= 16
    assert F.softplus(mixer.dt_bias).min() >= 1e-3 and F.softplus(mixer.dt_bias).max() <= 0.1
    exempt = [n for n, p in mixer.named_parameters() if getattr(p, "_no_weight_decay", False)]
    assert sorted(exempt) == ["A_log", "dt_bias"]


def test_edits_in_place_keep_gradients(mixer, x):
    assert_edits_in_place_keep_gradients(mixer, x)

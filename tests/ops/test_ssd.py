"""Mamba-2's recurrence and decayed linear attention: every path, states, decays, fixtures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.linear_attention import linear_attention
from hooked_ssm.ops.ssd import (
    decayed_linear_attention,
    decayed_linear_attention_pattern,
    ssd,
    ssd_pattern,
)
from tests.ops.checks import (
    assert_near,
    check_against_reference,
    check_causal,
    check_states_are_prefix_finals,
    randn,
)
from tests.parity import Fixture, fixture_names

IMPLS = ["reference", "cpu"]
ALONG_POS = ["x", "dt", "B", "C"]


def make(batch: int, length: int, heads: int, groups: int, d_head: int, d_state: int) -> dict:
    return {
        "x": randn(batch, length, heads, d_head, seed=0),
        "dt": F.softplus(randn(batch, length, heads, seed=1)),
        "A": -randn(heads, seed=2).exp(),
        "B": randn(batch, length, groups, d_state, seed=3),
        "C": randn(batch, length, groups, d_state, seed=4),
        "initial_state": randn(batch, heads, d_head, d_state, seed=5),
    }


def make_decayed(batch: int, length: int, heads: int, groups: int = 1) -> dict:
    return {
        "q": randn(batch, length, groups, 3, seed=0),
        "k": randn(batch, length, groups, 3, seed=1),
        "v": randn(batch, length, heads, 2, seed=2),
        "log_decay": -F.softplus(randn(batch, length, heads, seed=3)),
        "initial_state": randn(batch, heads, 3, 2, seed=4),
    }


@pytest.mark.parametrize("impl", IMPLS)
def test_by_hand(impl):
    """Decay 1/2 per unit of dt; the second head belongs to the second group."""
    x = torch.tensor([[1.0, 1], [2, 2], [4, 4]])[None, :, :, None]
    dt = torch.tensor([1.0, 2, 1])[None, :, None].expand(1, 3, 2)
    half = torch.full((2,), -torch.tensor(2.0).log())
    B = torch.tensor([[1.0, 10], [1, 10], [1, 10]])[None, :, :, None]
    C = torch.tensor([[1.0, 1], [2, 1], [1, 1]])[None, :, :, None]
    out = ssd(x, dt, half, B, C, return_states=True, impl=impl)
    # head 0: 1;  1/4 + 2*2 = 4.25;  4.25/2 + 4 = 6.125; head 1 ten times as much
    want = torch.tensor([[1, 10], [4.25, 42.5], [6.125, 61.25]])
    torch.testing.assert_close(out.states[0, :, :, 0, 0], want)
    torch.testing.assert_close(
        out.y[0, :, :, 0], torch.tensor([[1, 10], [8.5, 42.5], [6.125, 61.25]])
    )


@pytest.mark.parametrize("wanted", [False, True, [0], [99], [64, 3, -1, 3], range(40)], ids=str)
def test_only_some_states(wanted):
    check_against_reference(ssd, make(2, 100, 4, 2, 2, 3), return_states=wanted)


def test_states_are_finals_of_prefixes():
    inputs = make(1, 70, 2, 1, 3, 2)
    check_states_are_prefix_finals(ssd, inputs, [0, 1, 63, 64, 69], along_pos=ALONG_POS)


@pytest.mark.parametrize("impl", IMPLS)
def test_causal(impl):
    check_causal(ssd, make(1, 70, 2, 1, 2, 3), along_pos=ALONG_POS, impl=impl)


@pytest.mark.parametrize("length", [1, 2, 70])
def test_patterns_reproduce_the_output(length):
    inputs = make(2, length, 4, 2, 3, 5)
    del inputs["initial_state"]
    pattern = ssd_pattern(inputs["dt"], inputs["A"], inputs["B"], inputs["C"])
    assert (pattern.triu(1) == 0).all()
    y = torch.einsum("bhqk,bkhd->bqhd", pattern, inputs["x"])
    assert_near("y", y, ssd(**inputs).y, 1e-12)
    inputs = make_decayed(2, length, 4, 2)
    del inputs["initial_state"]
    pattern = decayed_linear_attention_pattern(inputs["q"], inputs["k"], inputs["log_decay"])
    y = torch.einsum("bhqk,bkhd->bqhd", pattern, inputs["v"])
    assert_near("y", y, decayed_linear_attention(**inputs).y, 1e-12)


def test_no_decay_is_linear_attention():
    inputs = make_decayed(2, 70, 3, 3)
    inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    got = decayed_linear_attention(**inputs, return_states=True)
    del inputs["log_decay"]
    want = linear_attention(**inputs, return_states=True)
    for name, value in want._asdict().items():
        assert_near(name, getattr(got, name), value, 1e-13)


@pytest.mark.parametrize("decay", [-30.0, -1e4, -1e30, -torch.inf])
@pytest.mark.parametrize("at", [0, 40, 69])
def test_one_huge_decay_costs_its_neighbours_nothing(at, decay):
    """A running sum would leave no digits of the small decays after the huge one."""
    inputs = make_decayed(2, 70, 3)
    inputs["log_decay"] = inputs["log_decay"].clone() / 10
    inputs["log_decay"][:, at] = decay
    for dtype in (torch.float64, torch.float32):
        check_against_reference(
            decayed_linear_attention, inputs, dtype=dtype, return_states=[at, 69, 10]
        )


def test_every_decay_huge_stays_finite():
    inputs = {**make(2, 100, 4, 2, 3, 5), "A": torch.full((4,), -1e5, dtype=torch.float64)}
    check_against_reference(ssd, inputs, dtype=torch.float32, return_states=True)


def test_growing_states_are_exact_too():
    inputs = make_decayed(2, 70, 3)
    inputs["log_decay"] = -inputs["log_decay"] / 10
    check_against_reference(decayed_linear_attention, inputs, return_states=[3, 69])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dt": randn(2, 6, 3, seed=0)}, "dt has shape .* head is 4 by x"),
        ({"C": randn(2, 6, 1, 3, seed=0)}, "C has shape .* group is 2 by B"),
        ({"initial_state": randn(2, 4, 3, 2, seed=0)}, "initial_state has shape"),
        (
            {"B": randn(2, 6, 3, 3, seed=0), "C": randn(2, 6, 3, 3, seed=0)},
            "4 heads cannot share 3 groups",
        ),
        ({"return_states": [6]}, "position 6"),
    ],
    ids=["dt", "C", "initial_state", "groups", "position"],
)
def test_errors_name_the_argument(change, message, as_shipped):
    with pytest.raises(ShapeError, match=message):
        ssd(**{**make(2, 6, 4, 2, 2, 3), **change})


def _around(x, dt, A, B, C, dt_bias, D=None, z=None, *, config, **options):
    """The reference's op: ssd with softplus, limits, skip and gate around it."""
    low, high = (float(limit) for limit in config["dt_limit"])
    dt = F.softplus(dt + dt_bias).clamp(low, high)
    out = ssd(x, dt, A, B, C, **options)
    y = out.y
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]) * x
    return out._replace(y=y if z is None else y * F.silu(z))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_ssd_b"))
def test_mamba2_fixture(name, impl):
    fixture = Fixture(name)
    for prefix, dtype in [("out64", torch.float64), ("out", torch.float32)]:
        inputs = fixture.group("in.", dtype)
        inputs.pop("grad_weight", None)
        start = inputs.pop("initial_states", None)
        options = {"config": fixture.config, "initial_state": start, "impl": impl}
        out = _around(**inputs, **options, return_states=True)
        fixture.check(f"{prefix}.y", out.y)
        fixture.check(f"{prefix}.final_state", out.final_state)
        if dtype == torch.float64:
            fixture.check("out64.states", out.states)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_ssd_b2_l21"))
def test_mamba2_fixture_gradients(name, impl):
    fixture = Fixture(name)
    inputs = fixture.group("in.", torch.float64)
    weight = inputs.pop("grad_weight")
    leaves = {key: value.requires_grad_() for key, value in inputs.items()}
    y = _around(**leaves, config=fixture.config, impl=impl).y
    for key, grad in zip(
        leaves, torch.autograd.grad((y * weight).sum(), list(leaves.values())), strict=True
    ):
        fixture.check(f"grad64.{key}", grad)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_ssd_minimal"))
def test_ssd_minimal_fixture(name, impl):
    """The discrete form: X is dt x, A the log decay; its states are [d_head, d_state]."""
    fixture = Fixture(name)
    for prefix, dtype in [("out64", torch.float64), ("out", torch.float32)]:
        inputs = fixture.group("in.", dtype)
        start = inputs.get("initial_states")
        out = decayed_linear_attention(
            inputs["C"],
            inputs["B"],
            inputs["X"],
            inputs["A"],
            initial_state=None if start is None else start.squeeze(1).mT,
            return_states=True,
            impl=impl,
        )
        fixture.check(f"{prefix}.Y", out.y)
        if f"{prefix}.final_state" in fixture.tensors:
            fixture.check(f"{prefix}.final_state", out.final_state.mT)
        if dtype == torch.float64:
            fixture.check("out64.states", out.states.mT)


def test_ssd_is_decayed_linear_attention():
    inputs = make(2, 70, 4, 2, 3, 5)
    want = ssd(**inputs, return_states=True)
    got = decayed_linear_attention(
        inputs["C"],
        inputs["B"],
        inputs["dt"][..., None] * inputs["x"],
        inputs["dt"] * inputs["A"],
        initial_state=inputs["initial_state"].mT,
        return_states=True,
    )
    assert_near("y", got.y, want.y, 1e-13)
    assert_near("states", got.states.mT, want.states, 1e-13)

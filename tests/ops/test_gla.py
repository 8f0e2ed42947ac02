"""Gated linear attention: hand-worked, the reference, states, huge decays, fixtures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.gla import gla, gla_pattern
from hooked_ssm.ops.linear_attention import linear_attention
from hooked_ssm.ops.ssd import decayed_linear_attention
from tests.ops.checks import (
    assert_near,
    check_against_reference,
    check_causal,
    check_states_are_prefix_finals,
    randn,
)
from tests.parity import Fixture, fixture_names

IMPLS = ["reference", "cpu"]
ALONG_POS = ["q", "k", "v", "log_decay"]


def make(batch: int, length: int, heads: int, d_key: int, d_head: int) -> dict:
    return {
        "q": randn(batch, length, heads, d_key, seed=0),
        "k": randn(batch, length, heads, d_key, seed=1),
        "v": randn(batch, length, heads, d_head, seed=2),
        "log_decay": F.logsigmoid(randn(batch, length, heads, d_key, seed=3)),
        "initial_state": randn(batch, heads, d_key, d_head, seed=4),
    }


@pytest.mark.parametrize("impl", IMPLS)
def test_by_hand(impl):
    """Channel 0 halves at every step, channel 1 is forgotten at the last one."""
    q = torch.tensor([[1.0, 1], [1, 1], [1, 2]])[None, :, None]
    k = torch.tensor([[8.0, 1], [4, 10], [2, 100]])[None, :, None]
    v = torch.tensor([[1.0], [2], [1]])[None, :, None]
    decay = torch.tensor([[0.5, 1], [0.5, 1], [0.5, 0]])[None, :, None]
    out = gla(q, k, v, decay.log(), scale=10.0, return_states=True, impl=impl)
    states = torch.tensor([[8.0, 1], [12, 21], [8, 100]])
    torch.testing.assert_close(out.states[0, :, 0, :, 0], states)
    torch.testing.assert_close(out.y.flatten(), torch.tensor([90.0, 330, 2080]))


@pytest.mark.parametrize("wanted", [False, True, [0], [99], [64, 3, -1, 3], range(40)], ids=str)
def test_only_some_states(wanted):
    check_against_reference(gla, make(2, 100, 2, 3, 2), return_states=wanted)


def test_states_are_finals_of_prefixes():
    inputs = make(1, 70, 2, 3, 2)
    check_states_are_prefix_finals(gla, inputs, [0, 1, 63, 64, 69], along_pos=ALONG_POS)


@pytest.mark.parametrize("impl", IMPLS)
def test_causal(impl):
    check_causal(gla, make(1, 70, 2, 3, 2), along_pos=ALONG_POS, impl=impl)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("length", [1, 2, 3, 64, 70])
def test_pattern_reproduces_the_output(length, scale):
    inputs = make(2, length, 3, 4, 2)
    del inputs["initial_state"]
    pattern = gla_pattern(inputs["q"], inputs["k"], inputs["log_decay"], scale=scale)
    assert pattern.shape == (2, 3, length, length)
    assert (pattern.triu(1) == 0).all()
    y = torch.einsum("bhqk,bkhd->bqhd", pattern, inputs["v"])
    assert_near("y", y, gla(**inputs, scale=scale).y, 1e-12)


def test_one_decay_for_all_channels_is_decayed_linear_attention():
    inputs = make(2, 70, 3, 4, 2)
    one = inputs.pop("log_decay")[..., 0]
    got = gla(**inputs, log_decay=one[..., None].expand(-1, -1, -1, 4), scale=1.0)
    want = decayed_linear_attention(**inputs, log_decay=one)
    assert_near("y", got.y, want.y, 1e-13)
    assert_near("final_state", got.final_state, want.final_state, 1e-13)


def test_no_decay_is_linear_attention():
    inputs = make(2, 70, 3, 4, 2)
    zero = torch.zeros_like(inputs.pop("log_decay"))
    got = gla(**inputs, log_decay=zero, scale=1.0, return_states=True)
    want = linear_attention(**inputs, return_states=True)
    for name, value in want._asdict().items():
        assert_near(name, getattr(got, name), value, 1e-13)


@pytest.mark.parametrize("decay", [-30.0, -1e4, -1e30, -torch.inf])
@pytest.mark.parametrize("at", [0, 40, 69])
def test_one_huge_decay_costs_its_neighbours_nothing(at, decay):
    inputs = make(2, 70, 2, 3, 2)
    inputs["log_decay"] = inputs["log_decay"].clone() / 10
    inputs["log_decay"][:, at, :, 0] = decay
    for dtype in (torch.float64, torch.float32):
        check_against_reference(gla, inputs, dtype=dtype, return_states=[at, 69, 10])


def test_every_decay_huge_stays_finite():
    inputs = make(2, 100, 2, 3, 2)
    inputs["log_decay"] = inputs["log_decay"] * 1e5
    check_against_reference(gla, inputs, dtype=torch.float32, return_states=True)


def test_growing_states_are_exact_too():
    inputs = make(2, 70, 2, 3, 2)
    inputs["log_decay"] = -inputs["log_decay"] / 10
    check_against_reference(gla, inputs, return_states=[3, 69])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": randn(2, 6, 2, 4, seed=0)}, "log_decay has shape .* d_key is 3 by q"),
        ({"log_decay": randn(2, 6, 2, seed=0)}, "log_decay has 3 axes"),
        ({"initial_state": randn(2, 2, 4, 3, seed=0)}, "initial_state has shape"),
        ({"return_states": [6]}, "position 6"),
    ],
    ids=["decay width", "decay axes", "initial_state", "position"],
)
def test_errors_name_the_argument(change, message, as_shipped):
    with pytest.raises(ShapeError, match=message):
        gla(**{**make(2, 6, 2, 3, 4), **change})


def _inputs(fixture: Fixture, dtype: torch.dtype) -> dict:
    inputs = fixture.group("in.", dtype)
    inputs["log_decay"] = inputs.pop("gk")
    return inputs


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_gla"))
def test_fla_fixture(name, impl):
    fixture = Fixture(name)
    for prefix, dtype in [("out64", torch.float64), ("out", torch.float32)]:
        inputs = _inputs(fixture, dtype)
        inputs.pop("grad_weight", None)
        out = gla(**inputs, return_states=True, impl=impl)
        fixture.check(f"{prefix}.y", out.y)
        fixture.check(f"{prefix}.final_state", out.final_state)
        if dtype == torch.float64:
            fixture.check("out64.states", out.states)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_gla_b3_l13"))
def test_fla_fixture_gradients(name, impl):
    fixture = Fixture(name)
    inputs = _inputs(fixture, torch.float64)
    weight = inputs.pop("grad_weight")
    leaves = {key: value.requires_grad_() for key, value in inputs.items()}
    y = gla(**leaves, impl=impl).y
    grads = torch.autograd.grad((y * weight).sum(), list(leaves.values()))
    for key, grad in zip(leaves, grads, strict=True):
        fixture.check(f"grad64.{'gk' if key == 'log_decay' else key}", grad)

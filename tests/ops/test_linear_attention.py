"""Linear attention: hand-worked, the reference, states, segments, causality, fixtures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.ops.dispatch import last_impl, use_impl
from hooked_ssm.ops.linear_attention import (
    linear_attention,
    linear_attention_pattern,
    normalised_linear_attention,
    normalised_linear_attention_pattern,
    taylor_features,
)
from tests.ops.checks import (
    assert_near,
    check_against_reference,
    check_causal,
    check_states_are_prefix_finals,
    randn,
)
from tests.parity import Fixture, fixture_names

QKV = ["q", "k", "v"]
IMPLS = ["reference", "cpu"]


def make(batch: int, length: int, heads: int, features: int, d_head: int, seed: int = 0) -> dict:
    return {
        "q": randn(batch, length, heads, features, seed=seed),
        "k": randn(batch, length, heads, features, seed=seed + 1),
        "v": randn(batch, length, heads, d_head, seed=seed + 2),
        "initial_state": randn(batch, heads, features, d_head, seed=seed + 3),
    }


def positive(inputs: dict) -> dict:
    return {
        name: value if name == "v" else value.abs() + 0.1
        for name, value in inputs.items()
        if name != "initial_state"
    }


@pytest.mark.parametrize("impl", IMPLS)
def test_by_hand(impl):
    q = torch.tensor([[1.0, 0], [0, 1], [1, 1]])[None, :, None]
    k = torch.tensor([[1.0, 2], [3, 4], [5, 6]])[None, :, None]
    v = torch.tensor([[1.0], [10], [100]])[None, :, None]
    out = linear_attention(q, k, v, return_states=True, impl=impl)
    assert out.states[0, :, 0, :, 0].tolist() == [[1, 2], [31, 42], [531, 642]]
    assert out.y.flatten().tolist() == [1, 42, 1173]
    assert out.final_state.flatten().tolist() == [531, 642]
    normalised = normalised_linear_attention(q, k, v, eps=0.0, impl=impl)
    assert normalised.normalizer.flatten().tolist() == [1, 6, 21]
    assert normalised.y.flatten().tolist() == pytest.approx([1, 7, 1173 / 21])


@pytest.mark.parametrize("wanted", [False, True, [0], [99], [64, 3, -1, 3], range(40)], ids=str)
def test_only_some_states(wanted):
    inputs = make(2, 100, 2, 3, 2)
    check_against_reference(linear_attention, inputs, return_states=wanted)


def test_states_are_finals_of_prefixes():
    inputs = make(1, 70, 2, 3, 2)
    check_states_are_prefix_finals(linear_attention, inputs, [0, 1, 63, 64, 69], along_pos=QKV)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("op", [linear_attention, normalised_linear_attention])
def test_causal(op, impl):
    inputs = positive(make(1, 70, 2, 3, 2))
    check_causal(op, inputs, along_pos=QKV, impl=impl)


@pytest.mark.parametrize("length", [1, 2, 70])
def test_pattern_reproduces_the_output(length):
    inputs = positive(make(2, length, 3, 4, 2))
    pattern = linear_attention_pattern(inputs["q"], inputs["k"])
    assert (pattern.triu(1) == 0).all()
    y = torch.einsum("bhqk,bkhd->bqhd", pattern, inputs["v"])
    assert_near("y", y, linear_attention(**inputs).y, 1e-12)
    pattern = normalised_linear_attention_pattern(inputs["q"], inputs["k"])
    assert_near("row sums", pattern.sum(-1), torch.ones_like(pattern[..., 0]), 1e-11)
    y = torch.einsum("bhqk,bkhd->bqhd", pattern, inputs["v"])
    assert_near("y", y, normalised_linear_attention(**inputs).y, 1e-12)


def test_low_precision_is_computed_in_float32():
    inputs = {name: value.bfloat16() for name, value in make(2, 20, 2, 3, 4).items()}
    out = linear_attention(**inputs, return_states=[3])
    exact = linear_attention(**{name: value.float() for name, value in inputs.items()})
    assert out.y.dtype == torch.bfloat16
    assert out.states.dtype == out.final_state.dtype == torch.float32
    assert torch.equal(out.y, exact.y.bfloat16())
    out = normalised_linear_attention(**positive(inputs))
    assert out.y.dtype == torch.bfloat16
    assert out.normalizer.dtype == torch.float32


def test_dispatch_says_what_ran_and_refuses_what_cannot(as_shipped):
    inputs = make(1, 3, 1, 2, 2)
    linear_attention(**inputs)
    assert last_impl() == ("linear_attention", "cpu")
    with use_impl("reference"):
        linear_attention(**inputs, impl="cpu")
    assert last_impl() == ("linear_attention", "reference")
    with pytest.raises(ConfigError):
        linear_attention(**inputs, impl="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": randn(2, 6, 2, 4, seed=0)}, "k has shape .* feature is 3 by q"),
        ({"v": randn(2, 5, 2, 4, seed=0)}, "v has shape .* pos is 6 by q"),
        ({"initial_state": randn(2, 2, 4, 3, seed=0)}, "initial_state has shape"),
        ({"return_states": [-7]}, "position -7"),
    ],
    ids=["k", "v", "initial_state", "position"],
)
def test_errors_name_the_argument(change, message, as_shipped):
    with pytest.raises(ShapeError, match=message):
        linear_attention(**{**make(2, 6, 2, 3, 4), **change})


@pytest.mark.parametrize("name", fixture_names("op_taylor_map"))
def test_taylor_features_fixture(name):
    fixture = Fixture(name)
    x = fixture.tensors["in.x"]
    fixture.check("out64.phi", taylor_features(x.double()))
    fixture.check("out.phi", taylor_features(x.float()))


def test_taylor_features_multiply_to_the_expansion():
    q, k = randn(5, 6, seed=0), randn(5, 6, seed=1)
    s = (q * k).sum(-1) / 6**0.5
    assert_near(
        "weight", (taylor_features(q) * taylor_features(k)).sum(-1), 1 + s + s**2 / 2, 1e-12
    )


def _heads_second(fixture: Fixture, dtype: torch.dtype) -> dict:
    """These fixtures are [batch, head, pos, feature]."""
    return {name: x.transpose(1, 2) for name, x in fixture.group("in.", dtype).items()}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_linear_attention_taylor"))
def test_based_fixture(name, impl):
    fixture = Fixture(name)
    for prefix, dtype in [("out64", torch.float64), ("out", torch.float32)]:
        inputs = _heads_second(fixture, dtype)
        q, k = taylor_features(inputs["q"]), taylor_features(inputs["k"])
        out = normalised_linear_attention(
            q, k, inputs["v"], eps=fixture.config["eps"], return_states=True, impl=impl
        )
        fixture.check(f"{prefix}.y", out.y.transpose(1, 2))
        if dtype == torch.float64:
            states = out.states.transpose(1, 2)
            fixture.check("mid64.kv_state", states[..., :-1])
            fixture.check("mid64.k_state", states[..., -1])
            fixture.check("mid64.unnormalised_pattern", linear_attention_pattern(q, k))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_fla_based"))
def test_fla_based_fixture(name, impl):
    fixture = Fixture(name)
    for prefix, dtype in [("out64", torch.float64), ("out", torch.float32)]:
        inputs = _heads_second(fixture, dtype)
        q, k = taylor_features(inputs["q"]), taylor_features(inputs["k"])
        out = normalised_linear_attention(q, k, inputs["v"], eps=fixture.config["eps"], impl=impl)
        fixture.check(f"{prefix}.y", out.y.transpose(1, 2))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_linear_attention_b"))
def test_fla_linear_attention_fixture(name, impl):
    """fla scales the query by d_key^-0.5."""
    fixture = Fixture(name)
    for prefix, dtype in [("out64", torch.float64), ("out", torch.float32)]:
        inputs = fixture.group("in.", dtype)
        q = inputs["q"] * fixture.config["key_dim"] ** -0.5
        args = (q, inputs["k"], inputs["v"])
        if fixture.config["normalize"]:
            out = normalised_linear_attention(*args, eps=1e-10, return_states=True, impl=impl)
            states = out.states[..., :-1]
        else:
            out = linear_attention(*args, return_states=True, impl=impl)
            states = out.states
        fixture.check(f"{prefix}.y", out.y)
        if dtype == torch.float64:
            fixture.check("out64.states", states)


def test_normalised_agrees_with_softmax_where_the_expansion_does():
    """Small scores: 1 + s + s^2/2 is the exponential to third order."""
    q, k = 0.05 * randn(1, 9, 1, 4, seed=0), 0.05 * randn(1, 9, 1, 4, seed=1)
    v = randn(1, 9, 1, 3, seed=2)
    got = normalised_linear_attention(taylor_features(q), taylor_features(k), v).y
    want = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    assert_near("y", got, want.transpose(1, 2), 1e-6)

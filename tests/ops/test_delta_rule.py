"""The delta rule: hand-worked, the reference, its domain, special cases, segments, fixtures."""

from __future__ import annotations

import math

import pytest
import torch

from hooked_ssm.errors import DivergedError, ShapeError
from hooked_ssm.ops.delta_rule import (
    delta_rule,
    delta_rule_from_writes,
    delta_rule_given_error,
    delta_rule_pattern,
    l2_normalise,
    prediction_error,
)
from hooked_ssm.ops.dispatch import last_impl
from hooked_ssm.ops.linear_attention import linear_attention
from tests.ops.checks import (
    assert_near,
    check_against_reference,
    check_causal,
    check_states_are_prefix_finals,
    outputs_and_grads,
    randn,
)
from tests.parity import Fixture, fixture_names

ALONG_POS = ["q", "k", "v", "beta", "log_decay"]
IMPLS = ["reference", "cpu"]
SIZES = [(3, 2, 5, 3), (1, 3, 1, 4), (1, 2, 4, 1)]
"""Batch, heads, d_key, d_head."""


def make(batch: int, length: int, heads: int, d_key: int, d_head: int) -> dict:
    """Unit keys, beta in (0, 2), some strong and some weak decays."""
    return {
        "q": randn(batch, length, heads, d_key, seed=0),
        "k": l2_normalise(randn(batch, length, heads, d_key, seed=1)),
        "v": randn(batch, length, heads, d_head, seed=2),
        "beta": 2 * randn(batch, length, heads, seed=3).sigmoid(),
        "log_decay": -randn(batch, length, heads, seed=4).exp() / 4,
        "initial_state": randn(batch, heads, d_key, d_head, seed=5),
    }


def without(inputs: dict, *names: str, **more: torch.Tensor) -> dict:
    return {**{name: x for name, x in inputs.items() if name not in names}, **more}


def per_value_channel(inputs: dict) -> dict:
    return {**inputs, "beta": 2 * randn(*inputs["v"].shape, seed=6).sigmoid()}


@pytest.mark.parametrize("impl", IMPLS)
def test_by_hand(impl):
    inputs = {
        "q": torch.ones(1, 3, 1, 2),
        "k": torch.tensor([[1.0, 0], [1, 0], [0, 1]])[None, :, None],
        "v": torch.tensor([2.0, 4, 6])[None, :, None, None],
        "beta": torch.tensor([1.0, 0.5, 1])[None, :, None],
    }
    out = delta_rule(**inputs, scale=1.0, return_states=True, impl=impl)
    assert out.states[0, :, 0, :, 0].tolist() == [[2, 0], [3, 0], [3, 6]]
    assert out.y.flatten().tolist() == [2, 3, 9]
    assert out.final_state.flatten().tolist() == [3, 6]
    error = prediction_error(**without(inputs, "q"), impl=impl)
    assert error.flatten().tolist() == [2, 2, 6]
    halving = torch.full((1, 3, 1), math.log(0.5))
    out = delta_rule(**inputs, log_decay=halving, scale=1.0, return_states=True, impl=impl)
    assert out.states[0, :, 0, :, 0].tolist() == [[2, 0], [2.5, 0], [1.25, 6]]
    assert out.y.flatten().tolist() == [2, 2.5, 7.25]


@pytest.mark.parametrize("length", [1, 2, 17, 100])
def test_beta_per_value_channel(length):
    inputs = per_value_channel(make(2, length, 2, 4, 3))
    check_against_reference(delta_rule, inputs, return_states=True)
    check_against_reference(delta_rule, without(inputs, "log_decay", "initial_state"))
    shared = {**inputs, "beta": inputs["beta"][..., :1].expand_as(inputs["v"])}
    one = {**inputs, "beta": inputs["beta"][..., 0]}
    assert_near("y", delta_rule(**shared).y, delta_rule(**one).y, 1e-11)


@pytest.mark.parametrize("wanted", [False, True, [0], [99], [64, 3, -1, 3], range(40)], ids=str)
def test_only_some_states(wanted):
    check_against_reference(delta_rule, make(2, 100, 2, 3, 2), return_states=wanted)


def test_states_are_prefix_finals():
    inputs = make(2, 70, 2, 3, 4)
    check_states_are_prefix_finals(delta_rule, inputs, [0, 1, 34, 35, 69], along_pos=ALONG_POS)


def test_causal():
    check_causal(delta_rule, make(2, 20, 2, 3, 4), along_pos=ALONG_POS)


def test_the_halves_with_a_beta_per_value_channel():
    inputs = per_value_channel(make(2, 70, 2, 4, 3))
    check_against_reference(prediction_error, without(inputs, "q"))
    with_error = without(inputs, "v", error=randn(2, 70, 2, 3, seed=7))
    check_against_reference(delta_rule_given_error, with_error, return_states=[0, -1])
    with_write = without(inputs, "q", "v", write=randn(2, 70, 2, 4, 3, seed=8))
    check_against_reference(delta_rule_from_writes, with_write)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_states_by_errors_and_by_writes(impl):
    inputs = make(2, 70, 2, 4, 3)
    want = delta_rule(**inputs, return_states=True, impl=impl)
    error = prediction_error(**without(inputs, "q"), impl=impl)
    got = delta_rule_given_error(**without(inputs, "v", error=error), return_states=True, impl=impl)
    assert_near("states given errors", got.states, want.states, 1e-11)
    assert_near("y given errors", got.y, want.y, 1e-11)
    value = inputs["beta"][..., None] * inputs["v"]
    write = inputs["k"].unsqueeze(-1) * value.unsqueeze(-2)
    states = delta_rule_from_writes(**without(inputs, "q", "v", write=write), impl=impl)
    assert_near("states from writes", states, want.states, 1e-11)


def test_an_edited_error_is_an_edited_value_once_later_errors_respond():
    inputs = make(1, 40, 1, 4, 3)
    change = torch.zeros_like(inputs["v"])
    change[:, 10] = 1.0
    before = prediction_error(**without(inputs, "q"))
    after = prediction_error(**without(inputs, "q", "v", v=inputs["v"] + change))
    assert_near("error at 10", after[:, 10], before[:, 10] + 1.0, 1e-11)
    assert not torch.allclose(after[:, 11:], before[:, 11:])


@pytest.mark.parametrize("length", [1, 2, 17, 64, 100])
@pytest.mark.parametrize("gated", [False, True])
def test_pattern_times_values_is_output(length, gated):
    inputs = without(make(2, length, 2, 4, 3), "initial_state", *([] if gated else ["log_decay"]))
    pattern = delta_rule_pattern(**without(inputs, "v"), scale=0.7)
    assert pattern.triu(1).count_nonzero() == 0
    got = torch.einsum("bhqk,bkhd->bqhd", pattern, inputs["v"])
    want = delta_rule(**inputs, scale=0.7, impl="reference").y
    torch.testing.assert_close(got, want, atol=1e-8, rtol=0)
    assert (pattern < 0).any() or length == 1


def test_pattern_gradients():
    inputs = without(make(1, 20, 2, 4, 3), "initial_state")

    def by_pattern(v, impl, **rest):
        if impl == "reference":
            return delta_rule(v=v, impl=impl, **rest).y
        return torch.einsum("bhqk,bkhd->bqhd", delta_rule_pattern(**rest), v)

    check_against_reference(by_pattern, inputs)


@pytest.mark.parametrize("impl", IMPLS)
def test_second_value_replaces_the_first(impl):
    key = l2_normalise(randn(1, 1, 1, 8, seed=0).float(), eps=0.0).expand(1, 2, 1, 8)
    v = randn(1, 2, 1, 4, seed=1).float()
    final = delta_rule(key, key, v, torch.ones(1, 2, 1), impl=impl).final_state
    torch.testing.assert_close(key[:, 0] @ final[:, 0], v[:, 1], atol=1e-5, rtol=0)
    torch.testing.assert_close(final, key[0, 0, 0, :, None] * v[:, 1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("d_key", [4, 64])
@pytest.mark.parametrize("logit", [-20.0, 0.0, 20.0])
@pytest.mark.parametrize("repeated", [False, True])
def test_stays_exact_in_float32_over_512_tokens(d_key, logit, repeated):
    raw = randn(1, 512, 1, d_key, seed=1)
    raw = raw[:, :1].repeat(1, 512, 1, 1) if repeated else raw
    raw[:, 100] = 0.0
    inputs = {
        "q": randn(1, 512, 1, d_key, seed=0),
        "k": l2_normalise(raw),
        "v": randn(1, 512, 1, 4, seed=2),
        "beta": (logit + randn(1, 512, 1, seed=3)).sigmoid(),
    }
    norms = inputs["k"].norm(dim=-1).flatten().tolist()
    assert norms.pop(100) == 0.0
    assert norms == pytest.approx([1.0] * 511, abs=1e-3)
    want = delta_rule(**inputs, return_states=True, impl="reference")
    got = delta_rule(**{n: x.float() for n, x in inputs.items()}, return_states=True, impl="cpu")
    for name in ("y", "states"):
        value = getattr(got, name)
        assert value.isfinite().all()
        torch.testing.assert_close(value.double(), getattr(want, name), atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [7, 50, 300])
def test_gate_one_is_the_plain_rule(length):
    plain = {n: x.float() for n, x in without(make(2, length, 2, 8, 4), "log_decay").items()}
    want = delta_rule(**plain, return_states=True)
    got = delta_rule(**plain, log_decay=torch.zeros(2, length, 2), return_states=True)
    assert torch.equal(got.y, want.y)
    assert torch.equal(got.states, want.states)


@pytest.mark.parametrize("length", [7, 100])
def test_without_erasing_it_is_linear_attention(length):
    """Orthogonal keys erase nothing; given errors erase nothing at all."""
    inputs = without(make(2, length, 2, 8, 4), "log_decay")
    beta = torch.ones_like(inputs["beta"])
    got = delta_rule_given_error(**without(inputs, "v", "beta"), beta=beta, error=inputs["v"])
    want = linear_attention(
        inputs["q"] * 8**-0.5, inputs["k"], inputs["v"], initial_state=inputs["initial_state"]
    )
    assert_near("y", got.y, want.y, 1e-11)
    keys = torch.eye(length, dtype=torch.float64)[None, :, None]
    q, v = randn(1, length, 1, length, seed=1), randn(1, length, 1, 3, seed=2)
    got = delta_rule(q, keys, v, torch.ones(1, length, 1), scale=1.0)
    assert_near("y", got.y, linear_attention(q, keys, v).y, 1e-11)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("decay", [-1e4, -math.inf])
def test_huge_decay_forgets_and_costs_no_digits(impl, decay):
    inputs = without(make(1, 100, 2, 4, 3), "initial_state")
    inputs["log_decay"][:, 40] = decay
    floats = {name: x.float() for name, x in inputs.items()}
    outputs, grads = outputs_and_grads(delta_rule, floats, impl=impl, return_states=True)
    assert all(value.isfinite().all() for value in (*outputs.values(), *grads.values()))
    rest = {name: x[:, 40:] for name, x in inputs.items()}
    assert_near("y", outputs["y"][:, 40:], delta_rule(**rest, impl="reference").y, 2e-5)
    assert delta_rule_pattern(**without(floats, "v")).isfinite().all()


def test_dtypes():
    halves = {name: x.bfloat16() for name, x in make(2, 20, 2, 4, 3).items()}
    out = delta_rule(**halves, return_states=True)
    assert (out.y.dtype, out.states.dtype) == (torch.bfloat16, torch.float32)
    assert l2_normalise(halves["q"]).dtype == torch.float32
    assert prediction_error(**without(halves, "q")).dtype == torch.float32
    assert delta_rule_pattern(**without(halves, "v", "initial_state")).dtype == torch.float32


def test_out_of_domain_fails_loudly():
    inputs = {name: x.float() for name, x in make(1, 200, 1, 4, 3).items()}
    inputs["k"] = 10 * inputs["k"]
    with pytest.raises(DivergedError, match=r"not finite.*largest key norm of 10.*l2_normalise"):
        delta_rule(**inputs)
    with pytest.raises(DivergedError, match="prediction_error: the result is not finite"):
        prediction_error(**without(inputs, "q"))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (2, 5, 2, 3), "q has shape .*d_key is 4"),
        ("v", (2, 6, 2, 3), "v has shape .*pos is 5"),
        ("beta", (2, 5), "beta has 2 axes"),
        ("beta", (2, 5, 2, 2), "beta has shape .*d_head is 3"),
        ("log_decay", (2, 5, 2, 4), "log_decay has 4 axes"),
        ("initial_state", (2, 2, 3, 4), "initial_state has shape"),
    ],
)
def test_wrong_shapes_are_named(as_shipped, name, shape, message):
    inputs = {**make(2, 5, 2, 4, 3), name: torch.zeros(shape, dtype=torch.float64)}
    with pytest.raises(ShapeError, match=message):
        delta_rule(**inputs)


def test_wanted_position_outside_raises():
    with pytest.raises(ShapeError, match="position 5"):
        delta_rule(**make(1, 5, 1, 2, 2), return_states=[5])


def test_dispatch():
    inputs = make(1, 5, 1, 2, 2)
    delta_rule(**inputs)
    assert last_impl() == ("delta_rule", "cpu")


def fixture_inputs(fixture: Fixture, dtype: torch.dtype) -> dict:
    inputs = fixture.group("in.", dtype)
    inputs.pop("grad_weight", None)
    if "g" in inputs:
        inputs["log_decay"] = inputs.pop("g")
    return inputs


def run_fixture(fixture: Fixture, q, k, impl: str, **rest):
    if fixture.config["use_qk_l2norm_in_kernel"]:
        q, k = l2_normalise(q), l2_normalise(k)
    return delta_rule(q, k, scale=fixture.config["scale"], impl=impl, **rest)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", fixture_names("op_delta_rule") + fixture_names("op_gated_delta"))
def test_fixture(name, impl):
    fixture = Fixture(name)
    inputs = fixture_inputs(fixture, torch.float64)
    leaves = {key: value.requires_grad_() for key, value in inputs.items()}
    out = run_fixture(fixture, **leaves, impl=impl, return_states=True)
    for key in ("y", "final_state", "states"):
        fixture.check(f"out64.{key}", getattr(out, key))
    if "in.grad_weight" in fixture.tensors:
        (out.y * fixture.tensors["in.grad_weight"]).sum().backward()
        for key, leaf in leaves.items():
            fixture.check(f"grad64.{'g' if key == 'log_decay' else key}", leaf.grad)
    single = run_fixture(fixture, **fixture_inputs(fixture, torch.float32), impl=impl)
    fixture.check("out.y", single.y)
    fixture.check("out.final_state", single.final_state)

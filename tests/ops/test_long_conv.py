"""Long convolution: the hand-worked case, the reference, history, causality, fixtures."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.errors import KernelUnavailableError, ShapeError
from hooked_ssm.ops import last_impl, use_impl
from hooked_ssm.ops.long_conv import long_conv, toeplitz
from hooked_ssm.ops.output import gather_states
from tests.ops.checks import (
    LENGTHS,
    assert_near,
    check_against_reference,
    check_causal,
    randn,
)
from tests.parity import Fixture, fixture_names


def make(batch: int, length: int, channels: int, taps: int, earlier: int = 0) -> dict:
    inputs = {
        "u": randn(batch, length, channels, seed=0),
        "filter": randn(channels, taps, seed=1),
        "skip": randn(channels, seed=2),
    }
    if earlier:
        inputs["history"] = randn(batch, earlier, channels, seed=3)
    return inputs


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_by_hand(impl):
    u = torch.tensor([[[1.0], [2.0], [3.0]]])
    filter = torch.tensor([[1.0, 10.0, 100.0]])
    y = long_conv(u, filter, skip=torch.tensor([1000.0]), impl=impl)
    assert y.flatten().tolist() == [1001, 2012, 3123]
    history = torch.tensor([[[4.0], [5.0]]])
    y = long_conv(u, filter, history=history, impl=impl)
    assert y.flatten().tolist() == [451, 512, 123]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("length", [*LENGTHS, 8, 9])
@pytest.mark.parametrize("taps", ["same", 3, 300])
def test_equals_reference(taps, length, dtype):
    taps = length if taps == "same" else taps
    check_against_reference(long_conv, make(3 if length < 64 else 1, length, 5, taps), dtype=dtype)


@pytest.mark.parametrize("taps", [1, 5, 40, 64])
@pytest.mark.parametrize(("length", "earlier"), [(1, 1), (1, 39), (8, 20), (9, 3), (30, 34)])
def test_history_equals_reference(length, earlier, taps):
    check_against_reference(long_conv, make(2, length, 3, taps, earlier))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("cut", [1, 8, 20, 39])
def test_resuming_with_history_equals_one_pass(cut, impl):
    inputs = make(2, 40, 3, 40)
    u = inputs.pop("u")
    want = long_conv(u, **inputs, impl=impl)
    first = long_conv(u[:, :cut], **inputs, impl=impl)
    second = long_conv(u[:, cut:], **inputs, history=u[:, :cut], impl=impl)
    assert_near("y", torch.cat([first, second], dim=1), want, 1e-12)


def test_empty_history_is_no_history():
    inputs = make(2, 12, 3, 12)
    y = long_conv(**inputs, history=torch.zeros(2, 0, 3, dtype=torch.float64))
    assert torch.equal(y, long_conv(**inputs))


@pytest.mark.parametrize(
    ("impl", "length", "leak"), [("reference", 20, 0.0), ("cpu", 8, 0.0), ("cpu", 20, 1e-14)]
)
def test_causal(impl, length, leak):
    check_causal(long_conv, make(2, length, 3, 30), along_pos=["u"], leak=leak, impl=impl)


@pytest.mark.parametrize("taps", [1, 4, 12, 30])
@pytest.mark.parametrize("length", [1, 2, 12])
def test_toeplitz_reproduces_the_convolution(length, taps):
    u, filter = randn(2, length, 3, seed=0), randn(3, taps, seed=1)
    pattern = toeplitz(filter, length)
    assert pattern.shape == (3, length, length)
    assert (pattern.triu(1) == 0).all()
    assert_near("y", torch.einsum("cqk,bkc->bqc", pattern, u), long_conv(u, filter), 1e-12)


def test_toeplitz_by_hand_and_its_gradient():
    filter = torch.tensor([[1.0, 10.0, 100.0]], requires_grad=True)
    pattern = toeplitz(filter, 3)
    assert pattern.tolist() == [[[1, 0, 0], [10, 1, 0], [100, 10, 1]]]
    pattern.sum().backward()
    assert filter.grad.tolist() == [[3, 2, 1]]


def test_low_precision_is_computed_in_float32():
    inputs = {name: value.bfloat16() for name, value in make(2, 20, 3, 20).items()}
    y = long_conv(**inputs)
    exact = long_conv(**{name: value.float() for name, value in inputs.items()})
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"filter": randn(4, 5, seed=0)}, "filter has shape .4, 5. .* channel is 3 by u"),
        ({"filter": randn(3, 0, seed=0)}, "no taps"),
        ({"skip": randn(2, seed=0)}, "skip has shape"),
        ({"history": randn(1, 4, 3, seed=0)}, "history has shape .* batch is 2 by u"),
    ],
    ids=["channels", "no taps", "skip", "history"],
)
def test_errors_name_the_argument(change, message, as_shipped):
    with pytest.raises(ShapeError, match=message):
        long_conv(**{**make(2, 6, 3, 4), **change})


def test_toeplitz_refuses_length_zero():
    with pytest.raises(ShapeError, match="length is 0"):
        toeplitz(torch.zeros(1, 3), 0)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("name", fixture_names("op_explicit_long_conv"))
def test_explicit_filter_fixture(name, impl):
    """The reference adds its input once; where it wraps around, only the causal result counts."""
    fixture = Fixture(name)
    x, filter = fixture.tensors["in.x"].double(), fixture.tensors["state.filter"].double()
    causal = "out64.y_causal" if name.endswith("quirk") else "out64.y"
    fixture.check(causal, long_conv(x, filter, skip=torch.ones_like(filter[:, 0]), impl=impl))
    if not name.endswith("quirk"):
        y = long_conv(x.float(), filter.float(), skip=torch.ones(x.shape[2]), impl=impl)
        fixture.check("out.y", y)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("name", fixture_names("op_implicit_long_conv"))
def test_implicit_filter_fixture(name, impl):
    fixture = Fixture(name)
    for prefix, dtype in [("out64", torch.float64), ("out", torch.float32)]:
        filter, x = fixture.tensors[f"{prefix}.filter"], fixture.group("in.", dtype)["x"]
        y = long_conv(x, filter, skip=torch.ones_like(filter[:, 0]), impl=impl)
        fixture.check(f"{prefix}.y", y)


def test_there_is_no_kernel_asked_for_it_raises_forced_it_says_what_ran():
    u, taps = torch.ones(1, 4, 2), torch.ones(2, 4)
    with pytest.raises(KernelUnavailableError, match="no Triton kernel"):
        long_conv(u, taps, impl="triton")
    with use_impl("triton"):
        long_conv(u, taps)
    assert last_impl() == ("long_conv", "cpu")


def test_no_position_wanted_gives_no_state():
    states = gather_states([torch.ones(2, 3), torch.ones(2, 3)], [])
    assert states is not None and states.shape == (2, 0, 3)

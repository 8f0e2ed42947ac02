"""Short convolution: the hand-worked case, the reference, segments, causality, fixtures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.long_conv import toeplitz
from hooked_ssm.ops.short_conv import short_conv
from tests.ops.checks import (
    LENGTHS,
    assert_near,
    check_against_reference,
    check_causal,
    randn,
)
from tests.parity import Fixture, fixture_names


def make(batch: int, length: int, channels: int, width: int, seed: int = 0) -> dict:
    return {
        "x": randn(batch, length, channels, seed=seed),
        "weight": randn(channels, width, seed=seed + 1),
        "bias": randn(channels, seed=seed + 2),
        "initial_window": randn(batch, channels, width - 1, seed=seed + 3),
    }


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_by_hand(impl):
    x = torch.tensor([[[1.0], [2.0], [3.0]]])
    weight = torch.tensor([[100.0, 10.0, 1.0]])
    out = short_conv(x, weight, torch.tensor([0.5]), return_windows=True, impl=impl)
    assert out.y.flatten().tolist() == [1.5, 12.5, 123.5]
    assert out.windows[0, :, 0].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert out.final_window[0, 0].tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
def test_equals_reference(width, length, dtype):
    inputs = make(3 if length < 64 else 1, length, 5, width)
    check_against_reference(short_conv, inputs, dtype=dtype, return_windows=True)


@pytest.mark.parametrize("wanted", [False, [0], [2, 0, -1, 2]], ids=str)
def test_only_some_windows(wanted):
    inputs = make(2, 6, 3, 4)
    check_against_reference(short_conv, inputs, return_windows=wanted)
    got = short_conv(**inputs, return_windows=wanted).windows
    every = short_conv(**inputs, return_windows=True).windows
    if wanted is False:
        assert got is None
    else:
        assert torch.equal(got, every[:, wanted])


@pytest.mark.parametrize("without", ["bias", "initial_window"])
def test_optional_arguments_default_to_zero(without):
    inputs = make(2, 9, 3, 4)
    zeroed = {**inputs, without: torch.zeros_like(inputs[without])}
    del inputs[without]
    check_against_reference(short_conv, inputs, return_windows=True)
    assert torch.equal(short_conv(**inputs).y, short_conv(**zeroed).y)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_causal(impl):
    check_causal(short_conv, make(2, 9, 3, 4), along_pos=["x"], impl=impl)


def test_equals_torch_conv1d():
    inputs = make(2, 11, 6, 3)
    seen = torch.cat([inputs["initial_window"], inputs["x"].transpose(1, 2)], dim=-1)
    want = F.conv1d(seen, inputs["weight"][:, None], inputs["bias"], groups=6).transpose(1, 2)
    assert_near("y", short_conv(**inputs).y, want, 1e-12)


@pytest.mark.parametrize("length", [1, 3, 12])
def test_toeplitz_pattern_reproduces_it(length):
    x, weight = randn(2, length, 3, seed=0), randn(3, 4, seed=1)
    pattern = toeplitz(weight.flip(-1), length)
    assert_near("y", torch.einsum("cqk,bkc->bqc", pattern, x), short_conv(x, weight).y, 1e-12)


def test_low_precision_is_computed_in_float32():
    inputs = {name: value.bfloat16() for name, value in make(2, 9, 3, 4).items()}
    out = short_conv(**inputs, return_windows=True)
    exact = short_conv(**{name: value.float() for name, value in inputs.items()})
    assert out.y.dtype == torch.bfloat16
    assert out.final_window.dtype == out.windows.dtype == torch.float32
    assert torch.equal(out.y, exact.y.bfloat16())


def test_final_window_does_not_keep_the_sequence_alive():
    out = short_conv(torch.zeros(1, 1000, 2), torch.zeros(2, 4))
    assert out.final_window.untyped_storage().nbytes() == 4 * out.final_window.numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": randn(4, 4, seed=0)}, "weight has shape .4, 4. .* channel is 3 by x"),
        ({"weight": randn(3, 0, seed=0)}, "no taps"),
        ({"bias": randn(3, 1, seed=0)}, "bias has 2 axes"),
        ({"initial_window": randn(2, 3, 4, seed=0)}, "4 columns, wanted width-1 = 3"),
        ({"x": randn(2, 0, 3, seed=0)}, "no positions"),
        ({"x": torch.zeros(2, 6, 3, dtype=torch.long)}, "dtype torch.int64"),
        ({"return_windows": [6]}, "position 6"),
    ],
    ids=["channels", "no taps", "bias axes", "window", "empty", "integers", "position"],
)
def test_errors_name_the_argument(change, message, as_shipped):
    with pytest.raises(ShapeError, match=message):
        short_conv(**{**make(2, 6, 3, 4), **change})


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("name", fixture_names("op_short_conv"))
def test_zoology_fixture(name, impl):
    fixture = Fixture(name)
    for prefix, dtype in [("out64", torch.float64), ("out", torch.float32)]:
        state, x = fixture.group("state.", dtype), fixture.group("in.", dtype)["x"]
        weight = state["conv.weight"].squeeze(1)
        fixture.check(f"{prefix}.y", short_conv(x, weight, state["conv.bias"], impl=impl).y)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("name", fixture_names("op_fla_short_conv"))
def test_fla_fixture(name, impl):
    fixture = Fixture(name)
    for prefix, dtype in [("out64", torch.float64), ("out", torch.float32)]:
        state, inputs = fixture.group("state.", dtype), fixture.group("in.", dtype)
        cache = inputs.get("cache")
        window = None if cache is None else cache[..., 1:]
        out = short_conv(
            inputs["x"],
            state["weight"].squeeze(1),
            state.get("bias"),
            initial_window=window,
            impl=impl,
        )
        y = F.silu(out.y) if fixture.config.get("activation") == "silu" else out.y
        fixture.check(f"{prefix}.y", y)
        want = fixture.tensors[f"{prefix}.cache"][..., 1:]
        assert_near("cache", out.final_window, want, 1e-12 if dtype == torch.float64 else 1e-7)

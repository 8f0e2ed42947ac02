"""The short convolution's kernels in Triton's interpreter (on a GPU where there is one)."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.ops.dispatch import last_impl
from hooked_ssm.ops.short_conv import short_conv
from tests.ops.checks import (
    assert_near,
    check_against_reference,
    outputs_and_grads,
)
from tests.ops.test_short_conv import make
from tests.ops.triton.devices import on_device

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("batch", "length", "channels", "width", "windows"),
    [
        (1, 20, 70, 4, False),  # two blocks of positions and of channels
        (1, 6, 2, 34, [-1, 2]),  # a window longer than a block
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_several_tiles_and_no_window(batch, length, channels, width, windows, dtype):
    inputs = on_device(make(batch, length, channels, width))
    options = {"dtype": dtype, "return_windows": windows}
    check_against_reference(short_conv, inputs, impl="triton", **options)
    assert last_impl() == ("short_conv", "triton")
    for name in ("bias", "initial_window"):
        del inputs[name]
    check_against_reference(short_conv, inputs, impl="triton", **options)


def test_any_layout_gives_the_same_bits():
    inputs = on_device(make(2, 40, 3, 4))
    want, want_grads = outputs_and_grads(short_conv, inputs, impl="triton", return_windows=True)
    strided = {n: v.transpose(0, -1).contiguous().transpose(0, -1) for n, v in inputs.items()}
    got, grads = outputs_and_grads(short_conv, strided, impl="triton", return_windows=True)
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert all(torch.equal(grads[n], want_grads[n]) for n in want_grads)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [63, 257, 2049])
def test_on_a_gpu_at_real_sizes(length):
    inputs = on_device(make(3, length, 130, 4))
    check_against_reference(
        short_conv, inputs, impl="triton", dtype=torch.float32, return_windows=True
    )
    again = [outputs_and_grads(short_conv, inputs, impl="triton")[1] for _ in range(2)]
    for name in inputs:
        assert_near(f"gradient of {name}, run twice", again[0][name], again[1][name], 0.0)

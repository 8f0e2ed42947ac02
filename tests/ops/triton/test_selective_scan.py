"""The selective scan's kernels in Triton's interpreter (on a GPU where there is one)."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.ops.dispatch import last_impl
from hooked_ssm.ops.selective_scan import selective_scan
from tests.ops.checks import (
    assert_near,
    check_against_reference,
    outputs_and_grads,
)
from tests.ops.test_selective_scan import make
from tests.ops.triton.devices import on_device

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("batch", "length", "d_inner", "d_state", "groups", "states"),
    [
        (1, 5, 20, 16, 1, [4, 3]),  # two blocks of channels, the second one not full
        (1, 33, 2, 300, 1, False),  # two chunks; a row of states that is longer than a tile
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_states_of_several_tiles(batch, length, d_inner, d_state, groups, states, dtype):
    inputs = on_device(make(batch, length, d_inner, d_state, groups))
    options = {"dtype": dtype, "return_states": states}
    check_against_reference(selective_scan, inputs, impl="triton", **options)
    assert last_impl() == ("selective_scan", "triton")


@pytest.fixture
def inputs():
    """float32 inputs of a few channels and two chunks."""
    return on_device({n: v.float() for n, v in make(2, 34, 3, 4).items()})


def test_gradients_that_do_not_come_in_are_zeros(inputs):
    """Only a state is used, of a run from zero; a list without positions asks for no states."""
    del inputs["initial_state"]
    leaves = {n: v.clone().requires_grad_() for n, v in inputs.items()}
    grads = {
        impl: torch.autograd.grad(
            selective_scan(**leaves, return_states=[20], impl=impl).states.square().sum(),
            [leaves[n] for n in ("x", "dt", "A", "B")],
        )
        for impl in ("reference", "triton")
    }
    for got, want in zip(grads["triton"], grads["reference"], strict=True):
        assert_near("gradient", got, want, 2e-5)
    assert selective_scan(**inputs, return_states=[], impl="triton").states.shape == (2, 0, 3, 4)


def test_any_layout_and_run_give_the_same_bits(inputs):
    """Strides do not matter, and nothing is summed in an order that varies."""
    want, want_grads = outputs_and_grads(selective_scan, inputs, impl="triton", return_states=[3])
    strided = {n: v.transpose(0, -1).contiguous().transpose(0, -1) for n, v in inputs.items()}
    got, grads = outputs_and_grads(selective_scan, strided, impl="triton", return_states=[3])
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert all(torch.equal(grads[n], want_grads[n]) for n in want_grads)


def test_huge_decays_are_exact():
    """A channel that forgets everything: no NaN, and the gradients still agree."""
    inputs = on_device(make(1, 17, 3, 4))
    inputs["A"][1] = -1e6
    check_against_reference(
        selective_scan, inputs, impl="triton", dtype=torch.float32, return_states=True
    )


@pytest.mark.gpu
@pytest.mark.parametrize("length", [63, 100, 257, 2049])
def test_on_a_gpu_at_real_sizes(length):
    inputs = on_device(make(3, length, 70, 16, 2))
    check_against_reference(
        selective_scan, inputs, impl="triton", dtype=torch.float32, return_states=[length // 2]
    )


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """States of every position, more numbers than an int32 counts."""
    length, channels, n = 2**15, 2**11, 2**6
    x = torch.ones(1, length, channels, device="cuda")
    A = torch.full((channels, n), -1.0, device="cuda")
    B = torch.ones(1, length, n, device="cuda")
    out = selective_scan(x, x, A, B, B, return_states=True, impl="triton")
    assert out.states.numel() > 2**31
    assert torch.equal(out.states[0, -1], out.final_state[0])

"""The diagonal SSM's kernels in Triton's interpreter (on a GPU where there is one)."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.ops.dispatch import last_impl
from tests.ops.checks import check_against_reference, outputs_and_grads
from tests.ops.test_diagonal_ssm import in_reals, make
from tests.ops.triton.devices import on_device

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("inputs", "states"),
    [
        (make(1, 34, 1, 4, 2, 3), [33, 5]),
        (make(1, 3, 1, 16, 5, 5), False),  # two blocks of inner positions, the second not full
    ],
    ids=["chunks", "blocks"],
)
def test_states_of_several_tiles(inputs, states, dtype):
    options = {"dtype": dtype, "return_states": states}
    check_against_reference(in_reals, on_device(inputs), impl="triton", **options)
    assert last_impl() == ("diagonal_ssm", "triton")


def test_any_layout_gives_the_same_bits():
    inputs = on_device(make(2, 9, 1, 3, 2))
    strided = {n: v.transpose(0, 1).contiguous().transpose(0, 1) for n, v in inputs.items()}
    assert not strided["u"].is_contiguous()
    want, want_grads = outputs_and_grads(in_reals, inputs, impl="triton")
    got, grads = outputs_and_grads(in_reals, strided, impl="triton")
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert all(torch.equal(grads[n], want_grads[n]) for n in want_grads)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [63, 257, 1025])
def test_on_a_gpu_at_real_sizes(length):
    inputs = on_device(make(3, length, 3, 32, 16, 16))
    check_against_reference(
        in_reals, inputs, impl="triton", dtype=torch.float32, return_states=[length // 2]
    )

"""The kernels over matrix states, through every op that runs on them, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.ops.delta_rule import (
    delta_rule,
)
from hooked_ssm.ops.dispatch import last_impl
from hooked_ssm.ops.gla import gla
from hooked_ssm.ops.linear_attention import linear_attention
from hooked_ssm.ops.ssd import ssd
from tests.ops import test_delta_rule, test_gla, test_linear_attention, test_ssd
from tests.ops.checks import (
    check_against_reference,
    outputs_and_grads,
)
from tests.ops.triton.devices import on_device

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("op", "inputs", "states"),
    [
        (linear_attention, test_linear_attention.make(1, 3, 1, 130, 20), True),
        (ssd, test_ssd.make(1, 3, 2, 1, 20, 130), [1]),
        (gla, test_gla.make(1, 3, 1, 130, 20), False),
        (delta_rule, test_delta_rule.make(1, 3, 1, 130, 20), True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_states_of_several_tiles(op, inputs, states, dtype):
    """Feature and value axes in two tiles or more (features in one if it erases): partial sums."""
    check_against_reference(op, on_device(inputs), impl="triton", dtype=dtype, return_states=states)
    assert last_impl()[1] == "triton"


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (ssd, test_ssd.make(1, 5, 2, 1, 2, 3)),
        (gla, test_gla.make(1, 5, 1, 3, 2)),
        (delta_rule, test_delta_rule.make(1, 5, 1, 3, 2)),
    ],
    ids=["ssd", "gla", "delta_rule"],
)
def test_any_layout_gives_the_same_bits(op, inputs):
    inputs = on_device(inputs)
    strided = {n: v.transpose(0, -1).contiguous().transpose(0, -1) for n, v in inputs.items()}
    want, want_grads = outputs_and_grads(op, inputs, impl="triton")
    got, grads = outputs_and_grads(op, strided, impl="triton")
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert all(torch.equal(grads[n], want_grads[n]) for n in want_grads)


@pytest.mark.parametrize("op", [gla, delta_rule], ids=["gla", "delta_rule"])
def test_forgetting_everything_is_exact(op):
    """A log decay of -inf: nothing from before, no NaN in any gradient."""
    make = test_gla.make if op is gla else test_delta_rule.make
    inputs = on_device(make(1, 6, 1, 3, 2))
    inputs["log_decay"][:, 3] = -torch.inf
    check_against_reference(op, inputs, impl="triton", return_states=True)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [63, 257, 1025])
@pytest.mark.parametrize(
    ("op", "make"),
    [
        (linear_attention, lambda length: test_linear_attention.make(2, length, 2, 273, 64)),
        (ssd, lambda length: test_ssd.make(3, length, 4, 2, 64, 128)),
        (gla, lambda length: test_gla.make(3, length, 2, 64, 48)),
        (delta_rule, lambda length: test_delta_rule.make(3, length, 2, 64, 48)),
    ],
    ids=["linear_attention", "ssd", "gla", "delta_rule"],
)
def test_on_a_gpu_at_real_sizes(op, make, length):
    check_against_reference(
        op,
        on_device(make(length)),
        impl="triton",
        dtype=torch.float32,
        return_states=[length // 2],
    )

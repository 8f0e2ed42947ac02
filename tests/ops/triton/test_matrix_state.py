"""The kernels over matrix states, through every op that runs on them, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.ops.delta_rule import (
    delta_rule,
    delta_rule_from_writes,
    delta_rule_given_error,
    prediction_error,
)
from hooked_ssm.ops.dispatch import last_impl
from hooked_ssm.ops.gla import gla
from hooked_ssm.ops.linear_attention import linear_attention, normalised_linear_attention
from hooked_ssm.ops.ssd import decayed_linear_attention, ssd
from tests.ops import test_delta_rule, test_gla, test_linear_attention, test_ssd
from tests.ops.checks import (
    check_against_reference,
    check_segments,
    outputs_and_grads,
    randn,
)
from tests.ops.test_delta_rule import per_value_channel, without
from tests.ops.triton.devices import on_device

pytest.importorskip("triton")

ALONG_POS = {
    gla: ["q", "k", "v", "log_decay"],
    delta_rule: ["q", "k", "v", "beta", "log_decay"],
    ssd: ["x", "dt", "B", "C"],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("op", "inputs", "states"),
    [
        (linear_attention, test_linear_attention.make(1, 1, 1, 1, 1), True),
        (linear_attention, test_linear_attention.make(3, 17, 1, 5, 3), [16, 0, 16]),
        # feature and value axes in two tiles each: every partial sum
        (linear_attention, test_linear_attention.make(1, 3, 1, 130, 20), True),
        (ssd, test_ssd.make(1, 17, 4, 2, 3, 5), True),
        (ssd, test_ssd.make(1, 40, 1, 1, 2, 3), False),
        (decayed_linear_attention, test_ssd.make_decayed(1, 2, 3, 1), [1]),
        (gla, test_gla.make(3, 2, 1, 5, 3), True),
        (gla, test_gla.make(1, 34, 1, 3, 2), [33, 5]),
        (gla, test_gla.make(1, 3, 1, 130, 20), False),
        (delta_rule, test_delta_rule.make(1, 1, 2, 3, 3), True),
        (delta_rule, test_delta_rule.make(1, 34, 1, 5, 3), [33, 5]),
        (delta_rule, without(test_delta_rule.make(2, 5, 1, 3, 5), "log_decay"), True),
        (delta_rule, per_value_channel(test_delta_rule.make(1, 5, 2, 3, 5)), True),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_against_the_reference(op, inputs, states, dtype):
    check_against_reference(op, on_device(inputs), impl="triton", dtype=dtype, return_states=states)
    assert last_impl()[1] == "triton"


def halves_of_the_delta_rule() -> list:
    inputs = test_delta_rule.make(1, 17, 1, 3, 5)
    error = without(inputs, "v", error=inputs["v"])
    write = without(inputs, "q", "v", write=randn(1, 17, 1, 3, 5, seed=7))
    return [
        (prediction_error, without(inputs, "q"), {}),
        (prediction_error, without(per_value_channel(inputs), "q", "log_decay"), {}),
        (delta_rule_given_error, error, {"return_states": [3, 16]}),
        (delta_rule_from_writes, write, {}),
    ]


@pytest.mark.parametrize(("op", "inputs", "options"), halves_of_the_delta_rule())
def test_halves_of_the_delta_rule(op, inputs, options):
    check_against_reference(op, on_device(inputs), impl="triton", **options)
    assert last_impl() == (op.__name__, "triton")


def test_normalised_linear_attention():
    """Based's: a column of ones more in v."""
    inputs = test_linear_attention.positive(test_linear_attention.make(1, 5, 2, 3, 4))
    check_against_reference(
        normalised_linear_attention, on_device(inputs), impl="triton", return_states=True
    )


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        (ssd, test_ssd.make(1, 17, 2, 1, 2, 3)),
        (gla, test_gla.make(1, 17, 1, 3, 2)),
        (delta_rule, test_delta_rule.make(1, 17, 1, 3, 2)),
    ],
    ids=["ssd", "gla", "delta_rule"],
)
def test_segments_and_layouts(op, inputs):
    inputs = on_device(inputs)
    check_segments(
        op, inputs, (1, 6, 10), along_pos=ALONG_POS[op], return_states=True, impl="triton"
    )
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


def test_low_precision_keeps_a_float32_core():
    """Read as bfloat16, computed in float32; only y is rounded (the interpreter cuts it off)."""
    inputs = {n: v.float() for n, v in on_device(test_linear_attention.make(1, 9, 1, 3, 4)).items()}
    narrow = {n: v.bfloat16() if n != "initial_state" else v for n, v in inputs.items()}
    wide = {n: v.float() for n, v in narrow.items()}
    got, got_grads = outputs_and_grads(linear_attention, narrow, impl="triton", return_states=True)
    want, _ = outputs_and_grads(linear_attention, wide, impl="triton", return_states=True)
    assert got["y"].dtype == got_grads["q"].dtype == torch.bfloat16
    assert torch.equal(got["states"], want["states"])
    assert ((got["y"].float() - want["y"]).abs() <= 2**-7 * want["y"].abs()).all()


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

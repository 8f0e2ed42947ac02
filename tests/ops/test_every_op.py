"""Every op on every implementation: outputs, states, final states and all gradients are right.

The reference equals the naive loop of `table.py`; the other implementations equal the float64
reference, at awkward lengths and sizes, with and without an initial state, with no, some or all
states, in segments, and with the carried state edited between two tokens.
"""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_ssm.ops.dispatch import last_impl
from tests.ops.checks import (
    CUTS,
    LENGTHS,
    RELATIVE,
    Tensors,
    assert_near,
    assert_same,
    check_segments,
    named_outputs,
    outputs_and_grads,
    randn,
    segment_lengths,
)
from tests.ops.table import OPS, Op, naive_loop
from tests.ops.triton.devices import DEVICE, on_device

F64, F32 = torch.float64, torch.float32
Setting = tuple[int, bool, str]
"""Batch, whether there is an initial state, states wanted: none, some or all."""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
EACH = [
    pytest.param(name, impl, marks=needs_triton if impl == "triton" else ())
    for name, op in OPS.items()
    for impl in op.impls
]


def too_slow_to_interpret(name: str, impl: str, length: int) -> bool:
    """Variants of another row's kernel run at four of the lengths only: 6 ms a token."""
    return impl == "triton" and OPS[name].variant and length in (63, 100, 257)


def settings(length: int, impl: str) -> list[Setting]:
    """Those whose turn it is: every length meets both batches and both kinds of start.

    So does every number of states, at some length. The interpreter takes fewer: one document or
    three at lengths of 63, 64 and 257. The CPU path takes more: all of them at one and two tokens.
    """
    wanted = ("none", "some", "all")
    if impl == "cpu" and length <= 2:
        return list(product((1, 3), (True, False), wanted))
    turn = LENGTHS.index(length)
    starts = turn % 2 == 0
    first = [(1, starts, wanted[turn % 3]), (3, not starts, wanted[(turn + 1) % 3])]
    second = [(1, not starts, wanted[(turn + 2) % 3]), (3, starts, wanted[turn % 3])]
    if impl == "triton":
        return {63: first[:1], 64: first[1:], 257: first[:1]}.get(length, first)
    return first + second if impl == "cpu" else first


def options_for(op: Op, wanted: str, length: int) -> dict[str, Any]:
    """Some states: out of order, one of them twice."""
    some = [length - 1, 0, length - 1, length // 2]
    return {op.wanted: {"none": False, "some": some, "all": True}[wanted]} if op.wanted else {}


@cache
def inputs_of(name: str, batch: int, length: int, size: tuple[int, ...], starts: bool) -> Tensors:
    op = OPS[name]
    inputs = op.make(batch, length, *size)
    return inputs if starts else {n: x for n, x in inputs.items() if n != op.start}


def naive_op(op: Op, zero: Tensor, wanted: str, edits: Any = None, **inputs: Tensor) -> Any:
    """The naive loop, with the outputs that the op has."""
    loop = naive_loop(op, inputs, zero, edits or {})
    length = loop.y.shape[1]
    positions = options_for(op, wanted, length).get(op.wanted)
    found = {"y": loop.y}
    if positions is True:
        found["states"] = loop.states
    elif positions:
        found["states"] = loop.states[:, positions]
    return found | ({"final": loop.final} if op.final else {})


class Named(dict):
    """Named tensors, for `outputs_and_grads`."""

    def _asdict(self) -> dict[str, Tensor]:
        return dict(self)


def under_common_names(run: Any, op: Op, **arguments: Any) -> Named:
    """An op's outputs as y, states and final, whatever its own names are."""
    names = {"windows": "states", op.final: "final"}
    found = named_outputs(run(**arguments))
    return Named({names.get(n, n): x for n, x in found.items()})


@cache
def by_reference(
    name: str, batch: int, length: int, size: tuple[int, ...], starts: bool, wanted: str
) -> Any:
    """Outputs and gradients in float64; the naive loop has checked them by then or will."""
    op = OPS[name]
    inputs = inputs_of(name, batch, length, size, starts)
    run = partial(under_common_names, op.run, op, **options_for(op, wanted, length))
    return outputs_and_grads(run, inputs, impl="reference")


@pytest.mark.parametrize(
    ("name", "impl", "length"),
    [
        pytest.param(*each.values, length, marks=each.marks)
        for each in EACH
        for length in LENGTHS
        if not too_slow_to_interpret(*each.values, length)
    ],
)
def test_outputs_states_and_gradients(name, impl, length):
    op = OPS[name]
    interpreted = impl == "triton"
    for i, (batch, starts, wanted) in enumerate(settings(length, impl)):
        size = op.sizes[0 if interpreted and length > 17 else (i + i // 3) % len(op.sizes)]
        inputs = inputs_of(name, batch, length, size, starts)
        want = by_reference(name, batch, length, size, starts, wanted)
        run = partial(under_common_names, op.run, op, **options_for(op, wanted, length))
        dtypes = [F64] if interpreted and length > 2 else [F64, F32]
        for dtype in dtypes:
            if impl == "reference" and dtype == F64:
                zero = torch.zeros_like(op.make(batch, length, *size)[op.start])
                loop = lambda op=op, zero=zero, wanted=wanted, **inputs: Named(  # noqa: E731
                    naive_op(op, zero, wanted, **inputs)
                )
                assert_same(want, outputs_and_grads(loop, inputs), RELATIVE[F64])
                continue
            cast = {n: x.to(DEVICE if interpreted else "cpu", dtype) for n, x in inputs.items()}
            got = outputs_and_grads(run, cast, impl=impl)
            assert all(x.dtype == dtype for x in got[0].values())
            assert_same(got, want, RELATIVE[dtype])
            if interpreted:
                assert last_impl()[1] == "triton"


CARRIES = [p for p in EACH if OPS[p.values[0]].final]
WANT_STATES = [p for p in EACH if OPS[p.values[0]].wanted]


def dtypes_of(name: str, impl: str) -> list[torch.dtype]:
    """float64, and float32 too where that takes other code."""
    return [F64, F32] if (name, impl) == ("selective_scan", "cpu") else [F64]


@pytest.mark.parametrize(("name", "impl"), CARRIES)
def test_any_split_is_one_pass(name, impl):
    """Cuts of one and two tokens, within and across chunks of 32 and 64, with every state."""
    op = OPS[name]
    length = 40 if impl == "triton" else 140
    for size, cuts, dtype in product(op.sizes[:2], CUTS, dtypes_of(name, impl)):
        if impl == "triton" and (size, cuts) not in zip(op.sizes, CUTS, strict=False):
            continue
        inputs = {n: x.to(dtype) for n, x in on_device(op.make(2, length, *size)).items()}
        check_segments(
            op.run,
            inputs,
            segment_lengths(cuts, length),
            along_pos=[n for n in op.along_pos if n in inputs],
            carry=op.start,
            final=op.final,
            relative=RELATIVE[dtype],
            impl=impl,
            **{op.wanted: True},
        )


def edited_between(
    op: Op, at: int, change: Tensor, impl: str, **inputs: Tensor
) -> dict[str, Tensor]:
    """Run up to `at`, halve the state handed on and add a change, run on from there."""
    options = {"impl": impl, op.wanted: True}
    parts = [
        {n: x[:, piece] if n in op.along_pos else x for n, x in inputs.items()}
        for piece in (slice(at + 1), slice(at + 1, None))
    ]
    before = under_common_names(op.run, op, **parts[0], **options)
    after = under_common_names(
        op.run, op, **{**parts[1], op.start: before["final"] / 2 + change}, **options
    )
    joined = {n: torch.cat([before[n], after[n]], 1) for n in ("y", "states")}
    return Named(joined | {"final": after["final"]})


@pytest.mark.parametrize(("name", "impl"), CARRIES)
def test_an_edited_carry_is_the_naive_loop_edited_at_that_step(name, impl):
    """In outputs, states and every gradient, the change's own included."""
    op, length, at = OPS[name], 24, 9
    size = op.sizes[0]
    inputs = op.make(2, length, *size)
    start = inputs[op.start]
    inputs["change"] = randn(*start.shape, seed=11)

    def naive(change: Tensor, **inputs: Tensor) -> Named:
        edits = {at: lambda state: state / 2 + change}
        return Named(naive_op(op, torch.zeros_like(start), "all", edits, **inputs))

    want = outputs_and_grads(naive, inputs)
    for dtype in dtypes_of(name, impl):
        cast = {n: x.to(dtype) for n, x in on_device(inputs).items()}
        got = outputs_and_grads(partial(edited_between, op, at, impl=impl), cast)
        assert_same(got, want, RELATIVE[dtype])


@pytest.mark.parametrize(("name", "impl"), WANT_STATES)
def test_low_precision_is_read_exactly_and_computed_in_float32(name, impl):
    """bfloat16 inputs give the states of the same numbers in float32, bit for bit; y is rounded."""
    op, length = OPS[name], 17
    narrow = {
        n: x.float() if n in op.wide else x.bfloat16()
        for n, x in on_device(op.make(2, length, *op.sizes[0])).items()
    }
    run = partial(under_common_names, op.run, op, impl=impl, **{op.wanted: True})
    got, got_grads = outputs_and_grads(run, narrow)
    want, want_grads = outputs_and_grads(run, {n: x.float() for n, x in narrow.items()})
    assert got["y"].dtype == torch.bfloat16
    assert got["states"].dtype == got["final"].dtype == torch.float32
    assert torch.equal(got["states"], want["states"])
    assert torch.equal(got["final"], want["final"])
    rounding = 2**-7 if impl == "triton" else 2**-8  # Triton's interpreter cuts off
    assert ((got["y"].float() - want["y"]).abs() <= rounding * want["y"].abs()).all()
    assert all(grad.dtype == narrow[n].dtype for n, grad in got_grads.items())
    for grad in want_grads:  # the weights of the loss are rounded too
        assert_near(f"gradient of {grad}", got_grads[grad], want_grads[grad], 2**-5)

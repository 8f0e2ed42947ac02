"""What is materialised: no states unless asked for, and k states for k positions.

The Triton paths run on meta tensors of a model's size, with the launches left out: every tensor
is made by torch, before or after a launch. The CPU paths run for real.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_ssm.ops.dispatch import use_impl
from hooked_ssm.ops.triton_launch import CHUNK
from tests.ops.checks import largest_tensor, made_bytes, named_outputs
from tests.ops.table import OPS, Op

OF_A_MODEL = {
    "selective_scan": (1536, 16),
    "ssd": (24, 1, 64, 128),
    "linear_attention": (12, 256, 64),
    "normalised_linear_attention": (12, 256, 64),
    "gla": (4, 128, 256),
    "delta_rule": (8, 128, 128),
    "gated_delta_rule": (6, 256, 256),
    "diagonal_ssm": (8, 32, 16, 16),
}
"""Sizes as in models of about 130M parameters."""
SMALL = {
    "selective_scan": (32, 16),
    "ssd": (1, 1, 32, 32),
    "linear_attention": (1, 32, 32),
    "normalised_linear_attention": (1, 32, 32),
    "gla": (1, 32, 32),
    "delta_rule": (1, 16, 16),
    "gated_delta_rule": (1, 16, 16),
    "diagonal_ssm": (2, 16),
}
WANTED = (False, [5], [5, 900, 2047])


def from_zero(name: str, length: int, size: tuple[int, ...]) -> tuple[dict[str, Tensor], int]:
    """float32 inputs without an initial state, and the numbers in one state."""
    op = OPS[name]
    inputs = {n: x.float() for n, x in op.make(1, length, *size).items()}
    return inputs, inputs.pop(op.start).numel()


def on_meta(name: str, length: int, size: tuple[int, ...]) -> tuple[dict[str, Tensor], int]:
    """The same on meta tensors, whatever their size."""
    inputs, state = from_zero(name, 1, size)
    timed = OPS[name].along_pos
    shapes = {n: [1, length, *x.shape[2:]] if n in timed else x.shape for n, x in inputs.items()}
    return {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}, state


def running(op: Op, inputs: dict[str, Tensor], impl: str, wanted: Any) -> Callable[[], None]:
    """Forward, and backward if an input wants its gradient."""

    def run() -> None:
        with use_impl(impl):
            outputs = named_outputs(op.run(**inputs, **{op.wanted: wanted}))
        loss = sum(x.abs().sum() for x in outputs.values())
        if loss.requires_grad:
            loss.backward()

    return run


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", OF_A_MODEL)
def test_on_the_triton_path_states_exist_only_where_asked_for(name, monkeypatch):
    for module in ("matrix_state_triton", "selective_scan.triton", "diagonal_ssm.triton"):
        monkeypatch.setattr(f"hooked_ssm.ops.{module}.launch", lambda *args, **constants: None)
    monkeypatch.setattr("hooked_ssm.ops.delta_rule.require_finite", lambda *args: None)
    op, length = OPS[name], 4096
    inputs, state = on_meta(name, length, OF_A_MODEL[name])
    given = max(x.numel() for x in inputs.values())

    def forward(wanted: Any) -> Callable[[], None]:
        return running(op, inputs, "triton", wanted)

    none = made_bytes(forward(False))
    # twice: y comes per tile of key channels before it is summed
    assert largest_tensor(forward(False)) <= max(2 * given, state) < length * state / 4
    for wanted in WANTED[1:]:
        # the states, their absolute value in the loss, and which position goes where
        more = made_bytes(forward(wanted)) - none
        states = 4 * len(wanted) * state
        assert states <= more <= 2 * states + 32 * length
        assert largest_tensor(forward(wanted)) <= max(2 * given, len(wanted) * state)

    for tensor in inputs.values():
        tensor.requires_grad_()
    # a state is kept every CHUNK tokens, in tiles whose sides are powers of two
    kept = 2 * state * length // CHUNK
    # gradients of keys and queries come per tile of 8 value channels or more before they are summed
    assert largest_tensor(forward([5])) <= max(kept, 32 * given)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_on_the_cpu_path_nothing_grows_beyond_a_chunk(name, grad):
    op, length = OPS[name], 2048
    inputs, state = from_zero(name, length, SMALL[name])
    for tensor in inputs.values():
        tensor.requires_grad_(grad)
    given = max(x.numel() for x in inputs.values())
    for wanted in WANTED:
        # chunks have at most 64 tokens: a row of weights each, and a state between two of them
        most = max(given, 64 * length, 2 * state * length // CHUNK)
        largest = largest_tensor(running(op, inputs, "cpu", wanted))
        assert largest <= 2 * most
        assert largest < length * state / 3
    every = largest_tensor(running(op, inputs, "cpu", True))
    assert every >= length * state


@pytest.mark.parametrize("name", SMALL)
def test_on_the_cpu_path_states_cost_what_is_wanted(name):
    op, length = OPS[name], 2048
    inputs, state = from_zero(name, length, SMALL[name])
    none = made_bytes(running(op, inputs, "cpu", False))
    one, three = (made_bytes(running(op, inputs, "cpu", wanted)) - none for wanted in WANTED[1:])
    assert 4 * state <= one
    assert three - one <= 16 * 4 * state + 8 * 4 * sum(x.numel() for x in inputs.values())

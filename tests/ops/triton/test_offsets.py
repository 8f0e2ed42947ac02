"""Offsets beyond 32 bits, without the memory: the last program of a launch on made-up addresses.

The ops run on meta tensors of more than 2^31 elements. In place of each launch only its last
program is interpreted; its pointers are invented, far apart, and every address is looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.triton.devices import DEVICE

pytest.importorskip("triton")
if DEVICE.type == "cuda":
    pytest.skip("needs Triton's interpreter; on a GPU real sizes run", allow_module_level=True)

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from hooked_ssm.ops import matrix_state_triton as matrix_state
from hooked_ssm.ops.diagonal_ssm import triton as diagonal_ssm
from hooked_ssm.ops.selective_scan import triton as selective_scan
from hooked_ssm.ops.short_conv import triton as short_conv

APART = 45
"""Bits of an address below the number of its tensor."""
ELEMENTS = {torch.float32: tl.float32, torch.int64: tl.int64}


class Memory:
    """Tensors at invented addresses, and which of their elements were used."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.last_used: list[int] = []

    def place(self, value: Any) -> Any:
        """A pointer for a tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        self.tensors.append(value)
        self.last_used.append(-1)
        address = np.array([len(self.tensors) << APART], dtype=np.uint64)
        pointer = tl.pointer_type(ELEMENTS[value.dtype])
        return tl.tensor(TensorHandle(address, pointer), pointer)

    def use(self, pointers: TensorHandle, mask: TensorHandle) -> None:
        """Assert that every address lies in the tensor it was made from."""
        on = np.broadcast_to(mask.data, pointers.data.shape)
        for address in pointers.data[on].ravel().tolist():
            number = (address >> APART) - 1
            tensor = self.tensors[number]
            offset = (address & ((1 << APART) - 1)) // tensor.element_size()
            assert number >= 0 and offset < tensor.numel(), "outside its tensor"
            self.last_used[number] = max(self.last_used[number], offset)


@pytest.fixture
def launches(monkeypatch) -> list[Memory]:
    """What the launches of the test used."""
    memories: list[Memory] = []

    def launch(kernel: Any, programs: int, *args: Any, num_warps: int, **constants: Any) -> None:
        memory = Memory()
        memories.append(memory)

        def program_id(self: InterpreterBuilder, axis: int) -> TensorHandle:
            return TensorHandle(np.array([programs - 1], dtype=np.int32), tl.int32)

        def load(self, pointers, mask, other, *options):  # type: ignore[no-untyped-def]
            memory.use(pointers, mask)
            return read(self, *nothing(pointers, mask), other, *options)

        def store(self, pointers, value, mask, *options):  # type: ignore[no-untyped-def]
            memory.use(pointers, mask)
            return write(self, pointers, value, nothing(pointers, mask)[1], *options)

        monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", program_id)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", store)
        kernel[(1,)](*(memory.place(arg) for arg in args), **constants)

    read = InterpreterBuilder.create_masked_load
    write = InterpreterBuilder.create_masked_store
    for module in (diagonal_ssm, matrix_state, selective_scan, short_conv):
        monkeypatch.setattr(module, "launch", launch)
    return memories


def nothing(pointers: TensorHandle, mask: TensorHandle) -> tuple[TensorHandle, TensorHandle]:
    """The same access with everything masked out."""
    return pointers, TensorHandle(np.zeros_like(mask.data), mask.dtype)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def selective() -> Any:
    x, state = (2, 2, 2**30), (2, 2**30, 1)
    B = meta(2, 2, 1, 1)
    start = meta(*state)
    return selective_scan.selective_scan_triton(
        meta(*x), meta(*x), meta(*state[1:]), B, B, start, True
    )


def convolution() -> Any:
    x = meta(2, 2**21, 2**11)
    window = meta(2, 2**11, 3)
    return short_conv.short_conv_triton(x, meta(2**11, 4), meta(2**11), window, False)


def memory_matrix() -> Any:
    rows = (2, 2, 2**23)
    k, v = meta(*rows, 128), meta(*rows, 128)
    return matrix_state.matrix_state_scan(
        meta(*rows, 128), k, v, beta=meta(*rows, 1), log_decay=meta(*rows), return_states=True
    )


def modes() -> Any:
    complex_ = {"dtype": torch.complex64}
    dA, dB, C = (meta(2**20, 4, **complex_) for _ in range(3))
    start = meta(2, 2**20, 2**10, 4, **complex_)
    u = meta(2, 2, 2**20, 2**10)
    return diagonal_ssm.diagonal_ssm_triton(u, dA, dB, C, start, True)


@pytest.mark.parametrize("run", [selective, convolution, memory_matrix, modes])
def test_the_last_program_reaches_the_last_elements_and_nothing_else(
    run: Callable[[], Any], launches: list[Memory]
):
    outputs = [t for t in run() if t is not None]
    sum(t.abs().sum() for t in outputs).backward()
    assert len(launches) >= 2
    for memory in launches:
        used = zip(memory.tensors, memory.last_used, strict=True)
        reached = [last for tensor, last in used if last == tensor.numel() - 1]
        assert max(reached) >= 2**31

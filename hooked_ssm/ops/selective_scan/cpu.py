"""The selective scan by the compiled kernel (kernel.c), or by the loop where that cannot run.

The kernel is plain C without any header of Python's or torch's: setuptools builds it at install
time if there is a compiler, and it is called through ctypes, which releases the GIL, so the work
is shared among `torch.get_num_threads()` threads. Inputs in float64 (tests of exactness), on
other devices, or an install without a compiler take the loop; `last_impl()` says which ran.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hooked_ssm.ops.dispatch import note_impl
from hooked_ssm.ops.memory import large_empty
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype, wanted_positions
from hooked_ssm.ops.selective_scan.reference import selective_scan_reference

_POINTER = ctypes.c_void_p
_SMALL = 1 << 22  # state updates (about 4 ms) below which a second thread does not pay


class _Scan(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "length", "channels", "groups", "n")],
        *[(name, _POINTER) for name in ("x", "dt", "A", "B", "C", "initial", "slot")],
        ("slots", ctypes.c_int64),
        *[(name, _POINTER) for name in ("checkpoints", "final")],
    ]


class _Grads(ctypes.Structure):
    _fields_ = [
        (name, _POINTER)
        for name in ("y_in", "states_in", "final_in", "x", "dt", "A", "B", "C", "initial")
    ]


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None if it was not built on this machine."""
    found = importlib.util.find_spec("hooked_ssm.ops.selective_scan._kernel")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    library.selective_scan_block.restype = ctypes.c_int64
    library.selective_scan_chunk.restype = ctypes.c_int64
    library.selective_scan_backward.restype = ctypes.c_int
    return library


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="selective_scan")


def _share(function: Any, items: int, updates: int, *args: Any) -> list[Any]:
    """Call `function(*args, first, stop)` on equal shares of the items, one per thread."""
    threads = min(torch.get_num_threads(), items) if updates >= _SMALL else 1
    bounds = [items * i // threads for i in range(threads + 1)]
    calls = [
        (ctypes.c_int64(a), ctypes.c_int64(b)) for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    others = [_pool(threads - 1).submit(function, *args, *bound) for bound in calls[1:]]
    return [function(*args, *calls[0]), *[other.result() for other in others]]


def selective_scan_cpu(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run the compiled kernel; arguments as in `selective_scan_reference`."""
    tensors = [x, dt, A, B, C, *([] if initial_state is None else [initial_state])]
    runs = core_dtype(*tensors) == torch.float32 and all(t.device.type == "cpu" for t in tensors)
    if not runs or load_kernel() is None:
        note_impl("selective_scan", "reference")
        return selective_scan_reference(x, dt, A, B, C, initial_state, return_states)
    positions = wanted_positions(return_states, x.shape[1])
    # A position asked for twice is computed once and copied.
    order = sorted(set(positions))
    floats = [t.float().contiguous() for t in (x, dt, A, B, C)]
    start = None if initial_state is None else initial_state.float().contiguous()
    y, states, final = _KernelScan.apply(*floats, start, tuple(order))
    if return_states is False:
        return ScanOutput(y.to(x.dtype), None, final)
    if positions != order:
        states = states[:, [order.index(t) for t in positions]]
    return ScanOutput(y.to(x.dtype), states, final)


class _KernelScan(torch.autograd.Function):
    """Forward and backward of the kernel on float32, contiguous CPU tensors."""

    @staticmethod
    def forward(ctx, x, dt, A, B, C, initial, positions):  # type: ignore[no-untyped-def]
        library = load_kernel()
        assert library is not None, "checked by selective_scan_cpu"
        batch, length, channels = x.shape
        groups, n = B.shape[2:]
        needs_grad = any(ctx.needs_input_grad)
        slot = torch.full((length,), -1, dtype=torch.int64)
        slot[list(positions)] = torch.arange(len(positions))
        chunks = -(-length // library.selective_scan_chunk())
        checkpoints = x.new_empty(batch, chunks if needs_grad else 0, channels, n)
        y, final = torch.empty_like(x), x.new_empty(batch, channels, n)
        states = large_empty(x, batch, len(positions), channels, n)
        scan = _describe(x, dt, A, B, C, initial, slot, len(positions), checkpoints, final)
        blocks = -(-channels // library.selective_scan_block())
        _share(
            library.selective_scan_forward,
            batch * blocks,
            x.numel() * n,
            ctypes.byref(scan),
            _POINTER(y.data_ptr()),
            _POINTER(states.data_ptr() if len(positions) else 0),
        )
        ctx.save_for_backward(x, dt, A, B, C, initial, slot, checkpoints)
        ctx.slots = len(positions)
        ctx.set_materialize_grads(False)
        return y, states, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_states, grad_final):  # type: ignore[no-untyped-def]
        library = load_kernel()
        x, dt, A, B, C, initial, slot, checkpoints = ctx.saved_tensors
        batch, length, channels = x.shape
        groups, n = B.shape[2:]
        blocks = -(-channels // library.selective_scan_block())
        incoming = [
            torch.zeros_like(x) if grad_y is None else grad_y.contiguous(),
            None if grad_states is None else grad_states.contiguous(),
            None if grad_final is None else grad_final.contiguous(),
        ]
        grad_x, grad_dt = torch.empty_like(x), torch.empty_like(x)
        grad_A = x.new_zeros(batch, channels, n)
        grad_B, grad_C = x.new_zeros(2, blocks, batch, length, groups, n)
        grad_initial = x.new_empty(batch, channels, n)
        outgoing = [grad_x, grad_dt, grad_A, grad_B, grad_C, grad_initial]
        scan = _describe(
            x, dt, A, B, C, initial, slot, ctx.slots, checkpoints, torch.empty_like(grad_initial)
        )
        grads = _Grads(*[_address(t) for t in incoming + outgoing])
        failed = _share(
            library.selective_scan_backward,
            batch * blocks,
            x.numel() * n,
            ctypes.byref(scan),
            ctypes.byref(grads),
        )
        if any(failed):
            raise MemoryError("selective_scan: no memory for the states of one chunk")
        return (
            grad_x,
            grad_dt,
            grad_A.sum(0),
            grad_B.sum(0),
            grad_C.sum(0),
            None if initial is None else grad_initial,
            None,
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def _describe(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial: Tensor | None,
    slot: Tensor,
    slots: int,
    checkpoints: Tensor,
    final: Tensor,
) -> _Scan:
    pointers = [_address(t) for t in (x, dt, A, B, C, initial, slot)]
    return _Scan(*x.shape, *B.shape[2:], *pointers, slots, _address(checkpoints), _address(final))

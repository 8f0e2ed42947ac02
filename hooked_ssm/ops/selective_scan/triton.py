"""The selective scan as Triton kernels; README.md derives the steps and the names.

A program takes one document and one block of channels of one group through the whole sequence, with
their state in registers. Layouts are kernel.c's: x, dt, y [batch][pos][channel]; A [channel][n];
B, C [batch][pos][group][n]; states [batch][slot][channel][n]. Checkpoints and scratch are tiles
[program][token][BLOCK_E][BLOCK_N] that only their program reads, padding included.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype
from hooked_ssm.ops.triton_launch import CHUNK, Slots, contiguous, launch, power_of_2, warps_for

TILE_BYTES = 1024
"""The state of a program, unless d_state is larger: small, so that there are many programs."""


@triton.jit(do_not_specialize=["length"])
@no_type_check
def selective_scan_fwd_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    initial_ptr,  # None: zeros
    slot_ptr,  # None: no states wanted
    y_ptr,
    states_ptr,
    checkpoints_ptr,  # None: no gradient wanted
    final_ptr,
    length,
    channels,
    groups,
    n,
    slots,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    CORE: tl.constexpr = final_ptr.dtype.element_ty
    item = tl.program_id(0)
    per_group = channels // groups
    blocks = tl.cdiv(per_group, BLOCK_E)
    group = item // blocks % groups
    b = (item // (blocks * groups)).to(tl.int64)
    in_group = item % blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    e = group * per_group + in_group
    j = tl.arange(0, BLOCK_N)
    on_e, on_n = in_group < per_group, j < n
    on = on_e[:, None] & on_n[None, :]
    cell = e[:, None] * n + j[None, :]
    tile = tl.arange(0, BLOCK_E)[:, None] * BLOCK_N + j[None, :]
    chunks = tl.cdiv(length, CHUNK)

    A = tl.load(A_ptr + cell, mask=on, other=0.0).to(CORE)
    if initial_ptr is not None:
        h = tl.load(initial_ptr + b * channels * n + cell, mask=on, other=0.0).to(CORE)
    else:
        h = tl.zeros((BLOCK_E, BLOCK_N), dtype=CORE)
    for chunk in range(0, chunks):
        if checkpoints_ptr is not None:
            kept = (item.to(tl.int64) * chunks + chunk) * BLOCK_E * BLOCK_N
            tl.store(checkpoints_ptr + kept + tile, h)
        first = chunk * CHUNK
        stop = tl.minimum(first + CHUNK, length)
        for t in tl.range(first, stop, num_stages=4):  # loads run three tokens ahead
            row = b * length + t
            x = tl.load(x_ptr + row * channels + e, mask=on_e, other=0.0).to(CORE)
            dt = tl.load(dt_ptr + row * channels + e, mask=on_e, other=0.0).to(CORE)
            shared = (row * groups + group) * n + j
            B = tl.load(B_ptr + shared, mask=on_n, other=0.0).to(CORE)
            C = tl.load(C_ptr + shared, mask=on_n, other=0.0).to(CORE)
            h = tl.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[None, :]
            y = tl.sum(h * C[None, :], axis=1)
            tl.store(y_ptr + row * channels + e, y.to(y_ptr.dtype.element_ty), mask=on_e)
            if slot_ptr is not None:
                slot = tl.load(slot_ptr + t)
                place = (b * slots + slot) * channels * n + cell
                tl.store(states_ptr + place, h, mask=on & (slot >= 0))
    tl.store(final_ptr + b * channels * n + cell, h, mask=on)


@triton.jit(do_not_specialize=["length"])
@no_type_check
def selective_scan_bwd_kernel(
    x_ptr,
    dt_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    slot_ptr,  # None: no gradient of states came in
    checkpoints_ptr,
    scratch_ptr,
    gy_ptr,
    gstates_ptr,
    gfinal_ptr,  # None: zeros
    gx_ptr,
    gdt_ptr,
    gA_ptr,  # [batch][channel][n]
    gB_ptr,  # [block of the group][batch][pos][group][n]
    gC_ptr,
    ginitial_ptr,
    batch,
    length,
    channels,
    groups,
    n,
    slots,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    CORE: tl.constexpr = ginitial_ptr.dtype.element_ty
    item = tl.program_id(0)
    per_group = channels // groups
    blocks = tl.cdiv(per_group, BLOCK_E)
    block = (item % blocks).to(tl.int64)
    group = item // blocks % groups
    b = (item // (blocks * groups)).to(tl.int64)
    in_group = item % blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    e = group * per_group + in_group
    j = tl.arange(0, BLOCK_N)
    on_e, on_n = in_group < per_group, j < n
    on = on_e[:, None] & on_n[None, :]
    cell = e[:, None] * n + j[None, :]
    tile = tl.arange(0, BLOCK_E)[:, None] * BLOCK_N + j[None, :]
    chunks = tl.cdiv(length, CHUNK)
    scratch_ptr += item.to(tl.int64) * CHUNK * BLOCK_E * BLOCK_N

    A = tl.load(A_ptr + cell, mask=on, other=0.0).to(CORE)
    gA = tl.zeros((BLOCK_E, BLOCK_N), dtype=CORE)
    if gfinal_ptr is not None:
        gh = tl.load(gfinal_ptr + b * channels * n + cell, mask=on, other=0.0)
    else:
        gh = tl.zeros((BLOCK_E, BLOCK_N), dtype=CORE)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        first = chunk * CHUNK
        tokens = tl.minimum(CHUNK, length - first)
        # forwards once more, for the state before each token of the chunk
        h = tl.load(
            checkpoints_ptr + (item.to(tl.int64) * chunks + chunk) * BLOCK_E * BLOCK_N + tile
        )
        tl.debug_barrier()  # the chunk after this one has been read
        for i in tl.range(0, tokens, num_stages=4):
            tl.store(scratch_ptr + i * BLOCK_E * BLOCK_N + tile, h)
            row = b * length + first + i
            x = tl.load(x_ptr + row * channels + e, mask=on_e, other=0.0).to(CORE)
            dt = tl.load(dt_ptr + row * channels + e, mask=on_e, other=0.0).to(CORE)
            shared = (row * groups + group) * n + j
            B = tl.load(B_ptr + shared, mask=on_n, other=0.0).to(CORE)
            h = tl.exp(dt[:, None] * A) * h + (dt * x)[:, None] * B[None, :]
        tl.debug_barrier()  # the states of this one are written
        for ahead in range(0, tokens):
            i = tokens - 1 - ahead
            row = b * length + first + i
            x = tl.load(x_ptr + row * channels + e, mask=on_e, other=0.0).to(CORE)
            dt = tl.load(dt_ptr + row * channels + e, mask=on_e, other=0.0).to(CORE)
            gy = tl.load(gy_ptr + row * channels + e, mask=on_e, other=0.0).to(CORE)
            shared = (row * groups + group) * n + j
            B = tl.load(B_ptr + shared, mask=on_n, other=0.0).to(CORE)
            C = tl.load(C_ptr + shared, mask=on_n, other=0.0).to(CORE)
            before = tl.load(scratch_ptr + i * BLOCK_E * BLOCK_N + tile)
            decay = tl.exp(dt[:, None] * A)
            h = decay * before + (dt * x)[:, None] * B[None, :]
            if slot_ptr is not None:
                slot = tl.load(slot_ptr + first + i)
                place = (b * slots + slot) * channels * n + cell
                gh += tl.load(gstates_ptr + place, mask=on & (slot >= 0), other=0.0)
            g = gh + gy[:, None] * C[None, :]
            into_decay = g * before * decay
            gA += into_decay * dt[:, None]
            through_value = tl.sum(g * B[None, :], axis=1)
            through_decay = tl.sum(into_decay * A, axis=1)
            tl.store(gx_ptr + row * channels + e, dt * through_value, mask=on_e)
            gdt = x * through_value + through_decay
            tl.store(gdt_ptr + row * channels + e, gdt, mask=on_e)
            partial = block * batch * length * groups * n + shared
            tl.store(gB_ptr + partial, tl.sum(g * (dt * x)[:, None], axis=0), mask=on_n)
            tl.store(gC_ptr + partial, tl.sum(gy[:, None] * h, axis=0), mask=on_n)
            gh = g * decay
    tl.store(gA_ptr + b * channels * n + cell, gA, mask=on)
    tl.store(ginitial_ptr + b * channels * n + cell, gh, mask=on)


def selective_scan_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run the kernels; arguments as in `selective_scan_reference`, float64 runs in float64."""
    slots = Slots(return_states, x.shape[1], x.device)
    given = [t for t in (x, dt, A, B, C, initial_state) if t is not None]
    start = None if initial_state is None else initial_state.to(core_dtype(*given))
    tensors = contiguous(x, dt, A, B, C, start)
    y, states, final = _KernelScan.apply(*tensors, slots)
    return ScanOutput(y, slots.in_order(states), final)


def _grid(channels: int, groups: int, n: int, core: torch.dtype) -> tuple[int, dict[str, int], int]:
    """Blocks per group, the sizes of a tile, and its warps."""
    per_group, block_n = channels // groups, power_of_2(n)
    block_e = min(power_of_2(per_group), max(TILE_BYTES // (core.itemsize * block_n), 1))
    sizes = {"CHUNK": CHUNK, "BLOCK_E": block_e, "BLOCK_N": block_n}
    return -(-per_group // block_e), sizes, warps_for(block_e * block_n, per_thread=16)


class _KernelScan(torch.autograd.Function):
    """Forward and backward of the kernels on contiguous tensors."""

    @staticmethod
    def forward(ctx, x, dt, A, B, C, initial, slots):  # type: ignore[no-untyped-def]
        batch, length, channels = x.shape
        groups, n = B.shape[2:]
        core = core_dtype(x, dt, A, B, C, *([] if initial is None else [initial]))
        blocks, sizes, warps = _grid(channels, groups, n, core)
        programs = batch * groups * blocks
        tile = (sizes["BLOCK_E"], sizes["BLOCK_N"])
        checkpoints = (
            x.new_empty(programs, -(-length // CHUNK), *tile, dtype=core)
            if any(ctx.needs_input_grad)
            else None
        )
        y, final = torch.empty_like(x), x.new_empty(batch, channels, n, dtype=core)
        states = x.new_empty(batch, slots.count, channels, n, dtype=core)
        arguments = [x, dt, A, B, C, initial, slots.of_position, y, states, checkpoints, final]
        counts = (length, channels, groups, n, slots.count)
        launch(selective_scan_fwd_kernel, programs, *arguments, *counts, num_warps=warps, **sizes)
        ctx.save_for_backward(x, dt, A, B, C, slots.of_position, checkpoints)
        ctx.starts, ctx.core, ctx.slots = initial is not None, core, slots.count
        ctx.set_materialize_grads(False)
        return y, states, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_states, grad_final):  # type: ignore[no-untyped-def]
        x, dt, A, B, C, slot, checkpoints = ctx.saved_tensors
        (batch, length, channels), (groups, n) = x.shape, B.shape[2:]
        blocks, sizes, warps = _grid(channels, groups, n, ctx.core)

        def new(*shape: int) -> Tensor:
            return x.new_empty(shape, dtype=ctx.core)

        grad_y = torch.zeros_like(x) if grad_y is None else grad_y
        incoming = contiguous(grad_y, grad_states, grad_final)
        per_block = (blocks, batch, length, groups, n)
        outgoing = [
            *(new(*x.shape), new(*x.shape), new(batch, channels, n)),
            *(new(*per_block), new(*per_block), new(batch, channels, n)),
        ]
        scratch = new(checkpoints.shape[0], CHUNK, *checkpoints.shape[2:])
        launch(
            selective_scan_bwd_kernel,
            checkpoints.shape[0],
            *(x, dt, A, B, C, None if grad_states is None else slot, checkpoints, scratch),
            *incoming,
            *outgoing,
            *(batch, length, channels, groups, n, ctx.slots),
            num_warps=warps,
            **sizes,
        )
        gx, gdt, gA, gB, gC, ginitial = outgoing
        grads: list[Any] = [gx, gdt, gA.sum(0), gB.sum(0), gC.sum(0)]
        grads = [g.to(t.dtype) for g, t in zip(grads, (x, dt, A, B, C), strict=True)]
        return *grads, ginitial if ctx.starts else None, None

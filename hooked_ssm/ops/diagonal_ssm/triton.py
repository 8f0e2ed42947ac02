"""H3's diagonal SSM as Triton kernels; README.md derives the steps.

A program takes one channel of one document and a block of its inner positions w (which share the
channel's parameters) through the sequence, with their modes in registers, real and imaginary parts
apart. In memory they lie side by side, as torch has them. Layouts: u, y [batch][pos][channel][w];
parameters [channel][mode]; states [batch][slot][channel][w][mode]. Checkpoints and scratch are
tiles [program][token][real, imaginary][BLOCK_W][BLOCK_M] that only their program reads.
"""

from __future__ import annotations

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hooked_ssm.ops.output import ScanOutput, StatesWanted
from hooked_ssm.ops.triton_launch import CHUNK, Slots, contiguous, launch, power_of_2, warps_for

TILE_BYTES = 1024
"""The real parts of a program's state, unless there are more modes."""


@triton.jit
@no_type_check
def _read(pointer, cell, on):
    """Real and imaginary parts of a tile of complex numbers."""
    real = tl.load(pointer + 2 * cell, mask=on, other=0.0)
    return real, tl.load(pointer + 2 * cell + 1, mask=on, other=0.0)


@triton.jit
@no_type_check
def _write(pointer, cell, real, imaginary, on):
    tl.store(pointer + 2 * cell, real, mask=on)
    tl.store(pointer + 2 * cell + 1, imaginary, mask=on)


@triton.jit
@no_type_check
def _step(real, imaginary, u, dA_r, dA_i, dB_r, dB_i):
    """dA x + dB u."""
    new_real = dA_r * real - dA_i * imaginary + dB_r * u[:, None]
    return new_real, dA_r * imaginary + dA_i * real + dB_i * u[:, None]


@triton.jit(do_not_specialize=["length"])
@no_type_check
def diagonal_ssm_fwd_kernel(
    u_ptr,
    dA_ptr,
    dB_ptr,
    C_ptr,
    initial_ptr,
    slot_ptr,  # None: no states wanted
    y_ptr,
    states_ptr,
    checkpoints_ptr,  # None: no gradient wanted
    final_ptr,
    length,
    channels,
    inner,
    modes,
    slots,
    CHUNK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    item = tl.program_id(0)
    blocks = tl.cdiv(inner, BLOCK_W)
    c = item // blocks % channels
    b = (item // (blocks * channels)).to(tl.int64)
    w, m = item % blocks * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_M)
    on_w, on_m = w < inner, (m < modes)[None, :]
    on = on_w[:, None] & on_m
    cell = w[:, None] * modes + m[None, :]
    tile = tl.arange(0, BLOCK_W)[:, None] * BLOCK_M + m[None, :]
    chunks = tl.cdiv(length, CHUNK)
    at_end = (b * channels + c) * inner * modes + cell

    dA_r, dA_i = _read(dA_ptr, c * modes + m[None, :], on_m)
    dB_r, dB_i = _read(dB_ptr, c * modes + m[None, :], on_m)
    C_r, C_i = _read(C_ptr, c * modes + m[None, :], on_m)
    real, imaginary = _read(initial_ptr, at_end, on)
    for chunk in range(0, chunks):
        if checkpoints_ptr is not None:
            kept = (item.to(tl.int64) * chunks + chunk) * 2 * BLOCK_W * BLOCK_M + tile
            tl.store(checkpoints_ptr + kept, real)
            tl.store(checkpoints_ptr + kept + BLOCK_W * BLOCK_M, imaginary)
        first = chunk * CHUNK
        stop = tl.minimum(first + CHUNK, length)
        for t in tl.range(first, stop, num_stages=4):  # loads run three tokens ahead
            row = ((b * length + t) * channels + c) * inner + w
            u = tl.load(u_ptr + row, mask=on_w, other=0.0)
            real, imaginary = _step(real, imaginary, u, dA_r, dA_i, dB_r, dB_i)
            y = 2 * tl.sum(C_r * real - C_i * imaginary, axis=1)
            tl.store(y_ptr + row, y, mask=on_w)
            if slot_ptr is not None:
                slot = tl.load(slot_ptr + t)
                place = ((b * slots + slot) * channels + c) * inner * modes + cell
                _write(states_ptr, place, real, imaginary, on & (slot >= 0))
    _write(final_ptr, at_end, real, imaginary, on)


@triton.jit(do_not_specialize=["length"])
@no_type_check
def diagonal_ssm_bwd_kernel(
    u_ptr,
    dA_ptr,
    dB_ptr,
    C_ptr,
    slot_ptr,  # None: no gradient of states came in
    checkpoints_ptr,
    scratch_ptr,
    gy_ptr,
    gstates_ptr,
    gfinal_ptr,  # None: zeros
    gu_ptr,
    gdA_ptr,  # [batch][block of w][channel][mode], as the next two
    gdB_ptr,
    gC_ptr,
    ginitial_ptr,
    length,
    channels,
    inner,
    modes,
    slots,
    CHUNK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    CORE: tl.constexpr = gu_ptr.dtype.element_ty
    IMAGINARY: tl.constexpr = BLOCK_W * BLOCK_M
    item = tl.program_id(0)
    blocks = tl.cdiv(inner, BLOCK_W)
    c = item // blocks % channels
    b = (item // (blocks * channels)).to(tl.int64)
    w, m = item % blocks * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_M)
    on_w, on_m = w < inner, (m < modes)[None, :]
    on = on_w[:, None] & on_m
    cell = w[:, None] * modes + m[None, :]
    tile = tl.arange(0, BLOCK_W)[:, None] * BLOCK_M + m[None, :]
    chunks = tl.cdiv(length, CHUNK)
    at_end = (b * channels + c) * inner * modes + cell
    scratch_ptr += item.to(tl.int64) * CHUNK * 2 * IMAGINARY

    dA_r, dA_i = _read(dA_ptr, c * modes + m[None, :], on_m)
    dB_r, dB_i = _read(dB_ptr, c * modes + m[None, :], on_m)
    C_r, C_i = _read(C_ptr, c * modes + m[None, :], on_m)
    zeros = tl.zeros((BLOCK_W, BLOCK_M), dtype=CORE)
    gdA_r, gdA_i, gdB_r, gdB_i, gC_r, gC_i = zeros, zeros, zeros, zeros, zeros, zeros
    g_r, g_i = zeros, zeros
    if gfinal_ptr is not None:
        g_r, g_i = _read(gfinal_ptr, at_end, on)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        first = chunk * CHUNK
        tokens = tl.minimum(CHUNK, length - first)
        # forwards once more, for the state before each token of the chunk
        kept = (item.to(tl.int64) * chunks + chunk) * 2 * IMAGINARY + tile
        real = tl.load(checkpoints_ptr + kept)
        imaginary = tl.load(checkpoints_ptr + kept + IMAGINARY)
        tl.debug_barrier()  # the chunk after this one has been read
        for i in tl.range(0, tokens, num_stages=4):
            tl.store(scratch_ptr + i * 2 * IMAGINARY + tile, real)
            tl.store(scratch_ptr + i * 2 * IMAGINARY + tile + IMAGINARY, imaginary)
            row = ((b * length + first + i) * channels + c) * inner + w
            u = tl.load(u_ptr + row, mask=on_w, other=0.0)
            real, imaginary = _step(real, imaginary, u, dA_r, dA_i, dB_r, dB_i)
        tl.debug_barrier()  # the states of this one are written
        for ahead in range(0, tokens):
            i = tokens - 1 - ahead
            row = ((b * length + first + i) * channels + c) * inner + w
            u = tl.load(u_ptr + row, mask=on_w, other=0.0)
            gy = tl.load(gy_ptr + row, mask=on_w, other=0.0)
            before_r = tl.load(scratch_ptr + i * 2 * IMAGINARY + tile)
            before_i = tl.load(scratch_ptr + i * 2 * IMAGINARY + tile + IMAGINARY)
            real, imaginary = _step(before_r, before_i, u, dA_r, dA_i, dB_r, dB_i)
            if slot_ptr is not None:
                slot = tl.load(slot_ptr + first + i)
                place = ((b * slots + slot) * channels + c) * inner * modes + cell
                more_r, more_i = _read(gstates_ptr, place, on & (slot >= 0))
                g_r += more_r
                g_i += more_i
            read = 2 * gy[:, None]
            gC_r += read * real
            gC_i -= read * imaginary
            g_r += read * C_r
            g_i -= read * C_i
            tl.store(gu_ptr + row, tl.sum(dB_r * g_r + dB_i * g_i, axis=1), mask=on_w)
            gdB_r += g_r * u[:, None]
            gdB_i += g_i * u[:, None]
            gdA_r += g_r * before_r + g_i * before_i
            gdA_i += g_i * before_r - g_r * before_i
            g_r, g_i = dA_r * g_r + dA_i * g_i, dA_r * g_i - dA_i * g_r
    partial = ((b * blocks + item % blocks) * channels + c) * modes + m
    _write(gdA_ptr, partial, tl.sum(gdA_r, axis=0), tl.sum(gdA_i, axis=0), m < modes)
    _write(gdB_ptr, partial, tl.sum(gdB_r, axis=0), tl.sum(gdB_i, axis=0), m < modes)
    _write(gC_ptr, partial, tl.sum(gC_r, axis=0), tl.sum(gC_i, axis=0), m < modes)
    _write(ginitial_ptr, at_end, g_r, g_i, on)


def diagonal_ssm_triton(
    u: Tensor,
    dA: Tensor,
    dB: Tensor,
    C: Tensor,
    initial_state: Tensor,
    return_states: StatesWanted,
) -> ScanOutput:
    """Run the kernels; arguments as in `diagonal_ssm_reference`."""
    batch, length, channels, *inner = u.shape
    slots = Slots(return_states, length, u.device)
    flat = u.reshape(batch, length, channels, math.prod(inner))
    start = initial_state.reshape(batch, channels, math.prod(inner), dA.shape[1])
    reals = [torch.view_as_real(x.resolve_conj()).contiguous() for x in (dA, dB, C, start)]
    y, states, final = _KernelScan.apply(flat.contiguous(), *reals, slots)
    states, final = (
        torch.view_as_complex(x).reshape(*x.shape[:-3], *inner, x.shape[-2])
        for x in (states, final)
    )
    return ScanOutput(y.reshape(u.shape), slots.in_order(states), final)


def _grid(inner: int, modes: int, core: torch.dtype) -> tuple[int, dict[str, int], int]:
    """Blocks of inner positions, the sizes of a tile, and its warps."""
    block_m = power_of_2(modes)
    block_w = min(power_of_2(inner), max(TILE_BYTES // (core.itemsize * block_m), 1))
    sizes = {"CHUNK": CHUNK, "BLOCK_W": block_w, "BLOCK_M": block_m}
    return -(-inner // block_w), sizes, warps_for(block_w * block_m, per_thread=8)


class _KernelScan(torch.autograd.Function):
    """Forward and backward of the kernels on contiguous tensors, complex ones as [..., 2]."""

    @staticmethod
    def forward(ctx, u, dA, dB, C, initial, slots):  # type: ignore[no-untyped-def]
        (batch, length, channels, inner), modes = u.shape, dA.shape[1]
        blocks, sizes, warps = _grid(inner, modes, u.dtype)
        programs = batch * channels * blocks
        tile = (2, sizes["BLOCK_W"], sizes["BLOCK_M"])
        wants_grad = any(ctx.needs_input_grad)
        checkpoints = u.new_empty(programs, -(-length // CHUNK), *tile) if wants_grad else None
        y, final = torch.empty_like(u), torch.empty_like(initial)
        states = u.new_empty(batch, slots.count, *initial.shape[1:])
        counts = (length, channels, inner, modes, slots.count)
        launch(
            diagonal_ssm_fwd_kernel,
            programs,
            *(u, dA, dB, C, initial, slots.of_position, y, states, checkpoints, final),
            *counts,
            num_warps=warps,
            **sizes,
        )
        ctx.save_for_backward(u, dA, dB, C, slots.of_position, checkpoints)
        ctx.counts, ctx.blocks = counts, blocks
        ctx.set_materialize_grads(False)
        return y, states, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_states, grad_final):  # type: ignore[no-untyped-def]
        u, dA, dB, C, slot, checkpoints = ctx.saved_tensors
        _, channels, inner, modes, _ = ctx.counts
        _, sizes, warps = _grid(inner, modes, u.dtype)
        grad_y = torch.zeros_like(u) if grad_y is None else grad_y
        incoming = contiguous(grad_y, grad_states, grad_final)
        gu = torch.empty_like(u)
        gdA, gdB, gC = (u.new_empty(u.shape[0], ctx.blocks, *dA.shape) for _ in range(3))
        ginitial = u.new_empty(u.shape[0], channels, inner, modes, 2)
        scratch = u.new_empty(checkpoints.shape[0], CHUNK, *checkpoints.shape[2:])
        launch(
            diagonal_ssm_bwd_kernel,
            checkpoints.shape[0],
            *(u, dA, dB, C, None if grad_states is None else slot, checkpoints, scratch),
            *(*incoming, gu, gdA, gdB, gC, ginitial, *ctx.counts),
            num_warps=warps,
            **sizes,
        )
        return gu, gdA.sum((0, 1)), gdB.sum((0, 1)), gC.sum((0, 1)), ginitial, None

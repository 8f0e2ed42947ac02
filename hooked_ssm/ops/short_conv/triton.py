"""The short convolution as Triton kernels; README.md derives the formulas.

Positions do not depend on one another, so a program takes a tile of positions and channels of one
document. With s the inputs, the window put before them (s[-r] for r <= width-1 lies in the window),

    y[t]      = bias + sum_i weight[i] s[t - (width-1) + i]
    gs[u]     = sum_i weight[i] gy[u + (width-1) - i]
    gweight[i] = sum_t gy[t] s[t - (width-1) + i],      gbias = sum_t gy[t]

Layouts: x, y [batch][pos][channel]; weight [channel][width]; window [batch][channel][width-1].
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hooked_ssm.ops.output import StatesWanted, core_dtype, wanted_positions
from hooked_ssm.ops.short_conv.output import ConvOutput
from hooked_ssm.ops.triton_launch import contiguous, launch, power_of_2, warps_for

TILE_T, TILE_C = 16, 64


@triton.jit
@no_type_check
def _seen(x_ptr, window_ptr, b, u, c, on_c, length, channels, width, CORE: tl.constexpr):
    """s[u] of a tile of positions u, negative ones from the window; zeros outside."""
    on = (u < length)[:, None] & on_c[None, :]
    place = (b * length + u[:, None]) * channels + c[None, :]
    value = tl.load(x_ptr + place, mask=on & (u >= 0)[:, None], other=0.0).to(CORE)
    if window_ptr is not None:
        before = (b * channels + c[None, :]) * (width - 1) + (u[:, None] + width - 1)
        in_window = (u < 0) & (u >= 1 - width)
        value += tl.load(
            window_ptr + before, mask=in_window[:, None] & on_c[None, :], other=0.0
        ).to(CORE)
    return value


@triton.jit(do_not_specialize=["length"])
@no_type_check
def short_conv_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    window_ptr,  # None: zeros
    y_ptr,
    length,
    channels,
    width,
    CORE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    item = tl.program_id(0)
    c_blocks, t_blocks = tl.cdiv(channels, BLOCK_C), tl.cdiv(length, BLOCK_T)
    c = item % c_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    t = item // c_blocks % t_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    b = (item // (c_blocks * t_blocks)).to(tl.int64)
    on_c = c < channels
    y = tl.zeros((BLOCK_T, BLOCK_C), dtype=CORE)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c, mask=on_c, other=0.0).to(CORE)[None, :]
    for i in range(0, width):
        tap = tl.load(weight_ptr + c * width + i, mask=on_c, other=0.0).to(CORE)
        u = t - (width - 1) + i
        y += tap[None, :] * _seen(x_ptr, window_ptr, b, u, c, on_c, length, channels, width, CORE)
    place = (b * length + t[:, None]) * channels + c[None, :]
    on = (t < length)[:, None] & on_c[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=on)


@triton.jit(do_not_specialize=["length"])
@no_type_check
def short_conv_bwd_input_kernel(
    gy_ptr,
    weight_ptr,
    gx_ptr,
    gwindow_ptr,
    length,
    channels,
    width,
    CORE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    item = tl.program_id(0)
    c_blocks, u_blocks = tl.cdiv(channels, BLOCK_C), tl.cdiv(length + width - 1, BLOCK_T)
    c = item % c_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    u = item // c_blocks % u_blocks * BLOCK_T + tl.arange(0, BLOCK_T) - (width - 1)
    b = (item // (c_blocks * u_blocks)).to(tl.int64)
    on_c = c < channels
    gs = tl.zeros((BLOCK_T, BLOCK_C), dtype=CORE)
    for i in range(0, width):
        tap = tl.load(weight_ptr + c * width + i, mask=on_c, other=0.0).to(CORE)
        t = u + (width - 1) - i
        on = ((t >= 0) & (t < length))[:, None] & on_c[None, :]
        place = (b * length + t[:, None]) * channels + c[None, :]
        gs += tap[None, :] * tl.load(gy_ptr + place, mask=on, other=0.0).to(CORE)
    place = (b * length + u[:, None]) * channels + c[None, :]
    tl.store(gx_ptr + place, gs, mask=((u >= 0) & (u < length))[:, None] & on_c[None, :])
    before = (b * channels + c[None, :]) * (width - 1) + (u[:, None] + width - 1)
    tl.store(gwindow_ptr + before, gs, mask=(u < 0)[:, None] & on_c[None, :])


@triton.jit(do_not_specialize=["length"])
@no_type_check
def short_conv_bwd_weight_kernel(
    gy_ptr,
    x_ptr,
    window_ptr,  # None: zeros
    gweight_ptr,  # [batch][block of positions][channel][width]
    gbias_ptr,  # [batch][block of positions][channel]
    length,
    channels,
    width,
    CORE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    item = tl.program_id(0)
    c_blocks, t_blocks = tl.cdiv(channels, BLOCK_C), tl.cdiv(length, BLOCK_T)
    c = item % c_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    t = item // c_blocks % t_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    b = (item // (c_blocks * t_blocks)).to(tl.int64)
    on_c = c < channels
    on = (t < length)[:, None] & on_c[None, :]
    place = (b * length + t[:, None]) * channels + c[None, :]
    gy = tl.load(gy_ptr + place, mask=on, other=0.0).to(CORE)
    partial = (item // c_blocks).to(tl.int64) * channels + c
    tl.store(gbias_ptr + partial, tl.sum(gy, axis=0), mask=on_c)
    for i in range(0, width):
        u = t - (width - 1) + i
        seen = _seen(x_ptr, window_ptr, b, u, c, on_c, length, channels, width, CORE)
        tl.store(gweight_ptr + partial * width + i, tl.sum(gy * seen, axis=0), mask=on_c)


def short_conv_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_window: Tensor | None,
    return_windows: StatesWanted,
) -> ConvOutput:
    """Run the kernels; the windows wanted are columns of the inputs, picked by torch."""
    core = core_dtype(x, weight)
    window = None if initial_window is None else initial_window.to(core)
    y = _KernelConv.apply(*contiguous(x, weight, bias, window), core)
    length = x.shape[1]
    windows = None
    if return_windows is not False:
        positions = wanted_positions(return_windows, length)
        order = sorted(set(positions))
        windows = _windows_after(order, x, window, weight.shape[1], core)
        if positions != order:
            windows = windows[:, [order.index(t) for t in positions]]
    return ConvOutput(y, windows, _final_window(x, window, weight.shape[1] - 1, core))


def _final_window(x: Tensor, window: Tensor | None, columns: int, core: torch.dtype) -> Tensor:
    """The last inputs, as many as a window has columns. [batch, channel, width-1]"""
    batch, length, channels = x.shape
    if length >= columns:
        # a copy: a window kept for the next step must not keep the whole sequence alive
        return x[:, length - columns :].to(core, copy=True).mT.contiguous()
    if window is None:
        window = x.new_zeros(batch, channels, columns, dtype=core)
    return torch.cat([window[..., length:], x.to(core).mT], dim=-1)


def _windows_after(
    positions: list[int], x: Tensor, window: Tensor | None, width: int, core: torch.dtype
) -> Tensor:
    """The last width-1 inputs after each of these rising positions. [batch, wanted, channel, w-1]

    Column by column, so that no column has a row twice and its gradient is a sum of one.
    """
    batch, _, channels = x.shape
    columns = []
    for lag in range(width - 2, -1, -1):
        rows = [t - lag for t in positions]
        early = [r + width - 1 for r in rows if r < 0]
        late = torch.tensor([r for r in rows if r >= 0], dtype=torch.long, device=x.device)
        parts = [x.index_select(1, late).to(core)]
        if early and window is None:
            parts.insert(0, x.new_zeros(batch, len(early), channels, dtype=core))
        elif early:
            parts.insert(0, window[:, :, early].transpose(1, 2))
        columns.append(torch.cat(parts, dim=1))
    if not columns:
        return x.new_zeros(batch, len(positions), channels, 0, dtype=core)
    return torch.stack(columns, dim=-1)


def _grid(positions: int, channels: int) -> tuple[int, dict[str, int], int]:
    """Programs a document, the sizes of a tile, and its warps."""
    block_t = min(power_of_2(positions), TILE_T)
    block_c = min(power_of_2(channels), TILE_C)
    programs = -(-positions // block_t) * -(-channels // block_c)
    return (
        programs,
        {"BLOCK_T": block_t, "BLOCK_C": block_c},
        warps_for(block_t * block_c, per_thread=8),
    )


_CORES = {torch.float32: tl.float32, torch.float64: tl.float64}


class _KernelConv(torch.autograd.Function):
    """y, and the gradients of x, weight, bias and window."""

    @staticmethod
    def forward(ctx, x, weight, bias, window, core):  # type: ignore[no-untyped-def]
        batch, length, channels = x.shape
        y = torch.empty_like(x)
        programs, sizes, warps = _grid(length, channels)
        launch(
            short_conv_fwd_kernel,
            batch * programs,
            *(x, weight, bias, window, y, length, channels, weight.shape[1]),
            CORE=_CORES[core],
            num_warps=warps,
            **sizes,
        )
        ctx.save_for_backward(x, weight, window)
        ctx.core, ctx.bias_dtype = core, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):  # type: ignore[no-untyped-def]
        x, weight, window = ctx.saved_tensors
        (batch, length, channels), width, core = x.shape, weight.shape[1], ctx.core
        grad_y = grad_y.contiguous()
        counts = (length, channels, width)
        gx = torch.empty_like(x, dtype=core)
        gwindow = x.new_empty(batch, channels, width - 1, dtype=core)
        programs, sizes, warps = _grid(length + width - 1, channels)
        launch(
            short_conv_bwd_input_kernel,
            batch * programs,
            *(grad_y, weight, gx, gwindow, *counts),
            CORE=_CORES[core],
            num_warps=warps,
            **sizes,
        )
        programs, sizes, warps = _grid(length, channels)
        blocks = -(-length // sizes["BLOCK_T"])
        gweight = x.new_empty(batch * blocks, channels, width, dtype=core)
        gbias = x.new_empty(batch * blocks, channels, dtype=core)
        launch(
            short_conv_bwd_weight_kernel,
            batch * programs,
            *(grad_y, x, window, gweight, gbias, *counts),
            CORE=_CORES[core],
            num_warps=warps,
            **sizes,
        )
        return (
            gx.to(x.dtype),
            gweight.sum(0).to(weight.dtype),
            None if ctx.bias_dtype is None else gbias.sum(0).to(ctx.bias_dtype),
            None if window is None else gwindow,
            None,
        )

"""Recurrences over a matrix state by the Triton kernels: one autograd function for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hooked_ssm.ops.matrix_state_kernels import matrix_state_bwd_kernel, matrix_state_fwd_kernel
from hooked_ssm.ops.output import ScanOutput, StatesWanted, core_dtype
from hooked_ssm.ops.triton_launch import CHUNK, Slots, contiguous, launch, power_of_2, warps_for

TILE_BYTES = 8192
"""What a program holds of a state: 64 bytes a thread at 4 warps."""
MOST_FEATURES = 128
"""Key channels of a tile, unless the recurrence erases: then all of them."""


def matrix_state_scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    *,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    write: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_states: StatesWanted = False,
) -> ScanOutput:
    """Run S' = exp(a) S;  e = v - S'^T k;  S = S' + k (beta e)^T + write;  y = S^T q.

    Args:
        q: None reads nothing, y is the errors e. [batch, pos, group, feature]
        k: Head h reads q and k of group h // (heads / groups). [batch, pos, group, feature]
        v: None is zeros; then `beta` and `write` are given. [batch, pos, head, d_head]
        beta: Write strength, one per value or one for all; None erases nothing (e = v, beta = 1).
            [batch, pos, head, d_head or 1]
        log_decay: [batch, pos, head], or [batch, pos, head, feature]; None does not decay.
        write: Added to the state. [batch, pos, head, feature, d_head]
        initial_state: Zeros if None. [batch, head, feature, d_head]
    """
    given = [t for t in (q, k, v, beta, log_decay, write, initial_state) if t is not None]
    core = core_dtype(*given)
    like_values = v if v is not None else write[..., 0, :] if write is not None else k
    if beta is not None:
        beta = beta.expand(like_values.shape)
    if initial_state is not None:
        initial_state = initial_state.to(core)
    slots = Slots(return_states, k.shape[1], k.device)
    tensors = contiguous(k, q, v, beta, log_decay, write, initial_state)
    y, states, final = _KernelScan.apply(*tensors, like_values.shape, core, slots)
    return ScanOutput(y, slots.in_order(states), final)


class _Grid:
    """How a state is cut into tiles."""

    def __init__(self, features: int, width: int, erases: bool, core: torch.dtype):
        block_f = power_of_2(features)
        if not erases:
            block_f = min(block_f, MOST_FEATURES)
        block_d = min(power_of_2(width), max(TILE_BYTES // (core.itemsize * block_f), 1))
        self.tile = (block_f, block_d)
        self.f_tiles, self.d_tiles = -(-features // block_f), -(-width // block_d)
        self.warps = warps_for(block_f * block_d, per_thread=64 // core.itemsize)

    def constants(self, log_decay: Tensor | None) -> Mapping[str, Any]:
        """What the kernels are compiled for."""
        per_key = log_decay is not None and log_decay.ndim == 4
        block_f, block_d = self.tile
        return {"PER_KEY": per_key, "CHUNK": CHUNK, "BLOCK_F": block_f, "BLOCK_D": block_d}


class _KernelScan(torch.autograd.Function):
    """Forward and backward of the kernels on contiguous tensors."""

    @staticmethod
    def forward(ctx, k, q, v, beta, a, write, initial, shape, core, slots):  # type: ignore[no-untyped-def]
        (batch, length, heads, width), (groups, features) = shape, k.shape[2:]
        grid = _Grid(features, width, beta is not None, core)
        programs = batch * heads * grid.f_tiles * grid.d_tiles
        counts = (batch, length, heads, groups, features, width, slots.count)

        def new(*size: int) -> Tensor:
            return k.new_empty(size, dtype=core)

        wants_grad = any(ctx.needs_input_grad)
        checkpoints = new(programs, -(-length // CHUNK), *grid.tile) if wants_grad else None
        states = new(batch, slots.count, heads, features, width)
        final = new(batch, heads, features, width)
        y = None
        if v is not None:
            y = new(grid.f_tiles, *shape) if grid.f_tiles > 1 else v.new_empty(1, *shape)
        launch(
            matrix_state_fwd_kernel,
            programs,
            *(k, q, v, beta, a, write, initial, slots.of_position),
            *(y, states, checkpoints, final, *counts),
            num_warps=grid.warps,
            **grid.constants(a),
        )
        ctx.save_for_backward(k, q, v, beta, a, write, slots.of_position, checkpoints)
        ctx.counts, ctx.starts, ctx.core = counts, initial is not None, core
        ctx.set_materialize_grads(False)
        if y is not None:
            y = y[0] if grid.f_tiles == 1 else y.sum(0).to(v.dtype)
        return y, states, final

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y, grad_states, grad_final):  # type: ignore[no-untyped-def]
        k, q, v, beta, a, write, slot, checkpoints = ctx.saved_tensors
        batch, length, heads, groups, features, width, _ = ctx.counts
        grid = _Grid(features, width, beta is not None, ctx.core)

        def new(given: Tensor | None, *size: int) -> Tensor | None:
            return None if given is None else k.new_empty(size, dtype=ctx.core)

        rows = (batch, length, heads)
        constants = grid.constants(a)
        decays = (features,) if constants["PER_KEY"] else ()
        tiles = grid.d_tiles * (1 if constants["PER_KEY"] else grid.f_tiles)
        outgoing = [
            new(k, grid.d_tiles, *rows, features),
            new(q, grid.d_tiles, *rows, features),
            new(v, grid.f_tiles, *rows, width),
            new(beta, *rows, width),
            new(a, tiles, *rows, *decays),
            new(write, *rows, features, width),
            new(k, batch, heads, features, width),
        ]
        scratch = new(k, checkpoints.shape[0], CHUNK, *grid.tile)
        launch(
            matrix_state_bwd_kernel,
            checkpoints.shape[0],
            *(k, q, v, beta, a, write, None if grad_states is None else slot),
            *(checkpoints, scratch, *contiguous(grad_y, grad_states, grad_final)),
            *(*outgoing, *ctx.counts),
            num_warps=grid.warps,
            **constants,
        )
        gk, gq, gv, gbeta, ga, gwrite, ginitial = outgoing

        def of_groups(grad: Tensor | None) -> Tensor | None:
            """[tile, batch, pos, head, f] -> [batch, pos, group, f]"""
            return None if grad is None else grad.unflatten(3, (groups, -1)).sum((0, 4))

        gv, ga = (None if g is None else g.sum(0) for g in (gv, ga))
        grads = [of_groups(gk), of_groups(gq), gv, gbeta, ga, gwrite]
        grads = [
            None if g is None else g.to(t.dtype)
            for g, t in zip(grads, (k, q, v, beta, a, write), strict=True)
        ]
        return *grads, ginitial if ctx.starts else None, None, None, None

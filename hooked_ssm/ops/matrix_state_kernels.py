"""The Triton kernels of every recurrence whose state is a matrix [key, value].

    S'   = exp(a[t]) S[t-1]          a: none, one number per head, or one per key channel
    e[t] = v[t] - S'^T k[t]          only if it erases; else e = v and beta = 1
    S[t] = S' + k[t] (beta[t] e[t])^T + write[t]
    y[t] = S[t]^T q[t]               without q: the errors e[t]

Linear attention, Mamba-2 and GLA do not erase, the delta rules do. A program takes one head of one
document and a tile of its state through the sequence, in registers. Key channels f split into
tiles too, unless it erases: then e sums over all of them. What is missing is None: its lines fall
out when the kernel is compiled.

Layouts: q, k [batch][pos][group][f]; v, beta, e, y [batch][pos][head][d]; a [batch][pos][head] or
[..][f]; write [batch][pos][head][f][d]; states [batch][slot][head][f][d]. Sums over one axis come
per tile of it, [tile] in front. Checkpoints and scratch are tiles that only their program reads.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _token(
    k_ptr,
    v_ptr,
    beta_ptr,
    a_ptr,
    write_ptr,
    row,
    shared,
    f,
    d,
    features,
    width,
    CORE: tl.constexpr,
    PER_KEY: tl.constexpr,
):
    """What happens at one token, in the dtype of the states: k, v, beta, decay and write."""
    on_f, on_d = f < features, d < width
    k = tl.load(k_ptr + shared + f, mask=on_f, other=0.0).to(CORE)
    v = tl.zeros(d.shape, dtype=CORE)
    if v_ptr is not None:
        v = tl.load(v_ptr + row * width + d, mask=on_d, other=0.0).to(CORE)
    beta = 1.0
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + row * width + d, mask=on_d, other=0.0).to(CORE)
    decay = 1.0
    if a_ptr is not None:
        if PER_KEY:
            a = tl.load(a_ptr + row * features + f, mask=on_f, other=0.0).to(CORE)
            decay = tl.exp(a)[:, None]
        else:
            decay = tl.exp(tl.load(a_ptr + row).to(CORE))
    write = 0.0
    if write_ptr is not None:
        cell = f[:, None] * width + d[None, :]
        on = on_f[:, None] & on_d[None, :]
        write = tl.load(write_ptr + row * features * width + cell, mask=on, other=0.0).to(CORE)
    return k, v, beta, decay, write


@triton.jit
@no_type_check
def _step(before, k, v, beta, decay, write, ERASE: tl.constexpr):
    """One token forwards: the decayed state, the error, what is written of it, the new state."""
    kept = decay * before
    error = v
    written = v
    if ERASE:
        error = v - tl.sum(k[:, None] * kept, axis=0)
        written = beta * error
    return kept, error, written, kept + k[:, None] * written[None, :] + write


@triton.jit(do_not_specialize=["length"])
@no_type_check
def matrix_state_fwd_kernel(
    k_ptr,
    q_ptr,
    v_ptr,  # None: zeros
    beta_ptr,  # None: nothing is erased
    a_ptr,
    write_ptr,
    initial_ptr,  # None: zeros
    slot_ptr,  # None: no states wanted
    y_ptr,  # [tile of f]...; None: not wanted
    states_ptr,
    checkpoints_ptr,  # None: no gradient wanted
    final_ptr,
    batch,
    length,
    heads,
    groups,
    features,
    width,
    slots,
    PER_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    CORE: tl.constexpr = final_ptr.dtype.element_ty
    item = tl.program_id(0)
    f_tiles, d_tiles = tl.cdiv(features, BLOCK_F), tl.cdiv(width, BLOCK_D)
    f_tile = (item % f_tiles).to(tl.int64)
    head = item // (f_tiles * d_tiles) % heads
    b = (item // (f_tiles * d_tiles * heads)).to(tl.int64)
    group = head // (heads // groups)
    f = item % f_tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    d = item // f_tiles % d_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    on_f, on_d = f < features, d < width
    on = on_f[:, None] & on_d[None, :]
    cell = f[:, None] * width + d[None, :]
    tile = tl.arange(0, BLOCK_F)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    chunks = tl.cdiv(length, CHUNK)
    at_end = (b * heads + head) * features * width + cell

    state = tl.zeros((BLOCK_F, BLOCK_D), dtype=CORE)
    if initial_ptr is not None:
        state = tl.load(initial_ptr + at_end, mask=on, other=0.0)
    for chunk in range(0, chunks):
        if checkpoints_ptr is not None:
            kept_at = (item.to(tl.int64) * chunks + chunk) * BLOCK_F * BLOCK_D
            tl.store(checkpoints_ptr + kept_at + tile, state)
        first = chunk * CHUNK
        stop = tl.minimum(first + CHUNK, length)
        for t in tl.range(first, stop, num_stages=4):  # loads run three tokens ahead
            row = (b * length + t) * heads + head
            shared = ((b * length + t) * groups + group) * features
            k, v, beta, decay, write = _token(
                k_ptr,
                v_ptr,
                beta_ptr,
                a_ptr,
                write_ptr,
                row,
                shared,
                f,
                d,
                features,
                width,
                CORE,
                PER_KEY,
            )
            _, y, _, state = _step(state, k, v, beta, decay, write, beta_ptr is not None)
            if y_ptr is not None:
                if q_ptr is not None:
                    q = tl.load(q_ptr + shared + f, mask=on_f, other=0.0).to(CORE)
                    y = tl.sum(q[:, None] * state, axis=0)
                place = (f_tile * batch * length * heads + row) * width + d
                tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=on_d)
            if slot_ptr is not None:
                slot = tl.load(slot_ptr + t)
                place = ((b * slots + slot) * heads + head) * features * width + cell
                tl.store(states_ptr + place, state, mask=on & (slot >= 0))
    tl.store(final_ptr + at_end, state, mask=on)


@triton.jit(do_not_specialize=["length"])
@no_type_check
def matrix_state_bwd_kernel(
    k_ptr,
    q_ptr,
    v_ptr,
    beta_ptr,
    a_ptr,
    write_ptr,
    slot_ptr,  # None: no gradient of states came in
    checkpoints_ptr,
    scratch_ptr,
    gy_ptr,  # None: zeros, as are the next two
    gstates_ptr,
    gfinal_ptr,
    gk_ptr,  # [tile of d][batch][pos][head][f], as gq
    gq_ptr,
    gv_ptr,  # [tile of f][batch][pos][head][d]; None without v
    gbeta_ptr,  # [batch][pos][head][d]
    ga_ptr,  # [tile of d][batch][pos][head][f], or [tile of d][tile of f][batch][pos][head]
    gwrite_ptr,
    ginitial_ptr,
    batch,
    length,
    heads,
    groups,
    features,
    width,
    slots,
    PER_KEY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    CORE: tl.constexpr = ginitial_ptr.dtype.element_ty
    ERASE: tl.constexpr = beta_ptr is not None
    item = tl.program_id(0)
    f_tiles, d_tiles = tl.cdiv(features, BLOCK_F), tl.cdiv(width, BLOCK_D)
    f_tile = (item % f_tiles).to(tl.int64)
    d_tile = (item // f_tiles % d_tiles).to(tl.int64)
    head = item // (f_tiles * d_tiles) % heads
    b = (item // (f_tiles * d_tiles * heads)).to(tl.int64)
    group = head // (heads // groups)
    f = item % f_tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    d = item // f_tiles % d_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    on_f, on_d = f < features, d < width
    on = on_f[:, None] & on_d[None, :]
    cell = f[:, None] * width + d[None, :]
    tile = tl.arange(0, BLOCK_F)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    chunks = tl.cdiv(length, CHUNK)
    at_end = (b * heads + head) * features * width + cell
    scratch_ptr += item.to(tl.int64) * CHUNK * BLOCK_F * BLOCK_D

    g = tl.zeros((BLOCK_F, BLOCK_D), dtype=CORE)
    if gfinal_ptr is not None:
        g = tl.load(gfinal_ptr + at_end, mask=on, other=0.0)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        first = chunk * CHUNK
        tokens = tl.minimum(CHUNK, length - first)
        # forwards once more, for the state before each token of the chunk
        state = tl.load(
            checkpoints_ptr + (item.to(tl.int64) * chunks + chunk) * BLOCK_F * BLOCK_D + tile
        )
        tl.debug_barrier()  # the chunk after this one has been read
        for i in tl.range(0, tokens, num_stages=4):
            tl.store(scratch_ptr + i * BLOCK_F * BLOCK_D + tile, state)
            at = b * length + first + i
            k, v, beta, decay, write = _token(
                k_ptr,
                v_ptr,
                beta_ptr,
                a_ptr,
                write_ptr,
                at * heads + head,
                (at * groups + group) * features,
                f,
                d,
                features,
                width,
                CORE,
                PER_KEY,
            )
            _, _, _, state = _step(state, k, v, beta, decay, write, ERASE)
        tl.debug_barrier()  # the states of this one are written
        for ahead in range(0, tokens):
            i = tokens - 1 - ahead
            at = b * length + first + i
            row = at * heads + head
            shared = (at * groups + group) * features
            # gradients of q, k, a per tile of d, of v per tile of f, not summed over a group
            per_key = (d_tile * batch * length * heads + row) * features + f
            per_value = (f_tile * batch * length * heads + row) * width + d
            k, v, beta, decay, write = _token(
                k_ptr,
                v_ptr,
                beta_ptr,
                a_ptr,
                write_ptr,
                row,
                shared,
                f,
                d,
                features,
                width,
                CORE,
                PER_KEY,
            )
            before = tl.load(scratch_ptr + i * BLOCK_F * BLOCK_D + tile)
            kept, error, written, state = _step(before, k, v, beta, decay, write, ERASE)
            if slot_ptr is not None:
                slot = tl.load(slot_ptr + first + i)
                place = ((b * slots + slot) * heads + head) * features * width + cell
                g += tl.load(gstates_ptr + place, mask=on & (slot >= 0), other=0.0)
            gy = tl.zeros((BLOCK_D,), dtype=CORE)
            if gy_ptr is not None:
                gy = tl.load(gy_ptr + row * width + d, mask=on_d, other=0.0).to(CORE)
            if q_ptr is not None:
                q = tl.load(q_ptr + shared + f, mask=on_f, other=0.0).to(CORE)
                tl.store(gq_ptr + per_key, tl.sum(state * gy[None, :], axis=1), mask=on_f)
                g += q[:, None] * gy[None, :]
            if gwrite_ptr is not None:
                tl.store(gwrite_ptr + row * features * width + cell, g, mask=on)
            gv = tl.sum(g * k[:, None], axis=0)  # of what is written
            gk = tl.sum(g * written[None, :], axis=1)
            if ERASE:
                tl.store(gbeta_ptr + row * width + d, gv * error, mask=on_d)
                gv = gv * beta  # of the error
                if q_ptr is None:
                    gv += gy
                gk -= tl.sum(kept * gv[None, :], axis=1)
                g -= k[:, None] * gv[None, :]
            if gv_ptr is not None:
                tl.store(gv_ptr + per_value, gv, mask=on_d)
            tl.store(gk_ptr + per_key, gk, mask=on_f)
            if ga_ptr is not None:
                ga = tl.sum(g * kept, axis=1)
                if PER_KEY:
                    tl.store(ga_ptr + per_key, ga, mask=on_f)
                else:
                    place = (d_tile * f_tiles + f_tile) * batch * length * heads + row
                    tl.store(ga_ptr + place, tl.sum(ga, axis=0))
            g = g * decay
    tl.store(ginitial_ptr + at_end, g, mask=on)

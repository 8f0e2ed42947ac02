"""Mamba-1's selective scan. README.md derives it; `reference.py` is the specification."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.dispatch import Backends, Impl
from hooked_ssm.ops.output import ScanOutput, StatesWanted
from hooked_ssm.ops.selective_scan.cpu import selective_scan_cpu
from hooked_ssm.ops.selective_scan.reference import selective_scan_reference

BACKENDS = Backends(
    "selective_scan",
    selective_scan_reference,
    selective_scan_cpu,
    "hooked_ssm.ops.selective_scan.triton:selective_scan_triton",
)


def selective_scan(
    x: Float[Tensor, "batch pos d_inner"],
    dt: Float[Tensor, "batch pos d_inner"],
    A: Float[Tensor, "d_inner d_state"],
    B: Float[Tensor, "batch pos *group d_state"],
    C: Float[Tensor, "batch pos *group d_state"],
    *,
    initial_state: Float[Tensor, "batch d_inner d_state"] | None = None,
    return_states: StatesWanted = False,
    impl: Impl = "auto",
) -> ScanOutput:
    """Run the Mamba-1 recurrence and return outputs, states and the final state.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t];   y[t] = C[t] . h[t]

    Args:
        x: Values. [batch, pos, d_inner]
        dt: Step size after softplus, >= 0 (0 keeps the state). [batch, pos, d_inner]
        A: Decay rates, < 0. [d_inner, d_state]
        B: How values are written; with groups, channel c uses group c // (d_inner / groups).
            [batch, pos, d_state] or [batch, pos, group, d_state]
        C: How the state is read; shaped like B.
        initial_state: h[-1]; zeros if None. [batch, d_inner, d_state]
        return_states: False, True for every position, or the positions wanted.
        impl: See `hooked_ssm.ops.use_impl`.

    Returns:
        `ScanOutput`; states[:, t] is h *after* token t, float32 (float64 for float64 inputs).

    Raises:
        ShapeError: The shapes do not fit each other.
        KernelUnavailableError: impl="triton" where it cannot run.

    Source: Gu & Dao 2023, Algorithm 2; Euler step for B, as in the authors' code.
    """
    B, C = (t.unsqueeze(2) if t.ndim == 3 else t for t in (B, C))
    _check(x, dt, A, B, C, initial_state)
    scan = BACKENDS.pick(impl, x.device)
    return scan(x, dt, A, B, C, initial_state, return_states)


def selective_scan_pattern(
    decay: Float[Tensor, "batch pos d_inner d_state"],
    write_per_value: Float[Tensor, "batch pos d_inner d_state"],
    C: Float[Tensor, "batch pos d_state"],
) -> Float[Tensor, "batch d_inner query_pos key_pos"]:
    """Return the exact token-mixing matrix per channel: pattern @ x = y from a zero state.

    pattern[t, s] = sum_n C[t, n] (prod_{s < r <= t} decay[r, n]) (dt[s] B[s, n]),  s <= t

    Args:
        decay: exp(dt A), or whatever it was edited to.
        write_per_value: dt B: what one unit of value writes.
        C: How the state is read.

    Source: Ali et al. 2024, The Hidden Attention of Mamba, eq. 11, without approximation.
    """
    length = decay.shape[1]
    reach = decay.new_zeros(*decay.shape[:1], *decay.shape[2:], 0)  # [batch, d_inner, n, key]
    rows = []
    for t, (a, w, c) in enumerate(
        zip(decay.unbind(1), write_per_value.unbind(1), C.unbind(1), strict=True)
    ):
        reach = torch.cat([reach * a[..., None], w[..., None]], dim=-1)
        row = torch.einsum("bn,benk->bek", c, reach)
        rows.append(torch.nn.functional.pad(row, (0, length - 1 - t)))
    return torch.stack(rows, dim=2)


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None
) -> None:
    def fits(name: str, got: Tensor, *want: int) -> None:
        if tuple(got.shape) != want:
            raise ShapeError(f"selective_scan: {name} has shape {tuple(got.shape)}, want {want}")

    if x.ndim != 3 or x.shape[1] == 0:
        raise ShapeError(
            f"selective_scan: x has shape {tuple(x.shape)}, want [batch, pos >= 1, d_inner]"
        )
    batch, length, channels = x.shape
    n = A.shape[-1]
    groups = B.shape[2] if B.ndim == 4 else 1
    if channels % groups:
        raise ShapeError(f"selective_scan: {groups} groups do not divide {channels} channels")
    fits("dt", dt, batch, length, channels)
    fits("A", A, channels, n)
    fits("B", B, batch, length, groups, n)
    fits("C", C, batch, length, groups, n)
    if initial_state is not None:
        fits("initial_state", initial_state, batch, channels, n)

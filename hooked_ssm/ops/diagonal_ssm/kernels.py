"""Discretisation of a diagonal SSM, and the filters that it and the shift SSM apply."""

from __future__ import annotations

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from hooked_ssm.errors import ShapeError
from hooked_ssm.ops.arguments import bind_axes

Modes = Complex[Tensor, "channel mode"]
Filter = Float[Tensor, "channel tap"]


def discretise_bilinear(A: Modes, B: Modes, dt: Float[Tensor, " channel"]) -> tuple[Modes, Modes]:
    """Return dA = (1 + dt A/2) / (1 - dt A/2) and dB = dt B / (1 - dt A/2).

    |dA| < 1 wherever the real part of A is negative, whatever dt.

    Args:
        A, B: Diagonal and input weights of the continuous system. [channel, mode]
        dt: Step size, > 0. [channel]
    Raises:
        ShapeError: Shapes that do not fit.
    Source: Tustin's rule, as H3 (Fu et al. 2023) uses it.
    """
    bind_axes(
        "discretise_bilinear",
        {"A": (A.real, "channel mode"), "B": (B.real, "channel mode"), "dt": (dt, "channel")},
    )
    half = dt.unsqueeze(-1) * A / 2
    return (1 + half) / (1 - half), dt.unsqueeze(-1) * B / (1 - half)


def diagonal_kernel(dA: Modes, dB: Modes, C: Modes, length: int) -> Filter:
    """Return the filter that the diagonal SSM applies: filter[:, l] = 2 Re sum_n C dA^l dB.

    Convolving with it gives `diagonal_ssm` from zero state. Work O(length mode), memory
    O(sqrt(length) mode) a channel. It equals the recurrence as long as the filter is not cut
    shorter than the sequence.

    Args:
        dA, dB, C: [channel, mode]
        length: Taps wanted, >= 1.
    Raises:
        ShapeError: Shapes that do not fit, or length < 1.
    """
    axes = "channel mode"
    bind_axes(
        "diagonal_kernel", {"dA": (dA.real, axes), "dB": (dB.real, axes), "C": (C.real, axes)}
    )
    _require_taps("diagonal_kernel", length)
    block = math.isqrt(length - 1) + 1
    within = powers(dA, block + 1)  # dA^l = (dA^block)^i dA^j: every i times every j is a product
    across = powers(within[:, block], -(-length // block)) * (C * dB).unsqueeze(1)
    filter = read_weights(across) @ as_reals(within[:, :block]).mT
    return filter.flatten(1)[:, :length]


def shift_kernel(
    B: Float[Tensor, "channel slot"], C: Float[Tensor, "channel slot"], length: int
) -> Filter:
    """Return the filter that the shift SSM applies: filter[:, l] = sum_n B[n] C[n+l].

    The shift SSM moves its state on by one slot a step, adds B u and reads C . state after that.
    What leaves the last slot is gone, so the taps from the number of slots on are 0.

    Args:
        B, C: Where an input enters, and how each slot is read. [channel, slot]
        length: Taps wanted, >= 1.
    Raises:
        ShapeError: Shapes that do not fit, or length < 1.
    Source: H3 (Fu et al. 2023).
    """
    slots = bind_axes("shift_kernel", {"B": (B, "channel slot"), "C": (C, "channel slot")})["slot"]
    _require_taps("shift_kernel", length)
    spectrum = torch.fft.rfft(B, n=2 * slots).conj() * torch.fft.rfft(C, n=2 * slots)
    taps = torch.fft.irfft(spectrum, n=2 * slots)[:, : min(slots, length)]
    return torch.nn.functional.pad(taps, (0, length - taps.shape[1]))


def powers(base: Tensor, count: int) -> Tensor:
    """base^0 .. base^(count-1), by doubling. [channel, mode] -> [channel, count, mode]

    No logarithm: a base of 0 and its gradient are exact, and there is no branch cut.
    """
    found, step = torch.ones_like(base).unsqueeze(1), base.unsqueeze(1)
    while found.shape[1] < count:
        found = torch.cat([found, found * step], dim=1)
        step = step * step
    return found[:, :count]


def as_reals(x: Tensor) -> Tensor:
    """Complex modes as real and imaginary parts side by side. [..., mode] -> [..., 2 mode]"""
    return torch.view_as_real(x).flatten(-2)


def as_complex(x: Tensor) -> Tensor:
    """Undo `as_reals`. [..., 2 mode] -> [..., mode]"""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def read_weights(weights: Tensor) -> Tensor:
    """Real w with w . as_reals(x) = 2 Re(weights . x). [..., mode] -> [..., 2 mode]"""
    return 2 * as_reals(weights.conj().resolve_conj())


def _require_taps(op: str, length: int) -> None:
    if length < 1:
        raise ShapeError(f"{op}: length is {length}, wanted at least 1")

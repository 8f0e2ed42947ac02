"""H3's two state space models: the keys' shift SSM, and the parameters of the diagonal one."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooked_ssm.hook_points import HookFamily, cut_points
from hooked_ssm.ops.diagonal_ssm import discretise_bilinear, shift_kernel
from hooked_ssm.ops.long_conv import long_conv
from hooked_ssm.ops.output import core_dtype


class ShiftSSM(nn.Module):
    """y[t] = sum_l filter[:, l] k[t-l] + D k[t], filter[:, l] = sum_n B[:, n] C[:, n+l].

    Its state would be its last inputs, mixed by B; the window of inputs carried here is the same
    and, like a convolution's, shows what was in which position.
    """

    def __init__(self, channels: int, slots: int, n_ctx: int):
        super().__init__()
        self.taps = min(slots, n_ctx)
        self.B = nn.Parameter(torch.empty(channels, slots))
        self.C = nn.Parameter(torch.empty(channels, slots))
        self.D = nn.Parameter(torch.empty(channels))
        self.B._no_weight_decay = True  # type: ignore[attr-defined]

    def initialise(self, generator: torch.Generator) -> None:
        """B = e_1, C uniform as a convolution's taps, D ~ N(0, 1)."""
        bound = 1 / math.sqrt(self.C.shape[1])
        with torch.no_grad():
            self.B.zero_()[:, 0] = 1
            self.C.uniform_(-bound, bound, generator=generator)
            self.D.normal_(generator=generator)

    def filter(self) -> Tensor:
        """All taps that can act, without the skip. [channel, tap]"""
        core = core_dtype(self.B)
        return shift_kernel(self.B.to(core), self.C.to(core), self.taps)

    def forward(
        self,
        x: Tensor,
        carry: HookFamily,
        start: int,
        window: Tensor | None = None,
        last: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run on [batch, pos, channel], cut where somebody listens to the window.

        Arguments and result as in `ShortConvolution`; the window is [batch, channel, taps-1], and
        is not moved on to the end of the `last` segment, where nobody asks for it.
        """
        filter, outputs = self.filter(), []
        for first, stop, position in cut_points(carry, start, x.shape[1]):
            part = x[:, first:stop]
            history = None if window is None else window.transpose(1, 2)
            outputs.append(long_conv(part, filter, skip=self.D, history=history))
            if position is None and last:
                break
            window = self._moved_on(window, part.transpose(1, 2).to(filter.dtype))
            if position is not None:
                window = carry.visit(position, window)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), window

    def _moved_on(self, window: Tensor | None, new: Tensor) -> Tensor:
        """The window after new inputs; padded with zeros before the first input."""
        seen = new if window is None else torch.cat([window, new], dim=-1)
        missing = self.taps - 1 - seen.shape[-1]
        return F.pad(seen, (missing, 0))  # a negative padding cuts off what has left the window


class Modes(NamedTuple):
    """The diagonal SSM's discrete parameters, complex. [head, mode] each"""

    dA: Tensor
    dB: Tensor
    C: Tensor


class DiagonalModes(nn.Module):
    """Parameters of one diagonal SSM per head: A = -exp(A_real_log) + i A_imag, B, C, dt, skip D.

    B and C are stored as pairs of real and imaginary part.
    """

    def __init__(self, heads: int, modes: int):
        super().__init__()
        self.log_dt = nn.Parameter(torch.empty(heads))
        self.A_real_log = nn.Parameter(torch.empty(heads, modes))
        self.A_imag = nn.Parameter(torch.empty(heads, modes))
        self.B = nn.Parameter(torch.empty(heads, modes, 2))
        self.C = nn.Parameter(torch.empty(heads, modes, 2))
        self.D = nn.Parameter(torch.empty(heads))
        for parameter in (self.log_dt, self.A_real_log, self.A_imag, self.B):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def initialise(self, dt_min: float, dt_max: float, generator: torch.Generator) -> None:
        """A[n] = -1/2 + i pi n, B = 1, C and D ~ N(0, 1), dt log-uniform in [dt_min, dt_max].

        Source: S4D-Lin (Gu et al. 2022), as H3 uses it.
        """
        with torch.no_grad():
            self.log_dt.uniform_(math.log(dt_min), math.log(dt_max), generator=generator)
            self.A_real_log.fill_(math.log(0.5))
            self.A_imag.copy_(math.pi * torch.arange(self.A_imag.shape[1]))
            self.B.copy_(torch.tensor([1.0, 0.0]))
            self.C.normal_(0, math.sqrt(0.5), generator=generator)
            self.D.normal_(generator=generator)

    def discrete(self) -> Modes:
        """The modes of the recurrence, in complex64 or complex128."""
        core = core_dtype(self.log_dt)
        A = torch.complex(-self.A_real_log.to(core).exp(), self.A_imag.to(core))
        B, C = (torch.view_as_complex(pairs.to(core)) for pairs in (self.B, self.C))
        return Modes(*discretise_bilinear(A, B, self.log_dt.to(core).exp()), C)

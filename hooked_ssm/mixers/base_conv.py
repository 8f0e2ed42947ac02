"""BaseConv: a gated convolution, short or implicit and long (Arora et al. 2023, Zoology)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm.checks import Count
from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.layers import Linear
from hooked_ssm.mixers.base import Carried, Mixer, MixerOptions, Segment
from hooked_ssm.mixers.convolution import ShortConvolution, conv_carry_spec
from hooked_ssm.mixers.implicit_filter import ImplicitFilter
from hooked_ssm.ops.causal import mix_channels
from hooked_ssm.ops.long_conv import long_conv, toeplitz


@dataclass(frozen=True, kw_only=True)
class BaseConvOptions(MixerOptions):
    """Settings of BaseConv.

    Attributes:
        kernel_size: Width of the convolution, or "long" for an implicit filter as long as n_ctx.
        filter_order: Hidden width of the network that makes the long filter.
        act: Whether SiLU follows the convolution and the gate (the paper has none).
    """

    kernel_size: Count | Literal["long"] = 3
    filter_order: Count = 16
    act: bool = False


class BaseConv(Mixer):
    """y = conv(u) * (W u + b) + u; the skip of its own input is part of the mixer."""

    Options = BaseConvOptions
    absent_roles = {
        role: "a convolution keeps earlier inputs (hook_conv_carry if it is short), not a state"
        for role in ("state", "carry", "write", "decay", "key")
    }
    options: BaseConvOptions

    def __init__(self, d_model: int, n_ctx: int, options: BaseConvOptions):
        super().__init__(d_model, n_ctx, options)
        self.max_length = n_ctx if self.is_long else None
        self.projection = Linear(d_model, d_model)
        self.conv: ShortConvolution | ImplicitFilter = (
            ImplicitFilter(d_model, n_ctx, options.filter_order)
            if self.is_long
            else ShortConvolution(d_model, int(options.kernel_size))
        )

    @property
    def is_long(self) -> bool:
        """Whether the filter is as long as the context."""
        return self.options.kernel_size == "long"

    def axis_sizes(self) -> dict[str, int]:
        taps = self.n_ctx if self.is_long else int(self.options.kernel_size)
        return {"d_model": self.d_model, "tap": taps, "earlier": taps - 1}

    def hook_specs(self) -> tuple[HookSpec, ...]:
        long = self.is_long
        convolution = spec("hook_filter", "d_model tap") if long else conv_carry_spec("d_model")
        # With activations the mixer is not linear in its input: it has no token-mixing matrix.
        axes = "batch d_model query_pos key_pos"
        linear = (spec("hook_pattern", axes, "pattern", numbers="model"),)
        return (
            convolution,
            spec("hook_conv", "batch pos d_model", "conv"),
            spec("hook_gate", "batch pos d_model", "query", "gate"),
            *(() if self.options.act else linear),
            spec("hook_y", "batch pos d_model", "mixed"),
        )

    def initialise(self, generator: torch.Generator) -> None:
        super().initialise(generator)
        if isinstance(self.conv, ShortConvolution):
            self.conv.initialise(generator)

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        u = segment.keep_real(x)
        conv, carried, taps = self._convolve(u, segment.start, carried)
        conv, gate = self.hook_conv(conv), self.hook_gate(self.projection(u))
        if self.options.act:  # after the hook points, as in Mamba
            conv, gate = F.silu(conv), F.silu(gate)
        y = conv * gate + u
        if not self.options.act and self.hook_pattern.listened:
            y = y + self._pattern_difference(u, gate, taps)
        return self.hook_y(y), carried

    def _convolve(
        self, u: Tensor, start: int, carried: Carried | None
    ) -> tuple[Tensor, Carried, Tensor]:
        """The convolution, what it carries on, and its taps, first on the current token."""
        if isinstance(self.conv, ShortConvolution):
            window = None if carried is None else carried["window"]
            y, window = self.conv(u, self.hook_conv_carry, start, window)
            return y, {"window": window}, self.conv.weight.flip(-1)
        history = None if carried is None else carried["inputs"]
        inputs = u if history is None else torch.cat([history, u], dim=1)
        taps = self.hook_filter(self.conv(inputs.shape[1]))
        ones = taps.new_ones(self.d_model)
        y = long_conv(u, taps, skip=ones, history=history)
        unit = F.one_hot(torch.zeros(1, dtype=torch.long, device=u.device), taps.shape[1])
        return y, {"inputs": inputs}, taps + unit

    def _pattern_difference(self, u: Tensor, gate: Tensor, taps: Tensor) -> Tensor:
        """What an edit of the pattern changes in the outputs; zero without an edit."""
        length = u.shape[1]
        pattern = torch.einsum("bqm,mqk->bmqk", gate, toeplitz(taps, length).to(gate.dtype))
        pattern = pattern + torch.eye(length, device=u.device, dtype=pattern.dtype)
        hooked = self.hook_pattern(pattern.clone())
        return mix_channels(hooked - pattern, u)

    def pattern_offset(self, activation: Callable[[str], Tensor]) -> Tensor | float:
        """The short convolution's bias times the gate: it depends on no value."""
        if self.is_long or self.conv.bias is None:
            return 0.0
        return activation("hook_gate") * self.conv.bias

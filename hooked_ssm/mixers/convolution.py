"""The causal depthwise short convolution that many mixers share; its window is state too."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hooked_ssm.hook_names import HookSpec, spec
from hooked_ssm.hook_points import HookFamily, cut_points
from hooked_ssm.ops.short_conv import short_conv


def conv_carry_spec(channels: str) -> HookSpec:
    """Return the spec of the window handed on after token t. [batch, channels, earlier]"""
    return spec("hook_conv_carry", f"batch {channels} earlier", per_position=True)


class ShortConvolution(nn.Module):
    """y[t] = sum_i weight[:, i] x[t - width + 1 + i] + bias; the last tap is the current token."""

    def __init__(self, channels: int, width: int, *, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def initialise(self, generator: torch.Generator) -> None:
        """Draw weight and bias from U(-1/sqrt(width), 1/sqrt(width)), as torch's Conv1d does."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        with torch.no_grad():
            self.weight.uniform_(-bound, bound, generator=generator)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound, generator=generator)

    def forward(
        self, x: Tensor, carry: HookFamily, start: int, window: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve, cut where somebody listens to the window.

        Args:
            x: Input. [batch, pos, channel]
            carry: The hook points of the window, one per position.
            start: Position of the first token.
            window: The inputs before it, oldest first; zeros if None. [batch, channel, width-1]

        Returns:
            Output [batch, pos, channel] and the window after the last token.
        """
        outputs = []
        for first, stop, position in cut_points(carry, start, x.shape[1]):
            y, _, window = short_conv(
                x[:, first:stop], self.weight, self.bias, initial_window=window
            )
            if position is not None:
                window = carry.visit(position, window)
            outputs.append(y)
        assert window is not None, "a segment has at least one token"
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), window

"""Short convolutions on queries, keys and values side by side, with one window between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hooked_ssm.hook_points import HookFamily, cut_points
from hooked_ssm.mixers.convolution import ShortConvolution
from hooked_ssm.ops.short_conv import short_conv


class QKVConvolution(nn.Module):
    """Three depthwise `ShortConvolution`s without bias, run as one: channels are q, k, v in turn.

    Args:
        channels: Of queries, keys and values.
        width: Number of taps.
    """

    def __init__(self, channels: Sequence[int], width: int):
        super().__init__()
        self.channels = tuple(channels)
        self.q, self.k, self.v = (ShortConvolution(n, width, bias=False) for n in channels)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw all weights; see `ShortConvolution`."""
        for part in (self.q, self.k, self.v):
            part.initialise(generator)

    def forward(
        self, x: Tensor, carry: HookFamily, start: int, window: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve, cut where somebody listens to the window; see `ShortConvolution.forward`.

        Args:
            x: Queries, keys and values in one axis. [batch, pos, channel]

        Returns:
            Output [batch, pos, channel] and the window after the last token.
        """
        weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
        outputs = []
        for first, stop, position in cut_points(carry, start, x.shape[1]):
            y, _, window = short_conv(x[:, first:stop], weight, initial_window=window)
            if position is not None:
                window = carry.visit(position, window)
            outputs.append(y)
        assert window is not None, "a segment has at least one token"
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), window

    def slices(self, joint: Tensor) -> list[Tensor]:
        """Queries, keys and values out of the joint channels.

        Slices, not a split: torch lets hooks edit those in place.
        """
        queries, keys, _ = self.channels
        return [
            joint[..., :queries],
            joint[..., queries : queries + keys],
            joint[..., queries + keys :],
        ]

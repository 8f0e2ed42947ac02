"""What a short convolution returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ConvOutput(NamedTuple):
    """Outputs of a short convolution.

    Attributes:
        y: In the dtype of x. [batch, pos, channel]
        windows: The last width-1 inputs *after* the token at each wanted position, oldest first,
            in the order asked for; None if none was wanted. [batch, wanted, channel, width-1]
        final_window: The window after the last token. [batch, channel, width-1]
    """

    y: Tensor
    windows: Tensor | None
    final_window: Tensor

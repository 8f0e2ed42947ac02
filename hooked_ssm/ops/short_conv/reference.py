"""Short convolution, one token at a time: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from hooked_ssm.ops.output import StatesWanted, core_dtype, gather_states
from hooked_ssm.ops.short_conv.output import ConvOutput


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_window: Tensor | None,
    return_windows: StatesWanted,
) -> ConvOutput:
    """window[t] = window[t-1] shifted by one, x[t] last; y[t] = sum over taps + bias."""
    dtype = core_dtype(x, weight)
    taps = weight.to(dtype)
    window = (
        x.new_zeros(x.shape[0], x.shape[2], weight.shape[1] - 1, dtype=dtype)
        if initial_window is None
        else initial_window.to(dtype)
    )
    outputs, windows = [], []
    for x_t in x.to(dtype).unbind(1):
        seen = torch.cat([window, x_t[..., None]], dim=-1)  # [batch, channel, tap]
        y_t = (seen * taps).sum(-1)
        outputs.append(y_t if bias is None else y_t + bias.to(dtype))
        window = seen[..., 1:]
        windows.append(window)
    y = torch.stack(outputs, dim=1).to(x.dtype)
    return ConvOutput(y, gather_states(windows, return_windows), window)

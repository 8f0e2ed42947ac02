"""Long convolution, one tap at a time: the specification."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm.ops.output import core_dtype


def long_conv_reference(
    u: Tensor, filter: Tensor, skip: Tensor | None, history: Tensor | None
) -> Tensor:
    """Add up the inputs delayed by each lag, times the tap at that lag."""
    dtype = core_dtype(u, filter)
    seen = u if history is None else torch.cat([history.to(u.dtype), u], dim=1)
    seen = seen.to(dtype)
    y = torch.zeros_like(seen)
    for lag, tap in enumerate(filter.to(dtype).unbind(1)[: seen.shape[1]]):
        y = y + tap * F.pad(seen, (0, 0, lag, 0))[:, : seen.shape[1]]
    if skip is not None:
        y = y + skip.to(dtype) * seen
    return y[:, seen.shape[1] - u.shape[1] :].to(u.dtype)

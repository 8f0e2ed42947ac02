"""Products with a causal matrix, whose zeros stop NaN and infinity too.

In a plain product 0 * NaN is NaN, so one bad token would spoil every earlier output. Whether one
did shows in the first position, which then holds a bad number whatever is wrong later: only that
position is looked at, and only if it is bad is the product computed again with care. On a GPU
nobody looks, which would wait for the device: there a bad number reaches its whole chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_spoilt(y: Tensor, axis: int) -> bool:
    """Whether the first position along an axis holds NaN or infinity."""
    return y.device.type == "cpu" and not bool(y.detach().select(axis, 0).isfinite().all())


def causal_product(pattern: Tensor, values: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return pattern @ values; what a query does not see takes no part, whatever it holds.

    Args:
        pattern: Zero where nothing is seen. [..., query, key]
        values: [..., key, width]
        seen: What each query sees, True or False; None: itself and everything before it, the last
            query being the last key. [..., query, key]
    """
    y = pattern @ values
    if not is_spoilt(y, -2):
        return y
    queries, keys = pattern.shape[-2:]
    if seen is None:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=pattern.device)
        seen = ones.tril(keys - queries)
    finite = values.isfinite()
    y = pattern.where(seen, 0) @ values.where(finite, 0)
    met = seen.to(values.dtype) @ (~finite).to(values.dtype)
    return y.masked_fill(met > 0, torch.nan)


def mix_heads(pattern: Tensor, v: Tensor) -> Tensor:
    """pattern @ v per head, in the dtype of v.

    Args:
        pattern: [batch, head, query_pos, key_pos]
        v: [batch, pos, head, d_head]
    """
    mixed = causal_product(pattern, v.to(pattern.dtype).transpose(1, 2))
    return mixed.transpose(1, 2).to(v.dtype)


def mix_channels(pattern: Tensor, v: Tensor) -> Tensor:
    """pattern @ v per channel, in the dtype of v.

    Args:
        pattern: [batch, channel, query_pos, key_pos]
        v: [batch, pos, channel]
    """
    mixed = causal_product(pattern, v.to(pattern.dtype).transpose(1, 2)[..., None])
    return mixed[..., 0].transpose(1, 2).to(v.dtype)

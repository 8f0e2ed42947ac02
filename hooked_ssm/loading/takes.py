"""How a tensor of ours is taken out of one that is packed, transposed or shaped otherwise."""

from __future__ import annotations

from torch import Tensor

from hooked_ssm.loading.layouts import Take


def rows(part: int, parts: int) -> Take:
    """Take one of several equal blocks of rows."""
    return lambda packed: packed.unflatten(0, (parts, -1))[part]


def rows_per_head(part: int, parts: int, n_heads: int) -> Take:
    """Take one of several equal blocks of rows, packed within each head (GPT-NeoX)."""
    return lambda packed: packed.unflatten(0, (n_heads, parts, -1))[:, part].flatten(0, 1)


def transposed(weight: Tensor) -> Tensor:
    """Turn GPT-2's [in, out] weights into [out, in]; leave biases."""
    return weight.T if weight.ndim == 2 else weight


def transposed_rows(part: int, parts: int) -> Take:
    """Take one of several equal blocks of GPT-2's output columns, as rows."""
    return lambda packed: rows(part, parts)(transposed(packed))


def depthwise(weight: Tensor) -> Tensor:
    """Drop the middle axis of a depthwise convolution's weights [channel, 1, tap]; leave biases."""
    return weight.squeeze(1) if weight.ndim == 3 else weight


def unbatched(tensor: Tensor) -> Tensor:
    """Drop a leading axis of one."""
    return tensor.squeeze(0)


def squeezed(tensor: Tensor) -> Tensor:
    """Make a vector of a tensor whose other axes are of one."""
    return tensor.flatten() if tensor.numel() == max(tensor.shape, default=0) else tensor


def per_head(n_heads: int) -> Take:
    """Give a vector over heads, or over all heads' channels, a head axis. [head, one or channel]"""
    return lambda vector: vector.unflatten(0, (n_heads, -1))

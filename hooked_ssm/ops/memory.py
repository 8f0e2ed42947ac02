"""Huge pages under large tensors: faulting in small pages costs as much as filling them."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

from torch import Tensor

LARGE = 1 << 24
"""Bytes from which huge pages pay."""
_MADV_HUGEPAGE = 14
_PAGE = 4096


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's madvise, on Linux."""
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def large_empty(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialised tensor of `like`'s dtype and device, under huge pages if large.

    The kernel is only asked: without huge pages nothing but speed is lost.
    """
    tensor = like.new_empty(*shape)
    size = tensor.numel() * tensor.element_size()
    madvise = _madvise()
    if size >= LARGE and tensor.device.type == "cpu" and madvise is not None:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        last = (tensor.data_ptr() + size) // _PAGE * _PAGE
        madvise(first, last - first, _MADV_HUGEPAGE)
    return tensor


def large_clone(x: Tensor) -> Tensor:
    """Return a contiguous copy that carries no gradient."""
    return large_empty(x, *x.shape).copy_(x.detach())

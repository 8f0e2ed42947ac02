"""From whatever holds numbers to a float numpy array that plotly can draw.

Plots take tensors of any dtype, device and grad state, numpy arrays and nested lists; `ArrayLike`
is that union. Shapes are named in docstrings and checked in the functions, because lists have no
shape for a type checker to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hooked_ssm.errors import ShapeError

Number: TypeAlias = float | int  # spelled out: beartype does not take an int for a float
Limits: TypeAlias = tuple[Number, Number]
ArrayLike: TypeAlias = Tensor | np.ndarray | Sequence[Any] | Number


def to_numpy(x: ArrayLike) -> np.ndarray:
    """Return `x` as a detached float array on the CPU: float64 stays, all else becomes float32.

    Raises:
        ShapeError: The values are ragged, complex or not numbers.
    """
    if isinstance(x, (list, tuple)) and any(isinstance(item, Tensor) for item in x):
        x = np.stack([to_numpy(item) for item in x])
    if isinstance(x, Tensor):
        # numpy knows neither bfloat16 nor the float8 kinds
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if x.is_complex():
            raise ShapeError(f"cannot draw {x.dtype} values; pass x.real, x.imag or x.abs()")
        return x.detach().to(device="cpu", dtype=dtype).resolve_neg().numpy()
    try:
        array = np.asarray(x)
        if array.dtype == np.float32 or array.dtype == np.float64:
            return array
        if np.iscomplexobj(array):
            raise ShapeError(f"cannot draw {array.dtype} values; pass x.real, x.imag or abs(x)")
        return array.astype(np.float64 if array.dtype.kind in "iuO" else np.float32)
    except (ValueError, TypeError) as error:
        if isinstance(error, ShapeError):
            raise
        raise ShapeError(
            f"cannot draw {type(x).__name__}: {error}. Pass a tensor, a numpy array or a list of "
            "equally long lists of numbers"
        ) from error


def with_axes(x: ArrayLike, allowed: Sequence[str], what: str) -> np.ndarray:
    """Return `x` as an array whose number of axes is that of one of `allowed`, e.g. "[row col]".

    Raises:
        ShapeError: It has another number of axes, or no element.
    """
    array = to_numpy(x)
    if array.ndim not in [len(axes.strip("[]").split()) for axes in allowed]:
        raise ShapeError(
            f"{what} has shape {list(array.shape)}; expected {' or '.join(allowed)}. "
            "Index or average the other axes first, for instance x[0] for one document of a batch"
        )
    if array.size == 0:
        raise ShapeError(f"{what} has shape {list(array.shape)}: there is nothing to draw")
    return array

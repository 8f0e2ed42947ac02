"""Whatever holds numbers becomes a float array."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hooked_ssm.errors import ShapeError
from hooked_ssm.plots import to_numpy
from hooked_ssm.plots.tensors import with_axes


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([[1.0, 2.0]], dtype=torch.float16),
        torch.tensor([[1, 2]]),
        torch.tensor([[1.0, 2.0]], requires_grad=True) * 1,
        np.array([[1, 2]]),
        np.array([[1, 2]], dtype=np.float16),
        [[1, 2]],
        [torch.tensor([1.0, 2.0], requires_grad=True)],
        [[torch.tensor(1.0), torch.tensor(2.0)]],
    ],
)
def test_to_numpy_takes_tensors_arrays_and_lists(x):
    array = to_numpy(x)
    assert array.dtype in (np.float32, np.float64)
    assert np.array_equal(array, [[1.0, 2.0]])


def test_to_numpy_keeps_float64_and_booleans_become_0_and_1():
    assert to_numpy(torch.tensor(1 / 3, dtype=torch.float64)) == 1 / 3
    assert to_numpy([True, False]).tolist() == [1.0, 0.0]


@pytest.mark.gpu
def test_to_numpy_takes_cuda_tensors():
    assert to_numpy(torch.ones(2, device="cuda", dtype=torch.bfloat16)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("x", [[[1, 2], [3]], ["a"], torch.ones(2, dtype=torch.complex64), [1j]])
def test_to_numpy_refuses_what_is_no_array_of_numbers(x):
    with pytest.raises(ShapeError, match="cannot draw"):
        to_numpy(x)


def test_with_axes_names_the_axes_it_expects():
    with pytest.raises(ShapeError, match=r"shape \[2, 3, 4\]; expected \[row col\]"):
        with_axes(torch.zeros(2, 3, 4), ["[row col]"], "values")
    with pytest.raises(ShapeError, match="nothing to draw"):
        with_axes(torch.zeros(0, 3), ["[row col]"], "values")

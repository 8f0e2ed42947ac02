"""Where the kernels of these tests run: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs where the kernels run."""
    return {name: value.to(DEVICE) for name, value in inputs.items()}

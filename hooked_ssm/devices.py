"""What is a device, and whether something can be put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch

from hooked_ssm.errors import ConfigError
from hooked_ssm.rules import Rule


def _is_device(value: Any) -> bool:
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        return False
    return True


A_DEVICE = Rule("a device of torch, such as 'cpu' or 'cuda:0'", _is_device)
Device = Annotated[torch.device | str, A_DEVICE]
DeviceName = Annotated[str, A_DEVICE]


@contextmanager
def placing(device: torch.device | str) -> Iterator[None]:
    """Have torch's many errors of a device that is not there say so.

    Raises:
        ConfigError: This machine, or this torch, has no such device.
    """
    try:
        yield
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        why = str(error).partition("\n")[0]  # frames of C++ may follow
        raise ConfigError(
            f"device={str(device)!r}: nothing can be put there ({why}); 'cpu' is everywhere"
        ) from error

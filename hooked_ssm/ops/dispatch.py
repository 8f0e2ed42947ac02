"""Which implementation of an op runs: asked for, forced for a while, or chosen by device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from hooked_ssm.errors import ConfigError, KernelUnavailableError, unknown

Impl = Literal["auto", "reference", "cpu", "triton"]
"""The plain loop, the fast path in torch or C, the GPU kernel, or what fits the device."""

_forced: ContextVar[Impl | None] = ContextVar("forced_impl", default=None)
_last: ContextVar[tuple[str, str] | None] = ContextVar("last_impl", default=None)


@contextmanager
def use_impl(impl: Impl) -> Iterator[None]:
    """Run every op inside the block on one implementation, whatever its own `impl` says.

    Long convolutions have no Triton kernel (an FFT serves them): under "triton" they run on "cpu",
    torch code on any device, and `last_impl` says so.

    Raises:
        ConfigError: Unknown name.

    Examples:
        >>> from hooked_ssm.ops.linear_attention import linear_attention
        >>> ones = torch.ones(1, 3, 1, 1)  # [batch, pos, head, d]
        >>> with use_impl("reference"):
        ...     linear_attention(ones, ones, ones).y.flatten().tolist()
        [1.0, 2.0, 3.0]
        >>> last_impl()
        ('linear_attention', 'reference')
    """
    _check(impl)
    token = _forced.set(impl)
    try:
        yield
    finally:
        _forced.reset(token)


def last_impl() -> tuple[str, str] | None:
    """Return (op, implementation) of the op that ran last in this context; None before any."""
    return _last.get()


def note_impl(op: str, impl: str) -> None:
    """Record the implementation that really ran, where a path hands over to another inside."""
    _last.set((op, impl))


@dataclass(frozen=True)
class Backends:
    """The implementations of one op.

    Attributes:
        op: The op's name.
        reference: The plain recurrence.
        cpu: The fast path in torch (or compiled code); runs on any device if it is torch code.
        triton: "module:function", imported only when wanted, or None if there is no kernel.
    """

    op: str
    reference: Callable[..., Any]
    cpu: Callable[..., Any]
    triton: str | None = None

    def pick(self, impl: Impl, device: torch.device) -> Callable[..., Any]:
        """Return the function to call for this device.

        Raises:
            ConfigError: Unknown name.
            KernelUnavailableError: impl="triton" without a kernel, without triton, or for CPU
                tensors outside Triton's interpreter.
        """
        _check(impl)
        forced = _forced.get()
        impl = forced or impl
        if forced == "triton" and self.triton is None:
            impl = "cpu"
        if impl == "auto":
            usable = device.type == "cuda" and self.triton is not None and _has_triton()
            impl = "triton" if usable else "cpu"
        if impl == "triton":
            self._require_triton(device)
        note_impl(self.op, impl)
        if impl == "reference":
            return self.reference
        return self._load_triton() if impl == "triton" else self.cpu

    def _require_triton(self, device: torch.device) -> None:
        if self.triton is None:
            raise KernelUnavailableError(
                f"{self.op} has no Triton kernel; use impl='auto', 'cpu' or 'reference'"
            )
        if not _has_triton():
            raise KernelUnavailableError(
                f"impl='triton' asked for {self.op}, but triton is not installed: "
                "pip install triton, or use impl='auto'"
            )
        if device.type != "cuda" and not _interpreting():
            raise KernelUnavailableError(
                f"impl='triton' asked for {self.op} on a {device.type} tensor; Triton needs a "
                "CUDA tensor, or TRITON_INTERPRET=1 set before triton is imported. "
                "Use impl='auto', 'cpu' or 'reference' here"
            )

    def _load_triton(self) -> Callable[..., Any]:
        assert self.triton is not None, "checked by _require_triton"
        module, _, function = self.triton.partition(":")
        return getattr(importlib.import_module(module), function)


def _check(impl: str) -> None:
    if impl not in get_args(Impl):
        raise ConfigError(unknown("impl", impl, get_args(Impl)))


def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:
        return False


def _interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)

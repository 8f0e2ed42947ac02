"""The errors of the package: each says what, got, allowed and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HookedSSMError(Exception):
    """Base class of every error that hooked_ssm raises on purpose."""


class ConfigError(HookedSSMError, ValueError):
    """A configuration value is unknown, out of range or contradicts another."""


class HookNameError(HookedSSMError, KeyError):
    """No hook point has this name, or a filter matches none."""

    def __str__(self) -> str:  # KeyError would show the repr, with its newlines escaped
        return str(self.args[0]) if self.args else ""


class HookUnavailableError(HookedSSMError, RuntimeError):
    """The hook point exists, but cannot fire in this run."""


class ShapeError(HookedSSMError, ValueError):
    """A tensor's shape, dtype, device or length does not fit."""


class ContractError(HookedSSMError, AssertionError):
    """A mixer breaks a law that the analyses build on."""


class KernelUnavailableError(HookedSSMError, RuntimeError):
    """The implementation asked for cannot run here."""


class TaskError(HookedSSMError, ValueError):
    """A task cannot be built or sampled as asked."""


class CheckpointError(HookedSSMError, ValueError):
    """A checkpoint's files, keys or shapes do not fit the model."""


class FileError(HookedSSMError, OSError):
    """A file or folder cannot be written where it should be."""


class DivergedError(HookedSSMError, ArithmeticError):
    """Numbers became infinite or NaN: a loss, weights, or the state of a recurrence."""


class MissingDependencyError(HookedSSMError, ImportError):
    """An optional dependency is needed and not there."""


def near(word: str, allowed: Iterable[str], limit: int = 3) -> list[str]:
    """Return the names in `allowed` closest to `word`, nearest first."""
    return difflib.get_close_matches(word, list(allowed), n=limit, cutoff=0.4)


def unknown(kind: str, got: object, allowed: Iterable[object]) -> str:
    """Return the message for an unknown choice: what, got, the near ones, all allowed."""
    words = [str(choice) for choice in allowed]
    close = near(str(got), words)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    known = ", ".join(words) or "nothing, as there are none"
    return f"unknown {kind} {got!r}{hint or '.'} Allowed: {known}"

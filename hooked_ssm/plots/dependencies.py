"""The error for an optional package, or a browser, that a plot needs and does not find."""

from __future__ import annotations

from hooked_ssm.errors import HookedSSMError


class MissingDependencyError(HookedSSMError, ImportError):
    """A plot needs a package or program that is not installed."""

"""Fixtures of the tasks' tests."""

from __future__ import annotations

import jaxtyping
import pytest


@pytest.fixture
def as_shipped(monkeypatch):
    """Turn the tests' own type checks off, as for a user: wrong input meets our errors."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)

"""What the tests of analyses share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hooked_ssm.mixers import MIXERS


@pytest.fixture(autouse=True)
def registry_as_before() -> Iterator[None]:
    """Take out again what a test registers."""
    before = dict(MIXERS)
    yield
    MIXERS.clear()
    MIXERS.update(before)

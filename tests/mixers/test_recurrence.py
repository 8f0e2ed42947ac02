"""What a mixer's author is told."""

from __future__ import annotations

import pytest
from torch import Tensor

from hooked_ssm.errors import ConfigError
from hooked_ssm.mixers.recurrence import Recurrence


@pytest.mark.parametrize("name", ["decay", "write", "pattern", "scan"])
def test_a_field_may_not_hide_a_method(name):
    with pytest.raises(ConfigError, match=f"field '{name}' hides"):
        type("Mine", (Recurrence,), {"__annotations__": {name: Tensor}})
    type("Mine", (Recurrence,), {"__annotations__": {"value": Tensor, "given_decay": Tensor}})

"""A carry hook on every implementation: what the naive loop gives when edited at that step."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hooked_ssm.ops.dispatch import use_impl
from tests.models import RECURRENT, tiny, tokens
from tests.naive_recurrence import Edits, Naive
from tests.ops.triton.devices import DEVICE

LENGTH, AT = 7, 3
CARRY = f"blocks.0.mixer.hook_ssm_carry.{AT}"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.mark.parametrize("impl", ["reference", "cpu", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("name", [name for name in RECURRENT if name != "mixed"])
def test_an_edit_at_one_position_is_the_naive_loop_edited_there(name, impl):
    """In float64, to 1e-9; states of every position are hooked too, in the same run."""
    model, ids = tiny(name, layers=1, dtype=torch.float64), tokens(length=LENGTH)
    _, everything = model.run_with_cache(
        ids, names_filter=lambda name: True, return_cache_object=False
    )
    naive = Naive(model, everything)
    generator = torch.Generator().manual_seed(3)
    change = torch.randn(
        everything[CARRY.replace("carry", "state").removesuffix(f".{AT}")][:, AT].shape,
        generator=generator,
        dtype=naive.role("state").dtype,
    )
    edits = Edits(carry={AT: change})
    mixed, state = (model.hook_name(0, role) for role in ("mixed", "state"))
    device = DEVICE if impl == "triton" else torch.device("cpu")
    model = model.to(device)
    with use_impl(impl), model.hooks([(CARRY, lambda value, hook: value + change.to(device))]):
        _, cache = model.run_with_cache(ids.to(device), names_filter=[mixed, state])
    model.to("cpu")
    want = naive.mixed(edits)
    torch.testing.assert_close(cache[mixed].cpu(), want, atol=1e-9, rtol=0)
    torch.testing.assert_close(cache[state].cpu(), naive.states(edits)[0], atol=1e-9, rtol=0)
    assert (want - naive.mixed())[:, AT:].abs().amax() > 1e-3

"""NaN or infinity at one position reaches no earlier one and no other document, in any mixer."""

from __future__ import annotations

import math

import pytest
import torch

from hooked_ssm.errors import DivergedError
from hooked_ssm.ops.causal import causal_product
from hooked_ssm.ops.long_conv import long_conv
from tests.models import D_MODEL, LENGTH, ONE_KIND, tiny

LONG = 70  # beyond a chunk, and long enough for an FFT
ROLES = {
    "nobody": (),
    "the pattern": ("hook_pattern",),
    "states": ("hook_ssm_state", "hook_ssm_write", "hook_ssm_decay"),
    "the filter": ("hook_filter",),
    "everything": None,
}


def bad_at(x: torch.Tensor, position: int, value: float) -> torch.Tensor:
    spoilt = x.clone()
    spoilt[0, position, 3] = value
    return spoilt


@pytest.mark.parametrize("listens", ROLES)
@pytest.mark.parametrize("length", [LENGTH, LONG])
@pytest.mark.parametrize("name", ONE_KIND)
def test_bad_numbers_stay_behind_their_position(name, length, listens):
    """Hooks that return a copy make every path that edits take run."""
    model = tiny(name, layers=1)
    wanted, own = ROLES[listens], [n for n in model.hook_dict if ".mixer." in n]
    hooked = [n for n in own if wanted is None or n.rsplit(".", 1)[1] in wanted]
    x = torch.randn(2, length, D_MODEL, generator=torch.Generator().manual_seed(0))
    at = length // 2

    def run(resid: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), model.hooks([(n, lambda v, hook: v.clone()) for n in hooked]):
            return model(resid, start_at_layer=0, stop_at_layer=1)

    clean = run(x)
    for value in (math.nan, math.inf):
        try:
            spoilt = run(bad_at(x, at, value))
        except DivergedError:
            assert "delta_net" in name, "only the delta rule refuses to go on"
            continue
        torch.testing.assert_close(spoilt[0, :at], clean[0, :at], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(spoilt[1], clean[1], atol=1e-5, rtol=1e-5)
        assert not spoilt[0, at].isfinite().all(), "nor does it vanish"


def test_a_product_is_spoilt_only_where_a_bad_number_is_seen():
    """By hand: query 2 sees key 1, query 1 does not."""
    pattern = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 1, 1]])
    seen = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    values = torch.tensor([[2.0, 1], [math.nan, 1], [3, 1]])
    got = causal_product(pattern, values, seen)
    assert got[:2].tolist() == [[2, 1], [2, 1]]
    assert got[2, 0].isnan() and got[2, 1] == 3
    finite = values.nan_to_num(5)
    assert torch.equal(causal_product(pattern, finite), pattern @ finite)


def test_bad_numbers_of_the_past_reach_every_convolved_position():
    u, filter = torch.ones(1, 12, 2), torch.ones(2, 20)
    history = torch.ones(1, 4, 2)
    history[0, 1, 0] = math.nan
    y = long_conv(u, filter, history=history)
    assert y[..., 0].isnan().all()
    torch.testing.assert_close(y[0, :, 1], torch.arange(5.0, 17))


def test_gradients_of_what_is_not_spoilt_are_finite():
    values = torch.ones(3, 1)
    values[2] = math.nan
    values.requires_grad_()
    causal_product(torch.ones(3, 3).tril(), values)[:2].sum().backward()
    assert values.grad is not None and values.grad[:, 0].tolist() == [2, 1, 0]

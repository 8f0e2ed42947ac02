"""Whole models on the kernels: the same activations, states, edits and gradients as without."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.ops.dispatch import use_impl
from tests.models import D_VOCAB, tiny
from tests.ops.checks import assert_near
from tests.ops.triton.devices import DEVICE

pytest.importorskip("triton")


@pytest.fixture
def ids():
    return torch.arange(14, device=DEVICE).view(2, 7) * 5 % D_VOCAB


@pytest.mark.parametrize("model", ["mamba", "mamba2", "gated_delta_net", "gla"])
def test_every_activation_is_the_same(model, ids):
    """All hooks wanted, states among them."""
    built = tiny(model, layers=1).to(DEVICE)
    with use_impl("reference"):
        want, want_cache = built.run_with_cache(ids, names_filter=lambda name: True)
    with use_impl("triton"):
        got, cache = built.run_with_cache(ids, names_filter=lambda name: True)
    assert_near("logits", got, want, 1e-5)
    assert cache.keys() == want_cache.keys()
    assert any(name.endswith("hook_ssm_state") for name in cache)
    for name in want_cache:
        assert_near(name, cache[name], want_cache[name], 2e-5)


def test_mamba_with_states_hooked_and_a_carry_edited(ids):
    """A state doubled at position 3 runs on through the kernels; every gradient agrees."""
    built = tiny("mamba", layers=1).to(DEVICE)

    def run() -> dict[str, torch.Tensor]:
        seen = {}
        built.zero_grad()
        hooks = [
            ("blocks.0.mixer.hook_ssm_carry.3", lambda state, hook: 2 * state),
            ("blocks.0.mixer.hook_ssm_state", lambda state, hook: seen.update(states=state)),
        ]
        loss = built.run_with_hooks(ids, fwd_hooks=hooks, return_type="loss")
        loss.backward()
        seen = {name: value.detach().clone() for name, value in seen.items()}
        return {"loss": loss.detach(), **seen} | {
            f"gradient of {name}": parameter.grad.clone()
            for name, parameter in built.named_parameters()
        }

    with use_impl("cpu"):
        want = run()
    with use_impl("triton"):
        got = run()
    assert got.keys() == want.keys() and "states" in got
    for name, value in want.items():
        assert_near(name, got[name], value, 2e-5)

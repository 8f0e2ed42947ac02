"""Lessons of cases.jsonl, kind patching: self-patching, clean caches, no hook left behind."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.analysis.attribution import attribution_patching
from hooked_ssm.analysis.circuits import edge_attribution
from hooked_ssm.analysis.patching import activation_patching
from hooked_ssm.analysis.path_patching import path_patching
from hooked_ssm.mixers import MIXERS
from tests.analysis.test_patching import difference, pair
from tests.models import fresh, hook_names, tiny, tokens


@torch.no_grad()
@pytest.mark.parametrize("name", [*MIXERS, "mixed"])
def test_patching_a_run_into_itself_changes_nothing(name: str) -> None:
    """patch-noop: every hook of every architecture, heavy and per-position ones included.

    To 1e-6 in float32 for models as users build them; to rounding in float64 for rougher ones.
    """
    ids = tokens()
    for model, error in ((fresh(name), 1e-6), (tiny(name, dtype=torch.float64), 1e-12)):
        logits = model(ids)
        for hook in hook_names(model):
            value = model.run_with_cache(ids, names_filter=hook)[1][hook]
            again = model.run_with_hooks(ids, fwd_hooks=[(hook, lambda x, hook, v=value: v)])
            scale = logits.abs().max().item()
            torch.testing.assert_close(again, logits, atol=error * scale, rtol=error, msg=hook)


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_a_sweep_of_identical_inputs_is_exactly_the_plain_run(name: str) -> None:
    model = tiny(name)
    clean, _ = pair()
    result = activation_patching(
        model, clean, clean, difference(), sites=["resid_pre", "mixer_out"]
    )
    for site in result.sites.values():
        assert torch.equal(site.values[0], result.base[0].expand_as(site.values[0]))


def test_sweeps_leave_caches_hooks_and_weights_as_they_were() -> None:
    """cache-not-aliased and temp-hooks-scoped, for everything that patches."""
    model = tiny("mamba")
    clean, corrupted = pair()
    _, cache = model.run_with_cache(clean)
    before = {name: value.clone() for name, value in cache.items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    fired: list[str] = []

    def look(x: torch.Tensor, hook: object) -> None:
        fired.append("mine")

    look.only_reads = True
    model.add_hook("hook_embed", look)
    for analysis in (activation_patching, attribution_patching, path_patching, edge_attribution):
        analysis(model, clean, corrupted, difference())
        hooks = [hook for hook in model.hook_points() if hook.has_hooks()]
        assert [hook.name for hook in hooks] == ["hook_embed"], analysis.__name__
        fired.clear()
        model(clean)
        assert fired == ["mine"]

    def broken(logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a user's metric")

    for analysis in (activation_patching, attribution_patching, path_patching, edge_attribution):
        with pytest.raises(RuntimeError, match="a user's metric"):
            analysis(model, clean, corrupted, broken)
        assert sum(hook.has_hooks() for hook in model.hook_points()) == 1
    assert all(torch.equal(before[name], value) for name, value in cache.items())
    assert all(torch.equal(weights[n], value) for n, value in model.state_dict().items())

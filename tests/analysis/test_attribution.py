"""Attribution patching: zero where nothing differs, exact where linear, gradients everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hooked_ssm.analysis import metrics
from hooked_ssm.analysis.attribution import agreement, attribution_patching
from hooked_ssm.analysis.patching import activation_patching
from hooked_ssm.errors import ConfigError
from hooked_ssm.mixers import MIXERS
from hooked_ssm.model import HookedModel
from tests.analysis.micro import micro, unit
from tests.analysis.test_patching import CUE, LENGTH, difference, pair
from tests.models import has_role, tiny

ROLES = ("query", "key", "value", "gate", "decay", "write", "carry", "state", "conv", "pattern",
         "mixed")  # fmt: skip


def all_words(model: HookedModel) -> list[str]:
    return ["resid_pre", "mixer_out"] + [
        r for r in ROLES if any(has_role(b.mixer, r) for b in model.blocks)
    ]


@pytest.mark.parametrize("name", MIXERS)
def test_identical_inputs_have_no_effect_at_all(name: str) -> None:
    model = tiny(name)
    clean, _ = pair()
    result = attribution_patching(model, clean, clean, difference(), sites=all_words(model))
    for site in result.sites.values():
        assert (site.values == 0).all()
    assert (result.source == 0).all()


@pytest.mark.parametrize("name", MIXERS)
def test_gradients_are_slopes_at_every_site(name: str) -> None:
    """Moving an activation a little way towards the source moves the metric as estimated."""
    model = tiny(name, dtype=torch.float64)
    clean, corrupted = pair()
    words = all_words(model)
    result = attribution_patching(
        model, clean, corrupted, difference(), sites=words, layers=[1], positions=[CUE]
    )
    share = 1e-5
    for word in words:
        hook = model.hook_name(1, word, position=CUE)
        _, cache = model.run_with_cache(clean, names_filter=hook)

        def nudge(x: Tensor, hook: object, cache=cache, name=hook) -> Tensor:
            axis = model.find_hook(name).spec.position_axis
            moved = x.clone()
            there = cache[name] if axis is None else cache[name].select(axis, CUE)
            at = moved if axis is None else moved.select(axis, CUE)
            at.copy_(at + share * (there - at))
            return moved

        with torch.no_grad():
            before = difference()(model(corrupted)[:, -1])
            after = difference()(model.run_with_hooks(corrupted, fwd_hooks=[(hook, nudge)])[:, -1])
        got = result.sites[word].values[0, 0, 0]
        scale = max(1e-3, got.abs().max().item())
        assert ((after - before) / share - got).abs().max().item() < 1e-3 * scale, word


def test_exact_where_the_model_is_linear() -> None:
    model = micro([unit(0, 1, 3), unit(1, 2, 2)], [unit(0, 0, -1), unit(1, 1, 5)], mlp="linear")
    clean, corrupted = torch.tensor([[0, 1, 2, 3], [3, 2, 0, 1]]), torch.tensor([[1, 1, 0, 3]] * 2)
    metric = metrics.logit_difference(torch.tensor([2, 2]), torch.tensor([0, 1]))
    sites = ["resid_pre", "mixer_out", "mlp_out", "mixed", "x"]
    for heads in (None, "all"):
        words = sites if heads is None else ["mixed"]
        given = {"sites": words, "heads": heads}
        estimated = attribution_patching(model, clean, corrupted, metric, **given)
        exact = activation_patching(model, clean, corrupted, metric, **given)
        for word in words:
            want = exact.sites[word].values - exact.base[:, None, None]
            if heads:
                want = exact.sites[word].values - exact.base[:, None, None, None]
            torch.testing.assert_close(estimated.sites[word].values, want, atol=1e-10, rtol=0)
        table = agreement(estimated, exact)
        assert table["max_error"].max() < 1e-10
        assert table["rank_correlation"].iloc[-1] == pytest.approx(1)


def test_linear_in_the_last_residual_without_the_final_norm() -> None:
    """cases.jsonl, attribution-zero-and-linear."""
    model = tiny("mamba", dtype=torch.float64)
    model.ln_final.forward = lambda x: model.ln_final.hook_normalized(x.clone())
    clean, corrupted = pair()
    given = {"sites": ["resid_post", "mixer_out"], "layers": [1]}
    estimated = attribution_patching(model, clean, corrupted, difference(), **given)
    exact = activation_patching(model, clean, corrupted, difference(), **given)
    for word in given["sites"]:
        want = exact.sites[word].values - exact.base[:, None, None]
        torch.testing.assert_close(estimated.sites[word].values, want, atol=1e-10, rtol=0)


def test_integrated_gradients_over_the_embedding_add_up_to_the_total_effect() -> None:
    model = tiny("mamba", dtype=torch.float64)
    clean, corrupted = pair()

    def summed(steps: int) -> Tensor:
        result = attribution_patching(
            model, clean, corrupted, difference(), positions="all", layers=[0], steps=steps
        )
        return (result.sites["resid_pre"].values[0, 0, 0] - result.source[0]).abs()

    assert summed(64).max() < 1e-3
    assert summed(64).max() < summed(1).max()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off_and_leaves_none_behind(around) -> None:
    model = tiny("mamba")
    clean, corrupted = pair()
    with around():
        result = attribution_patching(model, clean, corrupted, difference(), sites=["state"])
    assert result.sites["state"].values.abs().max() > 0
    model.requires_grad_(False)
    frozen = attribution_patching(model, clean, corrupted, difference(), sites=["state"])
    torch.testing.assert_close(frozen.sites["state"].values, result.sites["state"].values)
    assert all(p.grad is None for p in model.parameters())
    assert not any(hook.has_hooks() for hook in model.hook_points())


def test_noise_reports_agreement_and_draws() -> None:
    model = tiny("attention-2heads", dtype=torch.float64)
    clean, corrupted = pair()
    given = {"sites": ["z", "resid_pre"], "direction": "noise"}
    estimated = attribution_patching(model, clean, corrupted, difference(), **given)
    exact = activation_patching(
        model, clean, corrupted, difference(), positions=[CUE, LENGTH - 1], **given
    )
    table = agreement(estimated, exact).set_index("site")
    assert table.loc["z", "cells"] == 4 and table.loc["all", "cells"] == 8
    assert -1 <= table.loc["all", "rank_correlation"] <= 1
    assert len(estimated.heatmap(show="effect").data) == 2


@pytest.mark.usefixtures("as_shipped")
def test_refusals() -> None:
    model = tiny("mamba")
    clean, corrupted = pair()
    with pytest.raises(ConfigError, match="train mode"):
        attribution_patching(model.train(), clean, corrupted, difference())
    model.eval()
    with pytest.raises(ConfigError, match="'rank' has no gradient"):
        attribution_patching(model, clean, corrupted, metrics.rank(torch.tensor([1, 2, 3])))
    with pytest.raises(ConfigError, match="steps=0"):
        attribution_patching(model, clean, corrupted, difference(), steps=0)

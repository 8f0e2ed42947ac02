"""Activation patching: one script on every architecture; exactly the numbers of slower ways."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformer_lens.patching import generic_activation_patch, layer_pos_patch_setter

from hooked_ssm.analysis import metrics
from hooked_ssm.analysis.patching import activation_patching
from hooked_ssm.errors import ConfigError, HookNameError, ShapeError
from hooked_ssm.mixers import MIXERS
from hooked_ssm.model import HookedModel
from tests.models import D_VOCAB, has_role, tiny, tokens

LENGTH, CUE = 10, 7  # near enough to the end for two short convolutions
STACKS = [*MIXERS, "mixed"]


def pair() -> tuple[Tensor, Tensor]:
    """Clean documents, and the same with one token replaced."""
    clean = tokens(3, LENGTH)
    corrupted = clean.clone()
    corrupted[:, CUE] = (corrupted[:, CUE] + 1) % D_VOCAB
    return clean, corrupted


def difference() -> metrics.Metric:
    return metrics.logit_difference(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))


def lens_patch(model: HookedModel, base: Tensor, source: Tensor, site: str) -> Tensor:
    """transformer-lens' own sweep, one forward per cell. [layer, pos, batch]"""
    _, cache = model.run_with_cache(source)
    metric = difference()
    result = generic_activation_patch(
        model, base, cache, lambda logits: metric(logits[:, -1]), layer_pos_patch_setter,
        site, index_axis_names=("layer", "pos"), reduce="none",
    )  # fmt: skip
    return result.values


def naive(model: HookedModel, base: Tensor, source: Tensor, role: str, layer: int) -> Tensor:
    """One forward per position, hooks written out by hand. [pos, batch]"""
    metric, rows = difference(), []
    for t in range(LENGTH):
        name = model.hook_name(layer, role, position=t)
        _, cache = model.run_with_cache(source, names_filter=name)

        def put(x: Tensor, hook: object, name=name, cache=cache, t=t) -> Tensor:
            axis = model.find_hook(name).spec.position_axis
            if axis is None:
                return cache[name]
            x = x.clone()
            x.select(axis, t).copy_(cache[name].select(axis, t))
            return x

        rows.append(metric(model.run_with_hooks(base, fwd_hooks=[(name, put)])[:, -1]))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("name", STACKS)
def test_the_same_script_on_every_architecture(name: str) -> None:
    model = tiny(name)
    clean, corrupted = pair()
    words = ["resid_pre", "mixer_out", *_shared(model, ("conv", "carry"))]
    result = activation_patching(model, clean, corrupted, difference(), sites=words)
    figure = result.heatmap(tokens=[f"t{i}" for i in range(LENGTH)])
    assert len(figure.data) == len(words)
    for site in ("resid_pre", "mixer_out"):
        want = lens_patch(model, corrupted, clean, site)
        torch.testing.assert_close(result.result(site).values, want, atol=1e-5, rtol=0)
    assert result.recovery("resid_pre")[0, CUE] == pytest.approx(1, abs=1e-4)
    assert result.recovery("resid_pre")[0].nonzero().flatten().tolist() == [CUE]


def _shared(model: HookedModel, roles: tuple[str, ...]) -> list[str]:
    """The roles that some layer has: the others would raise, as tested below."""
    return [r for r in roles if any(has_role(b.mixer, r) for b in model.blocks)]


@torch.no_grad()
@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_inner_sites_equal_a_naive_loop(name: str, direction: str) -> None:
    model = tiny(name, dtype=torch.float64)
    clean, corrupted = pair()
    words = _shared(model, ("conv", "carry", "state", "pattern", "write"))
    result = activation_patching(
        model, clean, corrupted, difference(), sites=words, direction=direction, layers=[0]
    ) if name != "mixed" else activation_patching(
        model, clean, corrupted, difference(), sites=words, direction=direction
    )  # fmt: skip
    base, source = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    for word in words:
        found = result.sites[word]
        for layer, got in zip(found.layers[:2], found.values[0], strict=False):
            want = naive(model, base, source, word, layer)
            torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


@torch.no_grad()
def test_heads_positions_and_several_metrics() -> None:
    model = tiny("attention-2heads", dtype=torch.float64)
    clean, corrupted = pair()
    asked = {"difference": difference(), "kl": metrics.kl(model(clean)[:, -1])}
    result = activation_patching(
        model, clean, corrupted, asked, sites=["z"], heads="all", positions="all"
    )
    assert result.result("z", "kl").values.shape == (2, 1, 2, 3)
    _, cache = model.run_with_cache(clean)

    def put(z: Tensor, hook: object) -> Tensor:
        z[:, :, 1] = cache["z", 0][:, :, 1]
        return z

    logits = model.run_with_hooks(corrupted, fwd_hooks=[("blocks.0.mixer.hook_z", put)])[:, -1]
    for name, metric in asked.items():
        torch.testing.assert_close(
            result.result("z", name).values[0, 0, 1], metric(logits), atol=1e-10, rtol=0
        )
    assert len(result.heatmap("kl", show="value").data) == 1
    assert list(result.frame.columns[:6]) == ["metric", "site", "layer", "hook", "position", "head"]


@torch.no_grad()
@pytest.mark.parametrize("site", ["pattern", "carry"])
def test_heads_of_patterns_and_carries(site: str) -> None:
    model = tiny("based-2heads", dtype=torch.float64)
    clean, corrupted = pair()
    whole = activation_patching(model, clean, corrupted, difference(), sites=[site], layers=[1])
    each = activation_patching(
        model, clean, corrupted, difference(), sites=[site], layers=[1], heads=[0, 1],
        positions=[CUE, -1],
    )  # fmt: skip
    _, cache = model.run_with_cache(clean, names_filter=model.hook_name(1, site, position=CUE))
    name = model.hook_name(1, site, position=CUE)

    def put(x: Tensor, hook: object) -> Tensor:
        index = (slice(None), 1, CUE) if site == "pattern" else (slice(None), 1)
        x = x.clone()
        x[index] = cache[name][index]
        return x

    want = difference()(model.run_with_hooks(corrupted, fwd_hooks=[(name, put)])[:, -1])
    torch.testing.assert_close(each.sites[site].values[0, 0, 0, 1], want, atol=1e-10, rtol=0)
    assert whole.sites[site].values.shape[2] == LENGTH and each.positions == [CUE, LENGTH - 1]


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["attention", "mamba"])
def test_padded_documents_and_named_positions(name: str, side: str) -> None:
    """A padded document has the values of the document alone; resuming changes nothing."""
    model = tiny(name, dtype=torch.float64)
    clean, corrupted = pair()
    metric = difference()
    alone = activation_patching(model, clean, corrupted, metric, positions=[CUE, 9])
    pad = torch.zeros(3, 8, dtype=torch.long)
    parts = (lambda x: [pad, x]) if side == "left" else (lambda x: [x, pad])
    mask = torch.cat(parts(torch.ones_like(clean)), dim=1).bool() & True
    mask[:, :8] &= side == "right"
    mask[:, -8:] &= side == "left"
    shift = 8 if side == "left" else 0
    named = {"cue": torch.full((3,), CUE + shift), "end": torch.full((3,), 9 + shift)}
    padded = activation_patching(
        model, torch.cat(parts(clean), 1), torch.cat(parts(corrupted), 1), metric,
        positions=named, attention_mask=mask, read_at=named["end"],
    )  # fmt: skip
    assert padded.positions == ["cue", "end"]
    torch.testing.assert_close(
        padded.sites["resid_pre"].values, alone.sites["resid_pre"].values, atol=1e-9, rtol=0
    )


@torch.no_grad()
def test_memory_bound_and_statistics_change_no_value() -> None:
    model = tiny("mamba", dtype=torch.float64)
    clean, corrupted = pair()
    large = activation_patching(model, clean, corrupted, difference(), sites=["conv"])
    batches = []
    model.add_hook("ln_final.hook_normalized", lambda x, hook: batches.append(len(x)))
    small = activation_patching(model, clean, corrupted, difference(), sites=["conv"], max_batch=4)
    model.reset_hooks()
    assert 1 < max(batches) <= 4
    torch.testing.assert_close(
        small.sites["conv"].values, large.sites["conv"].values, atol=1e-10, rtol=0
    )
    result = large.result("conv")
    low, high = result.bootstrap_ci(n_resamples=50)
    assert result.stderr().shape == low.shape == high.shape == (2, LENGTH)
    assert (result.permutation_pvalue()[:, 0] == 1).all()  # nothing differs at the first token


def test_standing_hooks_act_in_every_run() -> None:
    """A user's own ablation holds in both runs and in the patched ones, once per forward."""
    model = tiny("mamba", dtype=torch.float64)
    clean, corrupted = pair()
    model.add_hook("blocks.1.hook_resid_pre", lambda x, hook: x + x.roll(1, -1))
    result = activation_patching(model, clean, corrupted, difference(), sites=["mixer_out"])
    want = lens_patch(model, corrupted, clean, "mixer_out")
    assert sum(hook.has_hooks() for hook in model.hook_points()) == 1
    got = result.sites["mixer_out"].values[0].float()  # transformer-lens keeps float32
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("as_shipped")
def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    model = tiny("mamba")
    clean, corrupted = pair()
    fired: list[str] = []
    for point in list(model.hook_points()):
        if not point.spec.heavy:
            point.add_hook(lambda x, hook: fired.append(hook.name))
    metric, wrong = difference(), metrics.rank(torch.tensor([1, 2]))
    for arguments, keywords, text in (
        ((clean, corrupted[:, 1:], metric), {}, "pos is 9; but it is 10 in clean"),
        ((clean, corrupted[:2], metric), {}, "batch is 2; but it is 3 in clean"),
        ((clean, corrupted.int(), metric), {}, "one integer dtype"),
        ((clean, corrupted.to("meta"), metric), {}, "on meta"),
        ((clean, corrupted, wrong), {}, "built for 2 documents, but 3"),
        ((clean, corrupted, metric), {"attention_mask": torch.ones(3, 4)}, "attention_mask"),
        ((clean, corrupted, metric), {"read_at": torch.full((3,), LENGTH)}, "one index in 0..9"),
        ((clean, corrupted, metric), {"positions": [LENGTH]}, "positions="),
        ((clean, corrupted, metric), {"positions": {"a": torch.zeros(2).long()}}, "positions"),
        ((clean, corrupted, metric), {"heads": "all"}, "heads"),
        ((clean, corrupted, metric), {"sites": ["A_log"]}, "A_log"),
        ((clean, corrupted, metric), {"max_batch": 0}, "max_batch"),
        ((clean, corrupted, metric), {"direction": "up"}, "unknown direction"),
    ):  # fmt: skip
        with pytest.raises((ShapeError, HookNameError, ConfigError), match=text):
            activation_patching(model, *arguments, **keywords)
    assert fired == []


@pytest.mark.usefixtures("as_shipped")
def test_sites_that_layers_lack() -> None:
    clean, corrupted = pair()
    mixed = tiny("mixed")
    carrying = [i for i, block in enumerate(mixed.blocks) if has_role(block.mixer, "carry")]
    result = activation_patching(mixed, clean, corrupted, difference(), sites=["carry"])
    assert result.sites["carry"].layers == carrying
    with pytest.raises(HookNameError, match="Attention has no carry"):
        activation_patching(tiny("attention"), clean, corrupted, difference(), sites=["carry"])
    with pytest.raises(ConfigError, match=r"Put it in a list: \['conv'\]"):
        activation_patching(tiny("attention"), clean, corrupted, difference(), sites="conv")
    with pytest.raises(ShapeError, match="one for all documents"):
        activation_patching(tiny("hyena"), clean, corrupted, difference(), sites=["filter"])

"""Patching where it is easily wrong: few documents, many positions, hooks of the user's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis import ablation, engine, metrics
from hooked_ssm.analysis.attribution import attribution_patching
from hooked_ssm.analysis.circuits import edge_attribution
from hooked_ssm.analysis.logit_attribution import logit_attribution
from hooked_ssm.analysis.patching import activation_patching
from hooked_ssm.analysis.path_patching import path_patching
from hooked_ssm.errors import ConfigError, HookUnavailableError
from tests.analysis.test_engine import STACKS, tiny

LENGTH = 8


def pair(batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, 13, (2, batch, LENGTH), generator=generator))


def answer(batch: int = 3) -> metrics.Metric:
    return metrics.log_probability(torch.arange(batch))


def naive(model, clean, corrupted, name, read_at) -> Tensor:
    """One whole forward per position. [pos, batch]"""
    _, cache = model.run_with_cache(clean, names_filter=name)
    rows, found = torch.arange(len(clean)), []
    for t in range(LENGTH):

        def put(x, hook, t=t):
            x = x.clone()
            x[:, t] = cache[name][:, t]
            return x

        logits = model.run_with_hooks(corrupted, fwd_hooks=[(name, put)])
        found.append(answer(len(clean))(logits[rows, read_at]))
    return torch.stack(found)


@pytest.mark.parametrize("name", STACKS)
def test_every_light_hook_of_the_last_layer(name):
    """By its own name: what acts on its position alone must really do so."""
    model = tiny(name)
    clean, corrupted = pair()
    read_at = torch.full((3,), LENGTH - 1)
    last = len(model.blocks) - 1
    for hook, spec in model.hook_specs().items():
        mine = hook.startswith(f"blocks.{last}.mixer.") and spec.position_axis == 1
        if not mine or spec.per_position or spec.heavy:
            continue
        word = hook.rsplit(".", 1)[1].removeprefix("hook_")
        swept = activation_patching(
            model, clean, corrupted, answer(), sites=[word], layers=[last], read_at=read_at
        )
        want = naive(model, clean, corrupted, hook, read_at)
        torch.testing.assert_close(swept.sites[word].values[0, 0], want, atol=1e-9, rtol=0)


def test_documents_and_positions_stay_together_for_standing_hooks():
    clean, corrupted = pair()
    read_at = torch.tensor([4, 6, 5])
    for hook in (
        lambda x, hook: x - x.mean(0, keepdim=True),  # over documents
        lambda x, hook: torch.cat([x[:, :-1], 0 * x[:, -1:]], dim=1),  # the last position
        ablation.zero(positions=[6]),
    ):
        model = tiny("mamba")
        model.add_hook("blocks.1.hook_mixer_in", hook)
        got = activation_patching(
            model, clean, corrupted, answer(), sites=["resid_pre"], layers=[0], read_at=read_at
        )
        want = naive(model, clean, corrupted, "blocks.0.hook_resid_pre", read_at)
        torch.testing.assert_close(got.sites["resid_pre"].values[0, 0], want, atol=1e-9, rtol=0)


def test_what_takes_the_model_apart_refuses_standing_hooks():
    clean, corrupted = pair()
    model = tiny("attention")
    scores = edge_attribution(model, clean, corrupted, answer())
    model.add_hook("blocks.1.hook_resid_pre", lambda x, hook: 2 * x)
    for call in (
        lambda: path_patching(model, clean, corrupted, answer()),
        lambda: edge_attribution(model, clean, corrupted, answer()),
        lambda: scores.circuit(3),
        lambda: logit_attribution(model, clean, torch.arange(3)),
    ):
        with pytest.raises(HookUnavailableError, match=r"blocks\.1\.hook_resid_pre.*reset_hooks"):
            call()


def test_paths_from_behind_what_is_read_change_nothing():
    model = tiny("mamba")
    clean, corrupted = pair()
    read_at = torch.tensor([4, 3, 4])
    given = {"edges": [(("mixer_out", 0), ("logits",))], "read_at": read_at}
    found = path_patching(model, clean, corrupted, answer(), positions=None, **given)
    effect = found.frame.set_index("position")["effect"]
    assert (effect.loc[5:] == 0).all() and effect.loc[4] != 0
    named = {"inside": torch.tensor([4, 3, 4]), "behind": torch.tensor([7, 6, 5])}
    by_name = path_patching(model, clean, corrupted, answer(), positions=named, **given)
    inside, behind = by_name.frame["effect"]
    assert inside != 0 and behind == 0


def test_a_metric_without_a_gradient_is_refused_beside_one_with():
    clean, corrupted = pair()
    with pytest.raises(ConfigError, match="'rank' has no gradient"):
        attribution_patching(
            tiny("mamba"), clean, corrupted, {"p": answer(), "rank": metrics.rank(torch.arange(3))}
        )


def test_metrics_are_measured_in_float32_and_apart():
    logits = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0)).half()
    ids = torch.tensor([5, 7])

    def spoil(x):
        return x.zero_().sum(-1)

    found = metrics.measure({"spoil": spoil, "rank": metrics.rank(ids)}, logits)
    assert found.dtype == torch.float32
    assert torch.equal(found[1], metrics.rank(ids)(logits.float()))
    assert metrics.rank(ids)(torch.full((2, 9), torch.nan)).isnan().all()
    sure = torch.tensor([[0.0, -torch.inf]])
    assert metrics.kl(sure)(sure).item() == 0


@pytest.mark.parametrize("find", [activation_patching, attribution_patching])
def test_one_document_has_no_standard_error(find):
    clean, corrupted = pair(1)
    swept = find(tiny("based"), clean, corrupted, answer(1), sites=["resid_pre"])
    assert swept.frame["stderr"].isna().all() and swept.frame["value"].notna().all()
    assert "resid_pre" in swept._repr_html_()


def test_edges_of_one_document_and_of_documents_that_hardly_differ(caplog):
    clean, corrupted = pair(1)
    found = edge_attribution(tiny("based"), clean, corrupted, answer(1))
    assert found.frame["stderr"].isna().all() and found.frame["score"].notna().all()
    assert not caplog.records
    edge_attribution(tiny("based"), clean, clean, answer(1))
    assert "hardly changes metric 'log_probability'" in caplog.text


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_token_ids_of_any_kind(dtype):
    clean, corrupted = (x.to(dtype) for x in pair())
    swept = activation_patching(tiny("mamba"), clean, corrupted, answer(), sites=["resid_pre"])
    wide = activation_patching(tiny("mamba"), *pair(), answer(), sites=["resid_pre"])
    assert torch.equal(swept.sites["resid_pre"].values, wide.sites["resid_pre"].values)


def test_a_heatmap_of_grouped_queries():
    cfg = ModelConfig(
        mixers=[{"mixer": "attention", "n_heads": 4, "n_kv_heads": 2, "d_head": 4}],
        d_model=16, d_vocab=13, n_ctx=16,
    )  # fmt: skip
    swept = activation_patching(
        HookedModel(cfg).eval(), *pair(), answer(), sites=["q", "k"], heads="all", positions="all"
    )
    queries, keys = (trace for trace in swept.heatmap().data if trace.type == "heatmap")
    assert list(queries.x) == list(keys.x) == ["0", "1", "2", "3"]


def test_fewer_rows_than_parts(monkeypatch):
    monkeypatch.setattr(engine, "ENOUGH", 1)
    cfg = ModelConfig(architecture="mamba", d_model=16, d_vocab=13, n_layers=1, n_ctx=64)
    model = HookedModel(cfg).double().eval()
    tokens = torch.randint(0, 13, (2, 1, 40), generator=torch.Generator().manual_seed(0))
    swept = activation_patching(model, *tokens, answer(1), sites=["resid_pre"], positions=[20])
    assert swept.sites["resid_pre"].values.isfinite().all()


@pytest.mark.parametrize("name", ["attention", "mamba", "hyena", "based"])
def test_patterns_of_documents_that_are_read_at_different_places(name):
    model = tiny(name)
    clean, corrupted = pair(2)
    corrupted[1] = clean[1]  # nothing to run for the document that is read last
    read_at = torch.tensor([4, 7])
    got = activation_patching(
        model, clean, corrupted, answer(2), sites=["pattern"], layers=[1], read_at=read_at
    )
    _, cache = model.run_with_cache(clean, names_filter=(at := model.hook_name(1, "pattern")))
    axis = model.find_hook(at).spec.position_axis

    def put(x, hook):
        x = x.clone()
        x.select(axis, 4).copy_(cache[at].select(axis, 4))
        return x

    logits = model.run_with_hooks(corrupted, fwd_hooks=[(at, put)])
    want = answer(2)(logits[torch.arange(2), read_at])
    torch.testing.assert_close(got.sites["pattern"].values[0, 0, 4], want, atol=1e-9, rtol=0)

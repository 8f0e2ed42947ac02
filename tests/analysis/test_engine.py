"""The interchange engine against one full forward per cell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis.engine import Cell, Interchange
from hooked_ssm.analysis.sites import Site, block_sites, find_site, find_sites
from hooked_ssm.errors import HookNameError, ShapeError
from hooked_ssm.mixers import MIXERS

LENGTH = 9
STACKS = [*MIXERS, "mixed"]


def tiny(name: str) -> HookedModel:
    kind = {"mixers": ["mamba", "attention"]} if name == "mixed" else {"architecture": name}
    layers = {} if name == "mixed" else {"n_layers": 2}
    cfg = ModelConfig(d_model=16, d_vocab=13, n_ctx=16, init="uniform", **kind, **layers)
    return HookedModel(cfg).double().eval()


def documents(seed: int = 0) -> Tensor:
    return torch.randint(0, 13, (3, LENGTH), generator=torch.Generator().manual_seed(seed))


def patched_one_by_one(
    model: HookedModel, base: Tensor, source: Tensor, site: Site, at: Tensor, read_at: Tensor
) -> Tensor:
    """Each document alone, a full forward from the tokens, a hook written out by hand."""
    rows = []
    for i in range(len(base)):
        name = f"{site.hook}.{int(at[i])}" if site.per_position else site.hook
        _, cache = model.run_with_cache(source[i : i + 1], names_filter=name)
        axis = None if site.per_position else model.find_hook(name).spec.position_axis

        def put(x: Tensor, hook: object, name=name, axis=axis, t=int(at[i]), cache=cache) -> Tensor:
            if axis is None:
                return cache[name]
            x = x.clone()
            x.select(axis, t).copy_(cache[name].select(axis, t))
            return x

        logits = model.run_with_hooks(base[i : i + 1], fwd_hooks=[(name, put)])
        rows.append(logits[0, read_at[i]])
    return torch.stack(rows)


def roles(model: HookedModel) -> list[Site]:
    found = []
    for word in ("query", "key", "value", "conv", "state", "carry", "write", "gate", "pattern"):
        try:
            found += find_sites(model, [word])
        except HookNameError:
            continue
    return found


@torch.no_grad()
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", STACKS)
def test_equals_one_forward_per_cell(name: str, resume: bool) -> None:
    model, base, source = tiny(name), documents(0), documents(1)
    read_at = torch.tensor([8, 6, 7])
    spots = [torch.tensor([2, 5, 7]), torch.tensor([8, 8, 0]), read_at]
    cells = [
        Cell(site, at)
        for site in block_sites(model) + roles(model)
        if site.per_position or model.find_hook(site.hook).spec.position_axis is not None
        for at in spots
    ]
    engine = Interchange(model, base, source, read_at, max_batch=4, resume=resume)
    seen = []
    for indices, logits in engine.run(cells):
        for index, got in zip(indices, logits, strict=True):
            cell = cells[index]
            want = patched_one_by_one(model, base, source, cell.site, cell.positions, read_at)
            torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
            seen.append(index)
    assert sorted(seen) == list(range(len(cells)))


@torch.no_grad()
def test_runs_only_what_a_patch_can_change() -> None:
    model, base = tiny("attention"), documents()
    source = base.clone()
    source[:, 4] = (source[:, 4] + 1) % 13
    read_at = torch.full((3,), LENGTH - 1)
    engine = Interchange(model, base, source, read_at)
    ran = []
    model.add_hook("hook_embed", lambda x, hook: ran.append(len(x)))
    model.add_hook("ln_final.hook_normalized", lambda x, hook: ran.append(len(x)))
    site = find_site(model, 0, "resid_pre")
    cells = [Cell(site, torch.full((3,), t)) for t in range(LENGTH)]
    [(_, logits)] = list(engine.run(cells))
    model.reset_hooks()
    assert ran == [3]  # one patched run, past the embedding; both plain runs came before
    torch.testing.assert_close(logits[3], engine.base_logits)
    assert not torch.allclose(logits[4], engine.base_logits)


def test_refuses_inputs_that_do_not_fit() -> None:
    model, base = tiny("attention"), documents()
    with pytest.raises(ShapeError, match=r"one shape and device"):
        Interchange(model, base, base[:, :-1], torch.zeros(3, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"one index in 0..8 for each of the 3 documents"):
        Interchange(model, base, base, torch.full((3,), LENGTH))


def test_sites_by_word() -> None:
    model = tiny("mixed")
    assert find_site(model, 0, "carry") == Site("carry", 0, "blocks.0.mixer.hook_ssm_carry", True)
    assert find_site(model, 1, "query").hook == "blocks.1.mixer.hook_q"
    assert find_site(model, 1, "mlp_in").hook == "blocks.1.ln2.hook_normalized"
    assert [site.layer for site in find_sites(model, ["state"])] == [0]
    with pytest.raises(HookNameError, match="Attention has no state"):
        find_sites(model, ["state"], layers=[1])
    with pytest.raises(HookNameError, match="no MLP"):
        find_site(model, 0, "mlp_out")

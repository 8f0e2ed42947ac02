"""Caching: slices along declared axes, copies, filters, devices, gradients, sizes (cases.jsonl)."""

from __future__ import annotations

import pytest
import torch
from transformer_lens import ActivationCache

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.cache import HookedCache
from hooked_ssm.errors import HookNameError, ShapeError
from tests.models import (
    D_VOCAB,
    LENGTH,
    MODELS,
    ONE_KIND,
    assert_near,
    hook_names,
    shape_of,
    tiny,
    tokens,
)
from tests.ops.checks import largest_tensor

SLICES = {
    "int": -1,
    "slice": slice(2, 5),
    "list": [0, 3, 6],
    "pair": (1, 4),
    "last": slice(-1, None),
}


def same(got, want, *, equal_nan=True):
    """Equal values; -inf of masked scores included."""
    assert got.shape == want.shape
    assert torch.equal(got, want) or torch.allclose(got, want, equal_nan=equal_nan)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", SLICES)
def test_pos_slice_cuts_the_declared_axis_of_everything(name, kind):
    model, ids, chosen = tiny(name), tokens(), SLICES[kind]
    names = hook_names(model)
    _, whole = model.run_with_cache(ids, names_filter=names)
    _, part = model.run_with_cache(ids, names_filter=names, pos_slice=chosen)
    index = slice(*chosen) if isinstance(chosen, tuple) else chosen
    index = [index] if isinstance(index, int) else index  # an int keeps the axis
    for n in names:
        axis = model.find_hook(n).spec.position_axis
        want = whole[n] if axis is None else whole[n][(slice(None),) * axis + (index,)]
        assert torch.equal(part[n], want), n


@pytest.mark.parametrize("name", MODELS)
def test_remove_batch_dim_drops_the_batch_axis_only(name):
    model, ids = tiny(name), tokens(1)
    names = hook_names(model)
    _, whole = model.run_with_cache(ids, names_filter=names)
    _, without = model.run_with_cache(ids, names_filter=names, remove_batch_dim=True, pos_slice=-1)
    _, later = model.run_with_cache(ids, names_filter=names)
    later.remove_batch_dim()
    assert not without.has_batch_dim and not later.has_batch_dim
    for n in names:
        spec = model.find_hook(n).spec
        value = whole[n][0] if spec.has_batch else whole[n]
        assert torch.equal(later[n], value), n
        if spec.position_axis is not None:
            value = value.narrow(spec.position_axis - 1, LENGTH - 1, 1)
        assert torch.equal(without[n], value), n


def test_remove_batch_dim_of_several_documents_raises():
    model = tiny("mamba")
    with pytest.raises(ShapeError, match="batch of 1, got 2"):
        model.run_with_cache(tokens(), remove_batch_dim=True)
    _, cache = model.run_with_cache(tokens())
    with pytest.raises(ValueError, match="batch of 2"):
        cache.remove_batch_dim()
    assert cache["hook_embed"].shape[0] == 2, "nothing was removed"


def blank(value, hook):
    """Overwrite an activation in place, with ones: norms divide by some."""
    value.fill_(1)


@pytest.mark.parametrize("name", ONE_KIND)
def test_a_cached_value_is_what_flowed_and_never_changes(name):
    """Cached before an edit in place at the same point: the value before; after it: ones."""
    model, ids = tiny(name, layers=1), tokens()
    for n in hook_names(model):
        _, plain = model.run_with_cache(ids, names_filter=n)
        kept = plain[n].clone()
        cache, caching, _ = model.get_caching_hooks(names_filter=n)
        with torch.no_grad():
            model.run_with_hooks(ids, fwd_hooks=[*caching, (n, blank)])
        same(cache[n], kept)
        cache, caching, _ = model.get_caching_hooks(names_filter=n)
        with torch.no_grad():
            model.run_with_hooks(ids, fwd_hooks=[(n, blank), *caching])
        assert (cache[n] == 1).all(), n
        same(plain[n], kept)


@pytest.mark.parametrize("name", ONE_KIND)
def test_edits_in_place_reach_nothing_but_what_follows(name):
    """No view of anything else is edited along: not parameters, not what an earlier hook saw."""
    model, ids = tiny(name, layers=1, dtype=torch.float64), tokens()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    names = hook_names(model)
    _, clean = model.run_with_cache(ids, names_filter=names)
    order = fired_order(model, ids)
    for i, n in enumerate(order):
        # carries are handed on before the deltas are known, so both together are refused
        seen = [o for o in order[:i] if "carry" not in o or not n.endswith("hook_delta")]
        if not seen:
            continue
        with torch.no_grad(), model.hooks([(n, blank)]):
            _, cache = model.run_with_cache(ids, names_filter=seen)
        for earlier in seen:
            assert_near(f"{n} reached back to {earlier}", cache[earlier], clean[earlier], 1e-11)
    for n, p in model.state_dict().items():
        assert torch.equal(p, before[n]), n


def fired_order(model, ids):
    """All hook names in the order in which they fire when all are listened to."""
    order = []
    look = [(n, lambda value, hook: order.append(hook.name)) for n in hook_names(model)]
    model.run_with_hooks(ids, fwd_hooks=look)
    return order


@torch.no_grad()
@pytest.mark.parametrize("caches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_owns_its_memory(name, caches):
    """States may be kept without a copy: then nothing else may lie in their memory."""
    model, ids = tiny(name, dtype=torch.float64), tokens()
    want, _ = model.step(ids[:, :1], model.step(ids)[1])
    names = [n for n in hook_names(model) if not n.endswith("hook_delta")]
    made = [model.get_caching_hooks(names_filter=names) for _ in range(caches)]
    with model.hooks([hook for _, caching, _ in made for hook in caching]):
        _, past = model.step(ids)
    kept = [value for cache, _, _ in made for value in cache.values() if value.numel()]
    assert len({value.untyped_storage().data_ptr() for value in kept}) == len(kept)
    for value in kept:
        value.fill_(1)
    assert_near("the next token", model.step(ids[:, :1], past)[0], want, 1e-10)


def test_later_runs_leave_a_cache_alone():
    model, ids = tiny("mixed"), tokens()
    _, cache = model.run_with_cache(ids, names_filter=lambda n: True)
    sums = {n: value.double().nan_to_num(neginf=0).abs().sum() for n, value in cache.items()}
    with torch.no_grad():
        for n in list(cache)[::5]:
            model.run_with_hooks(ids, fwd_hooks=[(n, lambda v, hook: cache[hook.name])])
            model.run_with_hooks(tokens(seed=4), fwd_hooks=[(n, blank)])
    for n, value in cache.items():
        assert value.double().nan_to_num(neginf=0).abs().sum() == sums[n], n


@pytest.mark.parametrize("hook", ["blocks.0.hook_resid_post", "blocks.1.mixer.hook_ssm_state"])
def test_all_forms_of_a_filter_agree(hook):
    model, ids = tiny("mamba"), tokens()
    caches = [
        model.run_with_cache(ids, names_filter=f)[1]
        for f in (hook, [hook], (hook,), lambda n: n == hook)
    ]
    for cache in caches:
        assert list(cache.keys()) == [hook]
        assert torch.equal(cache[hook], caches[0][hook])


def test_near_names_are_offered():
    model = tiny("mamba")
    with pytest.raises(HookNameError, match="did you mean 'blocks.0.hook_resid_post'"):
        model.run_with_cache(tokens(), names_filter=["hook_embed", "blocks.0.hook_resid_pots"])
    with pytest.raises(HookNameError, match="the predicate matches none of the .* hook names"):
        model.run_with_cache(tokens(), names_filter=lambda n: n.endswith("hook_resid_pots"))


def test_a_missing_activation_says_why():
    model = tiny("mamba")
    _, cache = model.run_with_cache(tokens())
    with pytest.raises(HookNameError, match="heavy, so it is cached only when named"):
        cache["ssm_state", 0]
    with pytest.raises(HookNameError, match="did you mean"):
        cache["blocks.0.hook_resid_prey"]
    assert ("ssm_state", 0) not in cache and ("resid_pre", 0) in cache
    _, narrow = model.run_with_cache(tokens(), names_filter="hook_embed")
    with pytest.raises(HookNameError, match="It holds 1 activations"):
        narrow["resid_post", 1]


def test_short_names_layers_and_aliases():
    model, ids = tiny("attention"), tokens()
    _, cache = model.run_with_cache(ids)
    assert isinstance(cache, HookedCache) and isinstance(cache, ActivationCache)
    last = len(model.blocks) - 1
    for got, want in (
        (cache["pattern", 0], cache["blocks.0.mixer.hook_pattern"]),
        (cache["pattern", 0, "attn"], cache["blocks.0.mixer.hook_pattern"]),
        (cache["q", -1], cache[f"blocks.{last}.mixer.hook_q"]),
        (cache["attn_out", 0], cache["blocks.0.hook_mixer_out"]),
        (cache["blocks.0.attn.hook_z"], cache["blocks.0.mixer.hook_z"]),
        (cache["resid_pre", -1], cache[f"blocks.{last}.hook_resid_pre"]),
        (cache["scale", 0, "ln1"], cache["blocks.0.ln1.hook_scale"]),
        (cache["embed"], cache["hook_embed"]),
    ):
        assert got is want
    assert set(cache) == set(cache.keys()) and len(cache) == len(model.hook_dict) - 2
    heavy = {n for n, point in model.hook_dict.items() if point.spec.heavy}
    assert set(model.hook_dict) - set(cache) == heavy


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_slice", [1, slice(1, 3), [0, 2]])
def test_a_slice_of_the_batch(name, batch_slice):
    model, ids = tiny(name, layers=1), tokens(3)
    _, cache = model.run_with_cache(ids, names_filter=hook_names(model))
    part = cache.apply_slice_to_batch_dim(batch_slice)
    assert part.has_batch_dim == (not isinstance(batch_slice, int))
    for n in cache:
        has_batch = model.find_hook(n).spec.has_batch
        assert torch.equal(part[n], cache[n][batch_slice] if has_batch else cache[n]), n
    if isinstance(batch_slice, int):
        with pytest.raises(ValueError, match="already removed"):
            part.apply_slice_to_batch_dim(0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "length"), [(2, LENGTH), (1, 70)])
def test_cache_size_is_the_bytes_a_cache_takes(name, dtype, batch, length):
    model = tiny(name, dtype=dtype)
    for names in (None, hook_names(model, length), "blocks.0.hook_resid_pre"):
        _, cache = model.run_with_cache(tokens(batch, length), names_filter=names)
        real = sum(value.numel() * value.element_size() for value in cache.values())
        assert model.cache_size(batch, length, names) == real


def wide_mamba():
    """Four layers of 256 channels with 16 states."""
    sizes = {"n_layers": 4, "d_model": 128, "d_vocab": D_VOCAB, "n_ctx": 512}
    return HookedModel(ModelConfig(architecture="mamba", **sizes))


@pytest.mark.parametrize(
    "names",
    [
        "blocks.2.hook_resid_pre",
        [f"blocks.{i}.mixer.hook_ssm_carry.{t}" for i in (0, 3) for t in (3, 200)],
    ],
)
def test_a_narrow_filter_costs_only_what_it_keeps(names):
    """Nothing as large as a state trajectory is made: at most x and gate, side by side."""
    model, length = wide_mamba(), 512
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        largest = largest_tensor(
            lambda: model.run_with_cache(tokens(1, length), names_filter=names)
        )
    trajectory = length * mixer.d_inner * mixer.options.d_state
    assert largest <= 2 * length * mixer.d_inner < trajectory
    assert model.cache_size(1, length, "blocks.0.mixer.hook_ssm_state") == 4 * trajectory


def test_copies_go_to_the_device_asked_for():
    model, ids = tiny("mamba"), tokens()
    _, cache = model.run_with_cache(ids, device="meta")
    assert all(value.device.type == "meta" for value in cache.values())
    _, cache = model.run_with_cache(ids, device=torch.device("cpu"))
    assert all(value.device.type == "cpu" for value in cache.values())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_cached_too(name):
    model, ids = tiny(name, layers=1), tokens()
    names = ["hook_embed", "blocks.0.hook_mixer_out", model.hook_name(0, "mixed")]
    loss, cache = model.run_with_cache(ids, names_filter=names, incl_bwd=True, return_type="loss")
    assert set(cache) == {*names, *(f"{n}_grad" for n in names)}
    kept = {}

    def keep(value, hook):
        value.retain_grad()
        kept[hook.name] = value

    model.run_with_hooks(ids, return_type="loss", fwd_hooks=[(n, keep) for n in names]).backward()
    for n in names:
        torch.testing.assert_close(cache[f"{n}_grad"], kept[n].grad, atol=1e-7, rtol=1e-4)
    with pytest.raises(ShapeError, match="scalar"):
        model.run_with_cache(ids, incl_bwd=True)
    _, part = model.run_with_cache(
        ids, names_filter=names, incl_bwd=True, return_type="loss", pos_slice=-1
    )
    assert torch.equal(part["hook_embed_grad"], cache["hook_embed_grad"][:, -1:])


def test_a_plain_dict_and_standing_caching_hooks():
    model, ids = tiny("mamba"), tokens()
    _, plain = model.run_with_cache(ids, return_cache_object=False)
    assert type(plain) is dict
    cache = model.add_caching_hooks(names_filter=["hook_embed", "blocks.0.mixer.hook_ssm_carry.2"])
    model(ids)
    model.reset_hooks()
    assert torch.equal(cache["hook_embed"], plain["hook_embed"])
    assert cache["blocks.0.mixer.hook_ssm_carry.2"].shape == shape_of(
        model, "blocks.0.mixer.hook_ssm_carry.2"
    )


def test_per_step_caches_while_decoding():
    model, ids = tiny("mamba"), tokens()
    names = ["blocks.0.mixer.hook_ssm_state", "blocks.1.hook_resid_post"]
    _, whole = model.run_with_cache(ids, names_filter=names)
    past = None
    for t in range(LENGTH):
        cache, hooks, _ = model.get_caching_hooks(names)
        with model.hooks(hooks):
            _, past = model.step(ids[:, t : t + 1], past)
        for n in names:
            torch.testing.assert_close(cache[n], whole[n][:, t : t + 1], atol=1e-5, rtol=1e-4)

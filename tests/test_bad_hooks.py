"""Hooks and caches: wrong names, results, filters and slices are named, and nothing stays mute."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.errors import ConfigError, HookNameError, HookUnavailableError, ShapeError
from tests.models import ONE_KIND, hook_names, tiny, tokens

pytestmark = pytest.mark.usefixtures("as_shipped")

CARRY = "blocks.0.mixer.hook_ssm_carry"


def same(value, hook):
    return value


@pytest.mark.parametrize("name", ONE_KIND)
def test_a_hook_that_returns_another_shape_is_refused_everywhere(name):
    model, batch = tiny(name, layers=1), tokens()
    for hook in hook_names(model):
        with pytest.raises(ShapeError, match=r"a hook on .* returned"):
            model.run_with_hooks(batch, fwd_hooks=[(hook, lambda x, hook: x[None])])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, hook: x.double(),
        lambda x, hook: x.long(),
        lambda x, hook: x.to("meta"),
        lambda x, hook: 0.0,
        lambda x, hook: [x],
    ],
)
def test_a_hook_that_returns_another_type_is_refused(model, ids, wrong):
    for name in ("hook_embed", "blocks.0.mixer.hook_ssm_state", f"{CARRY}.3"):
        with pytest.raises(ShapeError, match=r"a hook on .* returned .*shape, dtype and device"):
            model.run_with_hooks(ids, fwd_hooks=[(name, wrong)])


def test_names_layers_and_positions_of_hooks(model, ids):
    for position in (-1, "x", 1.5, True):
        with pytest.raises(HookNameError, match="allowed: an integer >= 0"):
            model.hook_name(0, "carry", position)
    for layer in (2, -3, "0", 1.5):
        with pytest.raises(HookNameError, match="does not exist: allowed 0..1"):
            model.hook_name(layer, "state")
    with pytest.raises(HookNameError, match="predicate on names, got None"):
        model.run_with_hooks(ids, fwd_hooks=[(None, same)])
    with pytest.raises(HookNameError, match="predicate on names, got 3"):
        model.run_with_hooks(ids, fwd_hooks=[(3, same)])


@pytest.mark.parametrize("entry", ["hook_embed", ("hook_embed",), ("hook_embed", 3), None])
def test_hooks_are_pairs_of_a_name_and_a_function(model, ids, entry):
    for direction in ("fwd_hooks", "bwd_hooks"):
        with pytest.raises(ConfigError, match="hooks are pairs"):
            model.run_with_hooks(ids, **{direction: [entry]})
    assert not any(point.listened for point in model.hook_points())


def test_positions_that_a_step_has_passed_are_refused(model, ids):
    _, past = model.step(ids)
    with (
        model.hooks([(f"{CARRY}.7", same)]),
        pytest.raises(HookUnavailableError, match=r"carry.7 cannot fire: positions 0..7"),
    ):
        model.step(ids[:, :1], past)
    with model.hooks([(f"{CARRY}.8", same)]):
        model.step(ids[:, :1], past)


def test_a_hook_that_fired_in_an_earlier_step_stays_welcome(model, ids):
    seen = []
    with model.hooks([(f"{CARRY}.{t}", lambda x, hook: seen.append(hook.name)) for t in (0, 2)]):
        past = None
        for t in range(4):
            _, past = model.step(ids[:, t : t + 1], past)
    assert seen == [f"{CARRY}.0", f"{CARRY}.2"]
    with model.hooks([(f"{CARRY}.2", same)]), pytest.raises(HookUnavailableError, match=r"carry.2"):
        model.step(ids[:, 4:5], past)


@pytest.mark.parametrize(("new", "position"), [(3, 10), (1, 8), (0, 0)])
def test_positions_that_generation_will_not_reach_are_refused(model, ids, new, position):
    with (
        model.hooks([(f"{CARRY}.{position}", same)]),
        pytest.raises(HookUnavailableError, match=rf"carry.{position} cannot fire"),
    ):
        model.generate(ids, new)


def test_positions_that_generation_reaches_fire_once(model, ids):
    seen = []
    hooks = [(f"{CARRY}.{t}", lambda x, hook: seen.append(hook.name)) for t in (0, 7, 8, 9)]
    with model.hooks(hooks):
        model.generate(ids, 3)
    assert seen == [f"{CARRY}.{t}" for t in (0, 7, 8, 9)]


@pytest.mark.parametrize(
    ("name", "span"),
    [
        ("blocks.1.hook_resid_pre", {"stop_at_layer": 1}),
        ("ln_final.hook_scale", {"stop_at_layer": 1}),
        ("blocks.0.hook_resid_pre", {"start_at_layer": 1}),
        ("hook_embed", {"start_at_layer": 1}),
        (f"{CARRY}.3", {"start_at_layer": 1}),
    ],
)
def test_hooks_on_layers_that_are_left_out_are_refused(model, ids, name, span):
    given = torch.zeros(2, 8, 16) if "start_at_layer" in span else ids
    with pytest.raises(HookUnavailableError, match="leave it out"):
        model.run_with_hooks(given, fwd_hooks=[(name, same)], **span)
    assert not any(point.listened for point in model.hook_points())
    with pytest.raises(HookUnavailableError, match="has not fired in this run"):
        model.run_with_cache(given, names_filter=name, **span)
    _, cache = model.run_with_cache(given, **span)
    assert cache.cache_dict and name not in cache
    with model.hooks([(name, same)]):
        model(given, **span)  # a standing hook waits for the runs that reach it


def test_backward_hooks_where_no_gradient_is_recorded_are_refused(model, ids):
    with torch.no_grad(), pytest.raises(HookUnavailableError, match="no gradient is recorded"):
        model.run_with_hooks(ids, bwd_hooks=[("hook_embed", lambda grad, hook: None)])
    with torch.no_grad(), pytest.raises(HookUnavailableError, match="no gradient is recorded"):
        model.run_with_cache(ids, return_type="loss", incl_bwd=True)
    model.requires_grad_(False)
    with pytest.raises(HookUnavailableError, match="with parameters that require gradients"):
        model.run_with_cache(ids, return_type="loss", incl_bwd=True)


def test_the_batch_axis_goes_however_tokens_are_passed(model, ids):
    for run in (
        lambda t: model.run_with_cache(tokens=t, remove_batch_dim=True),
        lambda t: model.run_with_cache(t, remove_batch_dim=True),
        lambda t: model.run_with_cache(t.tolist(), remove_batch_dim=True),
    ):
        assert run(ids[:1])[1]["hook_embed"].shape == (8, 16)
        with pytest.raises(ShapeError, match="remove_batch_dim needs a batch of 1, got 2"):
            run(ids)


@pytest.mark.parametrize("chosen", [8, -9, [0, 8], slice(8, 10), (9, 12), [], slice(3, 3)])
def test_slices_beyond_the_end_are_refused(model, ids, chosen):
    with pytest.raises(ShapeError, match=r"pos_slice=.* positions 0\.\.7"):
        model.run_with_cache(ids, pos_slice=chosen)


@pytest.mark.parametrize("chosen", ["last", 1.5, {0}, True, torch.tensor(0.5), [0.5]])
def test_slices_that_are_none_are_refused(model, ids, chosen):
    with pytest.raises(ShapeError, match="pos_slice="):
        model.run_with_cache(ids, pos_slice=chosen)


@pytest.mark.parametrize("names", [[lambda name: True], [3], [None], [], 3, ["hook_embed", 3]])
def test_filters_that_are_none_are_refused(model, ids, names):
    with pytest.raises(HookNameError):
        model.run_with_cache(ids, names_filter=names)


def test_devices_of_caches(model, ids):
    with pytest.raises(ConfigError, match="device='disk'; allowed: a device of torch"):
        model.run_with_cache(ids, device="disk")


@pytest.mark.parametrize("key", [3, None, (), ("pattern",), (0, "pattern"), 1.5, ["hook_embed"]])
def test_keys_of_a_cache_that_are_none_are_refused(model, ids, key):
    _, cache = model.run_with_cache(ids)
    with pytest.raises(HookNameError, match="a key is a hook's name, or"):
        cache[key]
    assert key not in cache


@pytest.mark.parametrize(
    ("role", "near"), [("resid_prr", "resid_pre"), ("stat", "state"), ("mixer_ou", "mixer_out")]
)
def test_a_misspelt_role_names_the_near_one_and_what_stands_around_mixers(role, near):
    with pytest.raises(HookNameError, match=rf"resid_pre.*mixer_out.*did you mean '{near}'"):
        tiny("mamba").hook_name(0, role)
    assert tiny("mamba").hook_name(0, "attn_out") == "blocks.0.hook_mixer_out"


def test_a_cache_says_why_an_activation_is_not_in_it():
    model = tiny("mamba")
    _, cache = model.run_with_cache(tokens(), names_filter="hook_embed")
    with pytest.raises(KeyError, match=r"hook_resid_pre' in this cache: it was not asked for"):
        cache["resid_pre", 0]
    with pytest.raises(KeyError, match=r"hook_ssm_state' in this cache: it is heavy"):
        cache[model.hook_name(0, "state")]

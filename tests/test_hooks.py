"""Attaching hooks: names that resolve or raise, scopes, both directions (cases.jsonl, hooks)."""

from __future__ import annotations

import pytest
import torch
from transformer_lens.utilities import get_act_name

from hooked_ssm.errors import HookNameError, HookUnavailableError
from tests.models import LENGTH, MODELS, ONE_KIND, RECURRENT, assert_near, hook_names, tiny, tokens


@pytest.fixture(scope="module")
def model():
    return tiny("mamba")


class Counter:
    """A hook that counts its calls and lets the value pass."""

    def __init__(self):
        self.calls = 0

    def __call__(self, value, hook):
        self.calls += 1


def attached(model) -> int:
    """How many hooks are registered on all hook points, in both directions."""
    return sum(
        len(p._forward_hooks) + len(p._backward_hooks) + len(p.fwd_hooks) + len(p.bwd_hooks)
        for p in model.hook_points()
    )


def fail(value, hook):
    raise RuntimeError("a hook failed")


CARRY = "blocks.0.mixer.hook_ssm_carry.3"


def test_helpers_remove_exactly_what_they_added():
    model, ids = tiny("mamba"), tokens()
    standing, standing_carry = Counter(), Counter()
    model.add_hook("blocks.0.hook_resid_post", standing)
    model.add_hook(CARRY, standing_carry)
    before = attached(model)

    def nested():
        with (
            model.hooks([("blocks.0.hook_resid_post", Counter())]),
            model.hooks([(CARRY, Counter())], [("blocks.1.hook_resid_pre", Counter())]),
        ):
            model(ids).sum().backward()

    def raising(*args, **kwargs):
        with pytest.raises(RuntimeError, match="a hook failed"):
            model.run_with_hooks(ids, *args, **kwargs)

    runs = [
        lambda: model.run_with_cache(ids),
        lambda: model.run_with_cache(ids, names_filter=[CARRY, "blocks.0.hook_resid_post"]),
        lambda: model.run_with_cache(ids, incl_bwd=True, return_type="loss"),
        lambda: model.run_with_hooks(ids, fwd_hooks=[("hook_embed", Counter())]),
        nested,
        lambda: raising(fwd_hooks=[("hook_embed", Counter()), (CARRY, fail)]),
        lambda: raising(
            fwd_hooks=[("blocks.1.mixer.hook_y", fail)], bwd_hooks=[(CARRY, Counter())]
        ),
        lambda: model.generate(ids, 2),
    ]
    for i, run in enumerate(runs):
        run()
        assert attached(model) == before, f"run {i}"
        standing.calls = standing_carry.calls = 0
        model(ids)
        assert standing.calls == standing_carry.calls == 1, f"run {i}"
    model.reset_hooks()
    assert attached(model) == 0


def test_a_name_that_fails_to_resolve_leaves_nothing_behind(model):
    before = attached(model)
    with (
        pytest.raises(HookNameError),
        model.hooks([("hook_embed", Counter()), ("hook_embod", Counter())]),
    ):
        pass
    assert attached(model) == before


def test_hooks_run_in_the_order_given(model):
    ids, name = tokens(), "blocks.0.hook_resid_pre"
    double = (name, lambda value, hook: 2 * value)
    add = (name, lambda value, hook: value + 1)
    _, cache = model.run_with_cache(ids, names_filter="blocks.0.hook_resid_post")
    plain, _ = model.run_with_cache(ids, names_filter=name)
    seen = []
    look = (name, lambda value, hook: seen.append(value.clone()))
    model.run_with_hooks(ids, fwd_hooks=[look, double, add, look])
    torch.testing.assert_close(seen[1], 2 * seen[0] + 1)
    assert torch.equal(model(ids), plain)


@pytest.mark.parametrize("name", MODELS)
def test_returning_the_gradient_unchanged_changes_nothing_and_scaling_scales(name):
    model, ids = tiny(name, dtype=torch.float64), tokens()

    def grad(bwd_hooks):
        model.zero_grad()
        with model.hooks(bwd_hooks=bwd_hooks):
            model(ids, return_type="loss").backward()
        return model.W_E.grad.clone()

    plain = grad([])
    post = "blocks.1.hook_resid_post"
    last = f"blocks.{len(model.blocks) - 1}.hook_resid_post"
    unchanged = [(n, lambda grad, hook: (grad.clone(),)) for n in ("hook_embed", post)]
    torch.testing.assert_close(grad(unchanged), plain, atol=1e-12, rtol=0)
    nothing = grad([(last, lambda grad, hook: (torch.zeros_like(grad),))])
    scaled = grad([(last, lambda grad, hook: (3 * grad,))])
    # the gradient through the last residual stream scales, the direct one of the unembedding not
    torch.testing.assert_close(scaled - nothing, 3 * (plain - nothing), atol=1e-11, rtol=1e-9)


def test_backward_hooks_see_the_gradient_of_what_passed(model):
    ids, seen = tokens(), {}
    names = ["blocks.0.hook_mixer_out", CARRY, "blocks.0.mixer.hook_ssm_state"]

    def look(grad, hook):
        seen[hook.name] = grad.clone()

    kept = {}

    def keep(value, hook):
        value.retain_grad()
        kept[hook.name] = value

    with model.hooks([(n, keep) for n in names], [(n, look) for n in names]):
        model(ids, return_type="loss").backward()
    for n in names:
        torch.testing.assert_close(seen[n], kept[n].grad)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("blocks.0.mixer.hook_ssm_stat", "'blocks.0.mixer.hook_ssm_state'"),
        ("blocks.0.mixer.hook_ssm_cary.3", "'blocks.0.mixer.hook_ssm_carry."),
        ("blocks.7.hook_resid_pre", "'blocks."),
        ("blocks.0.hook_resid_prey", "'blocks.0.hook_resid_pre'"),
        ("hook_embedding", "'hook_embed'"),
        ("blocks.0.mixer.hook_ssm_carry", "a family of hook points, one per position"),
        ("blocks.0.mixer.hook_ssm_carry.-1", "positions count from 0"),
        ("ln_final.hook_scale.3", "'ln_final.hook_scale'"),
    ],
)
def test_unknown_names_raise_with_near_ones(model, wrong, near):
    def attach():
        model.add_hook(wrong, Counter())

    for attempt in (
        attach,
        lambda: model.run_with_hooks(tokens(), fwd_hooks=[(wrong, Counter())]),
        lambda: model.run_with_hooks(tokens(), bwd_hooks=[(wrong, Counter())]),
        lambda: model.run_with_cache(tokens(), names_filter=wrong),
        lambda: model.run_with_cache(tokens(), names_filter=["hook_embed", wrong]),
    ):
        with pytest.raises(HookNameError) as caught:
            attempt()
        assert near in str(caught.value)
    assert attached(model) == 0


def test_filters_that_match_nothing_raise(model, as_shipped):
    for nothing in (lambda name: "hook_ssm_satte" in name, [], ()):
        with pytest.raises(HookNameError):
            model.run_with_cache(tokens(), names_filter=nothing)
    with pytest.raises(HookNameError, match="matches none"):
        model.add_hook(lambda name: name.endswith("hook_nothing"), Counter())
    with pytest.raises(HookNameError, match="names_filter is 7"):
        model._matching(7)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_carry_beyond_the_sequence_raises(name):
    model, hook = tiny(name), f"blocks.0.mixer.hook_ssm_carry.{LENGTH}"
    with pytest.raises(HookUnavailableError, match=rf"\.{LENGTH} cannot fire.*0\.\.{LENGTH - 1}"):
        model.run_with_hooks(tokens(), fwd_hooks=[(hook, Counter())])
    reached = Counter()
    with model.hooks([(hook, reached)]):  # while decoding, it is reached later
        _, past = model.step(tokens())
        model.step(tokens()[:, :1], past)
    assert reached.calls == 1


@pytest.mark.parametrize("name", MODELS)
def test_aliases_and_short_names_resolve(name):
    model = tiny(name)
    for hook_name in hook_names(model):
        for alias in (
            hook_name.replace(".mixer.", ".attn."),
            hook_name.replace("hook_mixer_out", "hook_attn_out"),
        ):
            assert model.find_hook(alias) is model.find_hook(hook_name)
    point = model.find_hook
    assert point(get_act_name("attn_out", 0)) is point("blocks.0.hook_mixer_out")
    assert point(get_act_name("resid_pre", 1)) is point("blocks.1.hook_resid_pre")
    assert point(get_act_name("scale", 0, "ln1")) is point("blocks.0.ln1.hook_scale")
    mixer = model.blocks[0].mixer
    for short in ("q", "k", "v", "z", "pattern", "attn_scores", "ssm_state", "ssm_dt"):
        if f"hook_{short}" in mixer.specs:
            assert point(get_act_name(short, 0)) is getattr(mixer, f"hook_{short}")
    assert model.blocks[0].attn is mixer


def test_standing_hooks_survive_and_are_seen_by_caches():
    model, ids = tiny("attention"), tokens()
    clean = model(ids)
    model.add_hook("blocks.0.attn.hook_z", lambda value, hook: 0 * value)
    _, cache = model.run_with_cache(ids, names_filter="blocks.0.attn.hook_z")
    assert not cache["z", 0].any()
    edited = model(ids)
    assert not torch.equal(edited, clean)
    model.run_with_cache(ids)
    model.run_with_hooks(ids, fwd_hooks=[("hook_embed", Counter())])
    assert torch.equal(model(ids), edited)
    model.reset_hooks()
    assert torch.equal(model(ids), clean)


def test_permanent_hooks_outlive_a_reset():
    model, ids, counter = tiny("mamba"), tokens(), Counter()
    model.add_perma_hook("hook_embed", counter)
    model.reset_hooks()
    model(ids)
    assert counter.calls == 1
    model.reset_hooks(including_permanent=True)
    model(ids)
    assert counter.calls == 1


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_hook_point(name):
    """What attribution needs: a non-zero gradient wherever an activation can matter."""
    model, ids = tiny(name, layers=1, dtype=torch.float64), tokens()
    kept = {}

    def keep(value, hook):
        value.retain_grad()
        kept[hook.name] = value

    names = hook_names(model)
    with model.hooks([(n, keep) for n in names]):
        model(ids).square().sum().backward()  # all positions, the last one too
    last = f".hook_conv_carry.{LENGTH - 1}"
    for n in names:
        if kept[n].numel() == 0 or n.endswith(last):
            continue
        assert kept[n].grad is not None, n
        assert kept[n].grad.isfinite().all(), n
        assert kept[n].grad.any(), n


@pytest.mark.parametrize("name", ONE_KIND)
def test_gradients_of_each_alone_equal_finite_differences(name):
    """Each hook by itself, so that every path that a listener can choose is differentiated."""
    model, ids = tiny(name, layers=1, dtype=torch.float64), tokens()
    step = 1e-7  # small: some norms divide by very little
    for hook_name in hook_names(model):
        direction, slope = {}, {}

        def probe(value, hook, by=0.0, direction=direction, slope=slope):
            if "d" not in direction:
                draw = torch.Generator().manual_seed(5)
                flat = torch.randn(value.shape, generator=draw, dtype=value.dtype)
                direction["d"] = torch.where(value.isfinite(), flat, 0)
            if by == 0.0:
                value.retain_grad()
                slope["at"] = value
                return value
            return value + by * direction["d"]

        def loss(by, probe=probe, hook_name=hook_name):
            hook = (hook_name, lambda value, hook: probe(value, hook, by))
            return model.run_with_hooks(ids, fwd_hooks=[hook]).square().mean()

        loss(0.0).backward()
        grad = slope["at"].grad
        if grad is None or grad.numel() == 0:
            assert hook_name.endswith(f"hook_conv_carry.{LENGTH - 1}") or grad is not None, (
                hook_name
            )
            continue
        predicted = (grad.conj() * direction["d"]).real.sum()
        with torch.no_grad():
            measured = (loss(step) - loss(-step)) / (2 * step)
        assert_near(hook_name, predicted, measured, 1e-6, 1e-5)


def test_caches_leave_the_fast_path_and_its_gradients_alone():
    """Reading writes and decays where gradients are recorded re-runs nothing; hooks may."""
    model, ids = tiny("mamba"), tokens()
    names = ["blocks.0.mixer.hook_ssm_write", "blocks.0.mixer.hook_ssm_decay"]
    plain = model(ids)
    cached, cache = model.run_with_cache(ids, names_filter=names)
    assert torch.equal(cached, plain), "not one rounding differs"
    assert set(cache) == set(names)
    assert model.find_hook(names[0]).only_read is True, "nobody listens any more"
    with model.hooks([(names[0], Counter())]):
        assert not model.find_hook(names[0]).only_read


def test_hooks_work_with_gradients_off():
    model, ids = tiny("mamba"), tokens()
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids, names_filter=lambda n: True)
    assert not logits.requires_grad
    assert not any(value.requires_grad for value in cache.values())
    with torch.no_grad(), torch.enable_grad():  # as attribution does inside a user's no_grad
        model.run_with_cache(ids, incl_bwd=True, return_type="loss")

"""Interventions on states: what an edit reaches, segments, steps, windows (cases.jsonl)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import MODELS, RECURRENT, assert_near, fresh, shape_of, tiny, tokens
from tests.naive_recurrence import Edits, Naive

LENGTH, AT = 12, 5
LAYER = "blocks.0.mixer"
ONE_KIND = [name for name in RECURRENT if name != "mixed"]


def single(name, dtype=torch.float64):
    """One layer in float64."""
    return tiny(name, layers=1, dtype=dtype)


def change_of(model, hook, seed=3):
    """A fixed random change of one position of an activation, per document."""
    spec = model.find_hook(hook).spec
    shape = list(shape_of(model, hook, 2, LENGTH))
    if spec.position_axis == 1:
        shape.pop(1)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if spec.numbers == "complex" else torch.float64
    return torch.randn(shape, generator=generator, dtype=dtype) * 0.3


def add_at(position, change):
    """A hook that adds a change at one position, in place: the hardest form to honour."""

    def hook(value, hook):
        value[:, position] += change

    return hook


def add(change):
    """A hook that returns a changed copy."""
    return lambda value, hook: value + change


def scale_at(position, factor):
    """A hook that scales one position."""

    def hook(value, hook):
        value = value.clone()
        value[:, position] *= factor
        return value

    return hook


def run_mixed(model, ids, hooks=()):
    """What layer 0 mixes, its output to the residual stream, and the logits, under hooks."""
    names = [model.hook_name(0, "mixed"), "blocks.0.hook_mixer_out"]
    with model.hooks(list(hooks)):
        logits, cache = model.run_with_cache(ids, names_filter=names)
    return cache[names[0]], cache[names[1]], logits


def everything(model, ids):
    """A cache of every activation, as a plain dict."""
    _, cache = model.run_with_cache(ids, names_filter=lambda n: True, return_cache_object=False)
    return cache


@pytest.mark.parametrize("name", ONE_KIND)
def test_an_edit_of_the_carry_propagates(name):
    model, ids = single(name), tokens(length=LENGTH)
    naive = Naive(model, everything(model, ids))
    clean, clean_out, _ = run_mixed(model, ids)
    torch.testing.assert_close(naive.mixed(), clean, atol=1e-9, rtol=0)
    hook = f"{LAYER}.hook_ssm_carry.{AT}"
    change = change_of(model, hook)
    mixed, out, _ = run_mixed(model, ids, [(hook, add(change))])
    _, looked_at, _ = run_mixed(model, ids, [(hook, lambda value, hook: None)])
    assert torch.equal(out[:, :AT], looked_at[:, :AT])
    torch.testing.assert_close(looked_at, clean_out, atol=1e-12, rtol=0)
    want = naive.mixed(Edits(carry={AT: change}))
    torch.testing.assert_close(mixed, want, atol=1e-9, rtol=0)
    assert all((out[:, t] - clean_out[:, t]).abs().max() > 1e-9 for t in range(AT, LENGTH))
    spec = model.find_hook(hook).spec
    assert spec.reach == "later" and "propagates" in spec.meaning


@pytest.mark.parametrize("name", ONE_KIND)
def test_an_edit_of_the_state_changes_its_read_only(name):
    model, ids = single(name), tokens(length=LENGTH)
    naive = Naive(model, everything(model, ids))
    _, clean_out, _ = run_mixed(model, ids)
    hook = f"{LAYER}.hook_ssm_state"
    change = change_of(model, hook)
    mixed, out, _ = run_mixed(model, ids, [(hook, add_at(AT, change))])
    want = naive.mixed(Edits(state={AT: change}))
    torch.testing.assert_close(mixed, want, atol=1e-9, rtol=0)
    others = [t for t in range(LENGTH) if t != AT]
    torch.testing.assert_close(out[:, others], clean_out[:, others], atol=1e-12, rtol=0)
    assert (out[:, AT] - clean_out[:, AT]).abs().max() > 1e-6
    spec = model.find_hook(hook).spec
    assert spec.reach == "position" and "this read only" in spec.meaning


@pytest.mark.parametrize("name", ONE_KIND)
def test_an_edit_of_the_write_reruns_the_recurrence(name):
    """The same as editing the carry of that position: what is added at t is in h[t]."""
    model, ids = single(name), tokens(length=LENGTH)
    write, carry = f"{LAYER}.hook_ssm_write", f"{LAYER}.hook_ssm_carry.{AT}"
    change = change_of(model, carry)
    naive = Naive(model, everything(model, ids))
    mixed, _, _ = run_mixed(model, ids, [(write, add_at(AT, change))])
    torch.testing.assert_close(mixed, naive.mixed(Edits(write={AT: change})), atol=1e-9, rtol=0)
    by_carry, _, _ = run_mixed(model, ids, [(carry, add(change))])
    torch.testing.assert_close(mixed, by_carry, atol=1e-9, rtol=0)


WITH_DECAY = [n for n in ONE_KIND if "hook_ssm_decay" in tiny(n).blocks[0].mixer.specs]


@pytest.mark.parametrize("name", WITH_DECAY)
@pytest.mark.parametrize("factor", [0.0, 1.7, -0.5])
def test_an_edit_of_the_decay_reruns_the_recurrence(name, factor):
    model, ids = single(name), tokens(length=LENGTH)
    naive = Naive(model, everything(model, ids))
    hooks = [(f"{LAYER}.hook_ssm_decay", scale_at(AT, factor))]
    mixed, _, _ = run_mixed(model, ids, hooks)
    want = naive.mixed(Edits(decay_factor={AT: factor}))
    torch.testing.assert_close(mixed, want, atol=1e-9, rtol=0)
    if factor == 0:  # forgetting at t is an empty carry at t-1, but for the read at t-1
        zero = (f"{LAYER}.hook_ssm_carry.{AT - 1}", lambda value, hook: torch.zeros_like(value))
        by_carry, _, _ = run_mixed(model, ids, [zero])
        torch.testing.assert_close(mixed[:, AT:], by_carry[:, AT:], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ONE_KIND)
def test_edits_at_every_place_add_up(name):
    """Writes at 2, carries at 4 and 7, a state at 8, a decay at 6, and the pattern, at once."""
    model, ids = single(name), tokens(length=LENGTH)
    naive = Naive(model, everything(model, ids))
    carry = f"{LAYER}.hook_ssm_carry"
    at = {t: change_of(model, f"{carry}.{t}", seed=t) for t in (2, 4, 7, 8)}
    edits = Edits(write={2: at[2]}, carry={4: at[4], 7: at[7]}, state={8: at[8]})
    hooks = [
        (f"{LAYER}.hook_ssm_write", add_at(2, at[2])),
        (f"{carry}.4", add(at[4])),
        (f"{carry}.7", add(at[7])),
        (f"{LAYER}.hook_ssm_state", add_at(8, at[8])),
    ]
    if name in WITH_DECAY:
        edits.decay_factor[6] = 0.6
        hooks.append((f"{LAYER}.hook_ssm_decay", scale_at(6, 0.6)))
    mixed, _, _ = run_mixed(model, ids, hooks)
    torch.testing.assert_close(mixed, naive.mixed(edits), atol=1e-9, rtol=0)

    clean, _, _ = run_mixed(model, ids)
    pattern = (f"{LAYER}.hook_pattern", add(torch.full((LENGTH, LENGTH), 0.1).tril().double()))
    by_pattern, _, _ = run_mixed(model, ids, [pattern])
    assert (by_pattern - clean).abs().max() > 1e-3
    both, _, _ = run_mixed(model, ids, [*hooks, pattern])
    torch.testing.assert_close(both, mixed + (by_pattern - clean), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ONE_KIND)
def test_the_carry_hook_sees_the_state_with_earlier_edits(name):
    model, ids = single(name), tokens(length=LENGTH)
    naive = Naive(model, everything(model, ids))
    change = change_of(model, f"{LAYER}.hook_ssm_carry.3")
    with model.hooks([(f"{LAYER}.hook_ssm_carry.3", add(change))]):
        _, cache = model.run_with_cache(
            ids, names_filter=[f"{LAYER}.hook_ssm_carry.8", f"{LAYER}.hook_ssm_state"]
        )
    states, _ = naive.states(Edits(carry={3: change}))
    got = cache[f"{LAYER}.hook_ssm_carry.8"]
    torch.testing.assert_close(got, states[:, 8], atol=1e-9, rtol=0)
    torch.testing.assert_close(cache[f"{LAYER}.hook_ssm_state"], states, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ONE_KIND)
def test_edits_in_place_count_under_inference_mode(name):
    model, ids = single(name), tokens(length=LENGTH)
    hooks = {}
    for place, where in (("write", AT), ("state", AT), ("carry", None)):
        hook = f"{LAYER}.hook_ssm_{place}" + ("" if where is not None else f".{AT}")
        change = change_of(model, hook)
        in_place = add_at(AT, change) if where is not None else lambda v, hook, c=change: v.add_(c)
        hooks[place] = (hook, in_place)
    for hook in hooks.values():
        want, _, _ = run_mixed(model, ids, [hook])
        with torch.inference_mode():
            got, _, _ = run_mixed(model, ids, [hook])
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ONE_KIND)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_state_at_t_is_the_final_state_of_the_prefix(name, dtype, atol):
    model, ids = tiny(name, dtype=dtype), tokens(length=19)
    names = [model.hook_name(layer, "state") for layer in range(2)]
    names += [f"{LAYER}.hook_ssm_carry.{t}" for t in (0, 7)]
    _, cache = model.run_with_cache(ids, names_filter=names)
    for t in (0, 1, 3, 7, 18):
        _, past = model.step(ids[:, : t + 1])
        for layer in range(2):
            final = past.layers[layer]["state"]
            torch.testing.assert_close(cache[names[layer]][:, t], final, atol=atol, rtol=0)
    for t in (0, 7):
        carry, state = cache[f"{LAYER}.hook_ssm_carry.{t}"], cache[names[0]][:, t]
        torch.testing.assert_close(carry, state, atol=atol, rtol=0)


def in_segments(model, ids, lengths):
    """Logits of all segments, and what the last one hands on."""
    past, logits = None, []
    for piece in ids.split(list(lengths), dim=1):
        part, past = model.step(piece, past)
        logits.append(part)
    return torch.cat(logits, dim=1), past


def same_carried(got, want, atol):
    """Assert that two runs hand on the same tensors."""
    assert got.length == want.length
    for a, b in zip(got.layers, want.layers, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert_near(key, a[key], b[key], atol)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [(1, 1, 2, 5, 28), (16, 21)])
def test_any_split_gives_the_outputs_and_states_of_one_pass(name, lengths):
    model, ids = fresh(name), tokens(length=37)
    want, past = model.step(ids)
    torch.testing.assert_close(want, model(ids), atol=1e-5, rtol=0)
    got, carried = in_segments(model, ids, lengths)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    same_carried(carried, past, 1e-5)


@settings(max_examples=12, deadline=None)
@given(cuts=st.sets(st.integers(1, 20), max_size=6), name=st.sampled_from(MODELS))
def test_random_splits_change_nothing(cuts, name):
    model, ids = tiny(name, dtype=torch.float64), tokens(length=21)
    bounds = [0, *sorted(cuts), 21]
    got, carried = in_segments(
        model, ids, [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    )
    want, past = model.step(ids)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    same_carried(carried, past, 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_step_by_step_is_the_forward_pass_and_repeatable(name):
    """48 tokens: more than one chunk of any op whose chunks are shorter than a sequence."""
    model, ids = fresh(name, layers=1), tokens(length=48)
    with torch.no_grad():
        got, _ = in_segments(model, ids, [1] * 48)
        again, _ = in_segments(model, ids[:, :9], [1] * 9)
        assert torch.equal(got[:, :9], again)
        torch.testing.assert_close(got, model(ids), atol=1e-4, rtol=0)


def carries_only(name, *keys):
    """Whether a layer hands on nothing but these."""
    _, past = tiny(name, layers=1).step(tokens())
    return past.layers[0].keys() <= set(keys)


FINITE = [n for n in MODELS if n != "mixed" and carries_only(n, "state", "window")]


@pytest.mark.parametrize("name", FINITE)
def test_state_and_window_together_hold_all_that_is_carried(name):
    """Patched both at t from another prompt, what follows is as after that prompt's start."""
    model = single(name, torch.float32)
    base, source = tokens(1, 10, seed=1), tokens(1, 10, seed=2)
    mixer = model.blocks[0].mixer
    window = f"{LAYER}.hook_conv_carry.{AT}" if "hook_conv_carry" in mixer.specs else None
    state = f"{LAYER}.hook_ssm_carry.{AT}" if "hook_ssm_carry" in mixer.specs else None
    names = [n for n in (window, state) if n]
    _, cache = model.run_with_cache(source, names_filter=names)
    hooks = {n: (n, lambda value, hook: cache[hook.name]) for n in names}
    spliced = torch.cat([source[:, : AT + 1], base[:, AT + 1 :]], dim=1)
    want = model(spliced)[:, AT + 1 :]
    got = model.run_with_hooks(base, fwd_hooks=list(hooks.values()))[:, AT + 1 :]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    if window and state and 0 not in cache[window].shape:
        for alone in hooks.values():  # each holds a part only
            got = model.run_with_hooks(base, fwd_hooks=[alone])[:, AT + 1 :]
            assert (got - want).abs().max() > 1e-4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_prompts_as_short_as_the_window_run(name, length):
    model, ids = fresh(name), tokens(length=4)
    logits, past = model.step(ids[:, :length])
    assert past.length == length
    torch.testing.assert_close(logits, model(ids)[:, :length], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ONE_KIND)
def test_interventions_act_while_decoding(name):
    """The same carry hook in step mode and in generation as in one pass."""
    model, ids = single(name), tokens(length=LENGTH)
    hook = f"{LAYER}.hook_ssm_carry.{AT}"
    change = change_of(model, hook)
    with model.hooks([(hook, add(change))]):
        want = model(ids)
        got, _ = in_segments(model, ids, [4, 1, 1, 1, 5])
        new = model.generate(ids[:, :4], LENGTH - 4)
        torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
        logits = model(new)
    assert torch.equal(logits[:, 3:-1].argmax(-1), new[:, 4:])
    assert (want - model(ids)).abs().max() > 1e-6

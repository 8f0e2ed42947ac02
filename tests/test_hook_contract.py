"""The contract of every hook point of every mixer: it is declared, fires once, and is lazy."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hooked_ssm.ops.dispatch import use_impl
from tests.models import (
    LENGTH,
    MODELS,
    ONE_KIND,
    WITH_PATTERN,
    axis_sizes,
    fresh,
    hook_names,
    shape_of,
    tiny,
    tokens,
)

BLOCK = {"hook_resid_pre", "hook_mixer_in", "hook_mixer_out", "hook_resid_post"}
BLOCK_MLP = {"hook_resid_mid", "hook_mlp_out", "mlp.hook_pre", "mlp.hook_post"}
NORM = ("hook_scale", "hook_normalized")


def expected_names(model) -> set[str]:
    """What the specs promise: the union over the model, its blocks and their mixers."""
    names = {"hook_embed", *(f"ln_final.{n}" for n in NORM)}
    if model.cfg.positions == "learned":
        names.add("hook_pos_embed")
    for layer, block in enumerate(model.blocks):
        norms = ("ln1", "ln2") if block.has_mlp else ("ln1",)
        local = {f"{ln}.{n}" for ln in norms for n in NORM} | BLOCK
        local |= BLOCK_MLP if block.has_mlp else set()
        local |= {
            f"mixer.{spec.name}" for spec in block.mixer.hook_specs() if not spec.per_position
        }
        names |= {f"blocks.{layer}.{name}" for name in local}
    return names


@pytest.mark.parametrize("name", MODELS)
def test_hook_dict_is_the_union_of_the_specs(name):
    model = tiny(name)
    assert set(model.hook_dict) == expected_names(model)
    families = {
        f"blocks.{layer}.mixer.{spec.name}"
        for layer, block in enumerate(model.blocks)
        for spec in block.mixer.hook_specs()
        if spec.per_position
    }
    assert set(model.families) == families
    assert len(model.hook_specs()) == len(model.hook_dict) + len(families)


@pytest.mark.parametrize("name", MODELS)
def test_specs_are_complete(name):
    """Batch first, position second or as a query axis, a meaning, roles that resolve uniquely."""
    model = tiny(name)
    for hook, spec in model.hook_specs().items():
        assert spec.meaning and spec.reach in ("later", "position"), hook
        assert spec.axes[0] == "batch" or "tap" in spec.axes, hook
        assert spec.per_position == hook.endswith(".{t}"), hook
        if spec.per_position:
            assert spec.position_axis is None, hook
        elif "tap" not in spec.axes:
            assert spec.position_axis is not None, hook
    for block in model.blocks:
        roles = [role for spec in block.mixer.hook_specs() for role in spec.roles]
        twice = [role for role, count in Counter(roles).items() if count > 1]
        assert not twice, f"{type(block.mixer).__name__} plays {twice} twice"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "length"), [(2, LENGTH), (1, 1)])
def test_each_fires_once_with_its_declared_shape_and_dtype(name, batch, length):
    model = tiny(name)
    fired: Counter[str] = Counter()

    def look(value, hook):
        fired[hook.name] += 1
        assert tuple(value.shape) == shape_of(model, hook.name, batch, length), hook.name
        assert value.dtype == torch.float32 or value.is_complex(), hook.name

    names = hook_names(model, length)
    model.run_with_hooks(tokens(batch, length), fwd_hooks=[(n, look) for n in names])
    assert fired == dict.fromkeys(names, 1)


@pytest.mark.parametrize("name", ONE_KIND)
def test_each_fires_once_when_it_alone_is_listened_to(name):
    """Which path runs depends on who listens: none may be mute."""
    model, ids = tiny(name, layers=1), tokens()
    for hook_name in hook_names(model):
        calls = []
        model.run_with_hooks(
            ids, fwd_hooks=[(hook_name, lambda value, hook, calls=calls: calls.append(hook.name))]
        )
        assert calls == [hook_name]


@pytest.mark.parametrize("name", MODELS)
def test_bytes_declared_are_the_bytes_there_are(name):
    """In bfloat16: the float32 core (decay, step size, states, norms) is declared as such."""
    model = tiny(name, dtype=torch.bfloat16)
    wrong = {}

    def look(value, hook):
        declared = hook.spec.bytes_per_number(torch.bfloat16)
        if value.element_size() != declared:
            wrong[hook.name] = (str(value.dtype), declared)

    model.run_with_hooks(tokens(), fwd_hooks=[(n, look) for n in hook_names(model)])
    assert not wrong


@pytest.mark.parametrize("name", ONE_KIND)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_identity_and_self_patching_change_nothing(name, dtype, atol):
    model, ids = fresh(name, dtype, layers=1), tokens()
    names = hook_names(model)
    with torch.no_grad():
        plain = model(ids)
        want, cache = model.run_with_cache(ids, names_filter=names)
        assert (want - plain).abs().max() <= atol
        for hook_name in names:
            for hook in (lambda value, hook: value.clone(), lambda value, hook: cache[hook.name]):
                got = model.run_with_hooks(ids, fwd_hooks=[(hook_name, hook)])
                error = (got - plain).abs().max()
                assert error <= atol, f"{hook_name}: {error:.3g}"


@pytest.mark.parametrize("name", MODELS)
def test_no_hook_is_mute_on_the_reference_path(name):
    model, ids = tiny(name), tokens()
    fired: Counter[str] = Counter()
    names = hook_names(model)

    def count(value, hook):
        fired[hook.name] += 1

    with torch.no_grad(), use_impl("reference"):
        plain = model.run_with_hooks(ids, fwd_hooks=[(n, count) for n in names])
        assert fired == dict.fromkeys(names, 1)
        for state in (n for n in names if n.endswith("hook_ssm_state")):
            assert not torch.equal(model.run_with_hooks(ids, fwd_hooks=[(state, zero)]), plain)


def zero(value, hook):
    """Zero an activation; what a norm divides by is doubled instead, since 1/0 tells nothing."""
    return 2 * value if hook.name.endswith("hook_scale") else torch.zeros_like(value)


@pytest.mark.parametrize("name", ONE_KIND)
def test_zeroing_changes_the_logits(name):
    model, ids = tiny(name, layers=1), tokens()
    plain = model(ids)
    for hook_name in hook_names(model):
        if 0 in shape_of(model, hook_name):
            continue  # the window of a convolution of width 1 is empty
        got = model.run_with_hooks(ids, fwd_hooks=[(hook_name, zero)])
        last_window = hook_name.endswith(f"hook_conv_carry.{LENGTH - 1}")
        assert torch.equal(got, plain) == last_window, hook_name


@pytest.mark.parametrize("name", MODELS)
def test_step_mode_fires_the_same_names_once_per_step(name):
    model, ids = tiny(name), tokens()
    fired: Counter[str] = Counter()

    def look(value, hook):
        fired[hook.name] += 1
        spec = hook.spec
        if spec.position_axis is not None:
            assert value.shape[spec.position_axis] == 1, hook.name
        sizes = axis_sizes(model, hook.name, 2, 1)
        for axis, size in zip(spec.axes, value.shape, strict=True):
            if axis not in ("key_pos", "tap"):  # keys and filters reach into the past
                assert size == sizes[axis], f"{hook.name}: {axis} is {size}"

    names = hook_names(model)
    past = None
    with model.hooks([(n, look) for n in names]):
        for step in range(LENGTH):
            fired.clear()
            _, past = model.step(ids[:, step : step + 1], past)
            here = [n for n in names if n in model.hook_dict or n.endswith(f".{step}")]
            assert fired == dict.fromkeys(here, 1)


class _Shapes(TorchDispatchMode):
    """Collects the shapes of everything that is computed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {tuple(t.shape) for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
        return result


@pytest.mark.parametrize("name", MODELS)
def test_heavy_ones_are_neither_cached_nor_computed_unless_named(name):
    batch, length = 2, 130  # longer than two chunks of any op
    model, ids = tiny(name), tokens(batch, length)
    heavy = [n for n, point in model.hook_dict.items() if point.spec.heavy]
    light = {shape_of(model, n, batch, length) for n in model.hook_dict if n not in heavy}
    with _Shapes() as shapes:
        _, cache = model.run_with_cache(ids)
    assert set(cache.keys()) == set(model.hook_dict) - set(heavy)
    made = [n for n in heavy if shape_of(model, n, batch, length) in shapes.seen - light]
    assert not made, f"computed although nobody listens: {made}"
    if heavy:
        with _Shapes() as shapes:
            _, cache = model.run_with_cache(ids, names_filter=heavy)
        assert set(cache.keys()) == set(heavy)
        assert {shape_of(model, n, batch, length) for n in heavy} <= shapes.seen


@pytest.mark.parametrize("name", WITH_PATTERN)
def test_pattern_times_value_is_what_was_mixed(name):
    length = 24
    model = tiny(name, dtype=torch.float64)
    ids = tokens(length=length)
    plain, cache = model.run_with_cache(ids, names_filter=lambda n: True)
    for layer, block in enumerate(model.blocks):
        pattern = cache[model.hook_name(layer, "pattern")]
        above = torch.ones(length, length, dtype=torch.bool).triu(1)
        assert not pattern[..., above].any(), "entries above the diagonal"
        mixed = cache[model.hook_name(layer, "mixed")]
        offset = block.mixer.pattern_offset(lambda n, at=layer: cache[f"blocks.{at}.mixer.{n}"])
        got = apply_pattern(model, layer, pattern, cache) + offset
        torch.testing.assert_close(got, mixed, atol=1e-8, rtol=0)
    hooked = model.run_with_hooks(
        ids,
        fwd_hooks=[
            (model.hook_name(layer, "pattern"), lambda value, hook: value.clone())
            for layer in range(len(model.blocks))
        ],
    )
    torch.testing.assert_close(hooked, plain, atol=1e-8, rtol=0)


def apply_pattern(model, layer, pattern, cache):
    """pattern @ value, by the names of the axes; shaped like the mixed values."""
    mixer = model.blocks[layer].mixer
    values = [spec for spec in mixer.specs.values() if "value" in spec.roles]
    value = cache[f"blocks.{layer}.mixer.{values[0].name}"] if values else cache["mixer_in", layer]
    per = pattern.shape[1]
    if values and "kv_head" in values[0].axes:
        value = value.repeat_interleave(per // value.shape[2], dim=2)
    if value.ndim == 3 and value.shape[2] != per:  # heads side by side in one axis
        heads = value.unflatten(-1, (per, -1))
        return torch.einsum("bhqk,bkhd->bqhd", pattern, heads).flatten(2)
    return torch.einsum("bhqk,bkh...->bqh...", pattern, value)


@pytest.mark.parametrize("name", WITH_PATTERN)
def test_an_edited_pattern_is_what_the_mixer_computes_with(name):
    """Dropping one key position from the pattern removes exactly its share of the mixed values."""
    model, ids = tiny(name, dtype=torch.float64), tokens()
    names = [model.hook_name(0, "pattern"), model.hook_name(0, "mixed")]
    _, clean = model.run_with_cache(ids, names_filter=lambda n: True)

    def drop(pattern, hook):
        pattern = pattern.clone()
        pattern[..., 2] = 0
        return pattern

    with model.hooks([(names[0], drop)]):
        _, cache = model.run_with_cache(ids, names_filter=names[1])
    only = torch.zeros_like(clean[names[0]])
    only[..., 2] = clean[names[0]][..., 2]
    share = apply_pattern(model, 0, only, clean)
    assert share.abs().max() > 1e-6
    torch.testing.assert_close(cache[names[1]], clean[names[1]] - share, atol=1e-9, rtol=0)

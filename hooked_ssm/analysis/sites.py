"""Sites: where in a layer an analysis looks, by one word for every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hooked_ssm.checks import Indices, Words, checked
from hooked_ssm.errors import HookNameError
from hooked_ssm.hook_names import HookSpec
from hooked_ssm.model import HookedModel

BLOCK_SITES = ("resid_pre", "mixer_in", "mixer_out", "mlp_in", "mlp_out", "resid_post")
"""Inputs and outputs of block, mixer and MLP; a layer without an MLP has no mlp_in and mlp_out."""


class Site(NamedTuple):
    """One activation of one layer.

    Attributes:
        word: What was asked for: a block-level word, a role, or a mixer's hook word.
        layer: The layer.
        hook: The hook name; for per-position hook points, of their family.
        per_position: Whether `hook` is a family: `hook.{t}`.
    """

    word: str
    layer: int
    hook: str
    per_position: bool


def chosen_layers(model: HookedModel, layers: Sequence[int] | None) -> list[int]:
    """Return the layers asked for, counted from the first; all if None.

    Raises:
        HookNameError: There is none, or one does not exist.
    """
    n = len(model.blocks)
    chosen = list(range(n)) if layers is None else [int(layer) for layer in layers]
    for layer in chosen:
        if not -n <= layer < n:
            raise HookNameError(f"layer {layer} does not exist: allowed 0..{n - 1}, or from -{n}")
    if not chosen:
        raise HookNameError(f"layers={layers!r}; allowed: a non-empty list, or None for all {n}")
    return [layer % n for layer in chosen]


@checked
def find_site(model: HookedModel, layer: int, word: str) -> Site:
    """Return the site a word stands for in a layer.

    Args:
        word: "resid_pre", "mixer_in", "mixer_out", "mlp_in", "mlp_out", "resid_post", a role
            ("query", "state", "carry", "conv", "pattern", ...), or the end of one of the mixer's
            hook names ("ssm_dt", "q").

    Raises:
        HookNameError: The layer has no such thing; says what it has.

    Examples:
        >>> from hooked_ssm import ModelConfig
        >>> cfg = ModelConfig(mixers=["attention", "mamba2"], d_model=8, d_vocab=9, n_ctx=9)
        >>> model = HookedModel(cfg)
        >>> find_site(model, 0, "query").hook, find_site(model, 1, "query").hook
        ('blocks.0.mixer.hook_q', 'blocks.1.mixer.hook_ssm_C')
    """
    (layer,) = chosen_layers(model, [layer])
    if word.startswith("mlp_") and not model.blocks[layer].has_mlp:
        raise HookNameError(f"layer {layer} of the {model.title} has no {word}: it has no MLP")
    if word == "mlp_in":
        return Site(word, layer, f"blocks.{layer}.ln2.hook_normalized", per_position=False)
    hook = model.hook_of(layer, word)
    return Site(word, layer, hook, per_position=hook in model.families)


def site_spec(model: HookedModel, site: Site) -> HookSpec:
    """Return the spec of a site's hook point, or of its family of them."""
    if site.per_position:
        return model.families[site.hook].spec
    return model.find_hook(site.hook).spec


@checked
def find_sites(model: HookedModel, words: Words, layers: Indices | None = None) -> list[Site]:
    """Return the sites of several words in several layers, layer by layer.

    A layer that lacks a word is passed over (stacks of different mixers differ), but a word that
    no layer has is an error.

    Raises:
        HookNameError: No layer has one of the words.
    """
    layers = chosen_layers(model, layers)
    found: list[Site] = []
    for word in words:
        here, refusal = [], None
        for layer in layers:
            try:
                here.append(find_site(model, layer, word))
            except HookNameError as error:
                refusal = error
        if not here and refusal is not None:
            raise refusal
        found += here
    return sorted(found, key=lambda site: site.layer)


def block_sites(model: HookedModel, layers: Sequence[int] | None = None) -> list[Site]:
    """Return the inputs and outputs of every block, mixer and MLP that the layers have."""
    found = []
    for layer in chosen_layers(model, layers):
        has_mlp = model.blocks[layer].has_mlp
        words = [w for w in BLOCK_SITES if has_mlp or not w.startswith("mlp")]
        found += [find_site(model, layer, word) for word in words]
    return found

"""Where inside a mixer an association is made: restore one thing at a time, key corrupted.

What reads the key before the short convolution can be restored only at the key. If the mixer ties
key and value together in its convolution, what comes *out* of the convolution restores the answer
at a later position, one that its window reaches after the key, and the write there carries it into
the state.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from hooked_ssm.analysis.engine import Cell, Interchange
from hooked_ssm.analysis.interchange import KEY, QUERY, STRONG, VALUE, WEAK
from hooked_ssm.analysis.sites import Site, find_site
from hooked_ssm.errors import HookNameError
from hooked_ssm.model import HookedModel
from hooked_ssm.tasks import TaskBatch

Association = Literal["convolution", "token mixing", "not located", "unsolved"]

WORDS = (
    "mixer_in", "conv_in", "conv", "key", "value", "query", "gate", "write", "carry", "mixed"
)  # fmt: skip
"""Asked of every mixer; one that has no such thing is passed over."""

WINDOW = "window"
"""The place that is all positions behind the key which the convolution reaches, at once."""

FOUND = 0.5
"""Share from which a single position counts as one where the association is found."""

LONGEST_WINDOW = 4
"""A convolution as long as the context (H3's shift, BaseConv's long filter) counts as this."""

TOKENS_AT_ONCE = 8192
"""Documents are taken in parts of so many tokens: writes are large."""


def places(batch: TaskBatch, window: int, read_at: Tensor) -> dict[str, Tensor]:
    """Return the places that matter for a convolution over `window` positions.

    The key, the value and the token after it, the divider and the query, whatever else the window
    reaches the key from (key+1, ...), and all of that at once. Two names of one place, as value
    and key+1 in associative recall, give one. Nothing lies behind the query.

    Returns:
        Label -> positions. [batch] or [batch, k]
    """
    key, value = batch.positions[KEY], batch.positions[VALUE]
    reached = {f"key+{i}": torch.minimum(key + i, read_at) for i in range(1, window)}
    named = {
        "key": key,
        **reached,
        "value": value,
        "value+1": torch.minimum(value + 1, read_at),
        "divider": batch.positions["divider"],
        "query": batch.positions[QUERY],
    }
    found = {
        label: at
        for label, at in named.items()
        if not (
            label.startswith("key+")
            and any(torch.equal(at, named[n]) for n in ("value", "value+1", "query"))
        )
    }
    if reached:
        found[WINDOW] = torch.stack(list(reached.values()), dim=1)
    return found


def inside_sites(model: HookedModel, layer: int) -> list[Site]:
    """Return the sites inside a layer's mixer that can be restored by position."""
    found = []
    for word in WORDS:
        try:
            site = find_site(model, layer, _hook_word(model, layer, word))
        except HookNameError:
            continue
        found.append(site._replace(word=word))
    return found


def window_of(model: HookedModel, layer: int) -> int:
    """Return over how many positions the mixer's convolution reaches; 1 without one."""
    earlier = model.blocks[layer].mixer.axis_sizes().get("earlier")
    long = "hook_filter" in model.blocks[layer].mixer.specs and earlier is None
    return LONGEST_WINDOW if long else min((earlier or 0) + 1, LONGEST_WINDOW)


@torch.no_grad()
def restore_inside(
    model: HookedModel,
    batch: TaskBatch,
    corrupted: Int[Tensor, "batch pos"],
    layer: int,
    read_at: Int[Tensor, " batch"],
    *,
    max_batch: int = 512,
) -> pd.DataFrame:
    """Run the corrupted documents, each time with one thing inside a mixer restored.

    Args:
        batch: The original documents.
        corrupted: The same with the key replaced.
        layer: Whose mixer.
        read_at: Where the answer is read.
        max_batch: Most documents in one forward.

    Returns:
        One row per site (see `inside_sites`) and place (see `places`), with columns corrupt,
        direction, site, layer, hook, restore (the place), original, corrupted, restored,
        attribution and attribution_error.
    """
    sites = inside_sites(model, layer)
    at = places(batch, window_of(model, layer), read_at)
    labels = [(site, place) for site in sites for place in at]
    parts = []
    size = max(1, TOKENS_AT_ONCE // batch.tokens.shape[1])
    for rows in torch.arange(len(batch), device=read_at.device).split(size):
        cells = [Cell(site, at[place][rows]) for site, place in labels]
        parts.append(
            _restored(model, batch[rows], corrupted[rows], read_at[rows], cells, max_batch)
        )
    original, changed, restored = (torch.cat(x, dim=-1) for x in zip(*parts, strict=True))
    attribution, error = ratio_of_means(restored - changed, original - changed)
    return pd.DataFrame(
        {
            "corrupt": KEY,
            "direction": "restore",
            "site": [site.word for site, _ in labels],
            "layer": layer,
            "hook": [site.hook for site, _ in labels],
            "restore": [place for _, place in labels],
            "original": original.mean().item(),
            "corrupted": changed.mean().item(),
            "restored": restored.mean(1).tolist(),
            "attribution": attribution.tolist(),
            "attribution_error": error.tolist(),
        }
    )


class Located(NamedTuple):
    """Where in a mixer an association is made.

    Attributes:
        association: In which part.
        place: What the convolution's output was restored at best, if it is in the convolution.
        evidence: In a sentence.
    """

    association: Association
    place: str | None
    evidence: str


def locate(frame: pd.DataFrame) -> Located:
    """Read off `restore_inside`'s frame of one layer where in the mixer the association is made.

    Shares are of what the key's place gives back in front of the mixer (a part of the answer may
    come by another layer's way); below 0.25 nothing is located.

    - "convolution": its input restores the answer at the key and nowhere behind it, its output at
      a position behind the key (or at those its window reaches, together), no longer at the key.
    - "token mixing": the key is still at its own place in front of the mixing, and behind it the
      answer is restored at the value or at the query.
    - "not located": anything else.
    """
    table = frame.pivot(index="site", columns="restore", values="attribution")
    behind = [p for p in table.columns if p not in ("key", "divider", "query", WINDOW)]
    before = table.loc["conv_in" if "conv_in" in table.index else "mixer_in"]
    whole = before["key"]
    has_conv = "conv" in table.index
    evidence = (
        f"Restoring what enters the {'convolution' if has_conv else 'mixer'} gives back "
        f"{whole:.2f} of the answer at the key, at most {before[behind].max():.2f} behind it"
    )
    only_at_key = whole >= WEAK and before[behind].max() <= WEAK * whole
    at_key = whole
    if has_conv:
        conv = table.loc["conv"]
        best, at_key = str(conv[behind].idxmax()), conv["key"]
        together = conv[WINDOW] if WINDOW in table.columns else conv[best]
        evidence += (
            f"; restoring what leaves it {at_key:.2f} at the key, {conv[best]:.2f} at {best}, "
            f"{together:.2f} at all places behind the key that it reaches"
        )
        if "write" in table.index:
            evidence += f"; the write at {best} alone {table.loc['write', best]:.2f}"
        moved = conv[best] >= FOUND * whole or together >= STRONG * whole
        if only_at_key and moved and at_key <= WEAK * whole:
            return Located("convolution", best, f"{evidence}.")
    mixed = table.loc["mixed", ["value", "query"]]
    evidence += (
        f"; the mixed values {mixed['value']:.2f} at the value, {mixed['query']:.2f} at the query."
    )
    if only_at_key and at_key >= STRONG * whole and mixed.max() >= STRONG * whole:
        return Located("token mixing", None, evidence)
    return Located("not located", None, evidence)


def ratio_of_means(gain: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Mean gain over mean scale, and its standard error by the delta method. [cell]"""
    ratio = gain.mean(1) / scale.mean()
    spread = (gain - ratio[:, None] * scale) / scale.mean()
    return ratio, spread.std(1) / len(scale) ** 0.5


def _restored(
    model: HookedModel,
    batch: TaskBatch,
    corrupted: Tensor,
    read_at: Tensor,
    cells: list[Cell],
    max_batch: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of the answer: original, corrupted [batch], restored [cell, batch]."""
    mask = None if bool(batch.mask.all()) else batch.mask
    engine = Interchange(
        model, corrupted, batch.tokens, read_at, attention_mask=mask, max_batch=max_batch
    )
    original = answer_probability(engine.source_logits, batch.answer)
    changed = answer_probability(engine.base_logits, batch.answer)
    restored = original.new_empty(len(cells), len(original))
    for group, logits in engine.run(cells):
        restored[group] = answer_probability(logits, batch.answer.expand(len(group), -1))
    return original, changed, restored


def answer_probability(logits: Tensor, answer: Tensor) -> Tensor:
    """Return each document's probability of its answer, in float64. [..., batch]"""
    log = torch.log_softmax(logits, dim=-1)
    return log.gather(-1, answer[..., None])[..., 0].double().exp()


def _hook_word(model: HookedModel, layer: int, word: str) -> str:
    """What enters the convolution has a name of its own in each mixer."""
    if word != "conv_in":
        return word
    specs = model.blocks[layer].mixer.specs
    if "hook_shift" in specs:  # H3: its shift runs over the keys
        return "k"
    if "hook_in_proj" in specs:
        return "in_proj"
    # Delta nets, GLA and BaseConv convolve (parts of) the mixer's input, hooked as such.
    raise HookNameError("what enters the convolution is the mixer's input")

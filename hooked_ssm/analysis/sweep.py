"""What a sweep goes over: sites by word, positions along the sequence, heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_ssm.analysis.exchange import head_axis
from hooked_ssm.analysis.sites import Site, find_sites, site_spec
from hooked_ssm.checks import Indices
from hooked_ssm.errors import ShapeError
from hooked_ssm.hook_names import HookSpec
from hooked_ssm.model import HookedModel
from hooked_ssm.rules import Rule, shown_indices

Direction = Literal["denoise", "noise"]
Listed = Annotated[
    Sequence[int],
    Rule(  # A tensor could be a list of positions as well as one position per document.
        "a list of integers",
        lambda value: not isinstance(value, Tensor),
        remedy=lambda value: (
            'Got a tensor [batch]; give {"query_item_orig": tensor} for one position per document, '
            "or a list of ints for the same positions in all"
            if isinstance(value, Tensor)
            else ""
        ),
    ),
]
Positions = Listed | Mapping[str, Int[Tensor, " batch"]] | Literal["all"] | None
Heads = Indices | Literal["all"] | None


class Plan(NamedTuple):
    """What is swept of one word: its sites, one per layer that has it, and their heads."""

    word: str
    sites: list[Site]
    heads: list[int | None]

    @property
    def head_labels(self) -> list[int] | None:
        """The heads, None if whole activations are swept."""
        return [head for head in self.heads if head is not None] or None

    def head_axis(self, spec: HookSpec) -> int | None:
        """The axis of the heads that are swept, None if none are."""
        return head_axis(spec) if self.head_labels else None


def make_plans(
    model: HookedModel, sites: Sequence[str], layers: Sequence[int] | None, heads: Heads
) -> list[Plan]:
    """Return what to sweep of every word.

    Raises:
        HookNameError: No layer has one of the sites.
        ShapeError: A site without positions, or without the heads asked for.
    """
    return [_plan(model, word, layers, heads) for word in dict.fromkeys(sites)]


def _plan(model: HookedModel, word: str, layers: Sequence[int] | None, heads: Heads) -> Plan:
    sites = find_sites(model, [word], layers)
    specs = [site_spec(model, site) for site in sites]
    for site, spec in zip(sites, specs, strict=True):
        if not (site.per_position or spec.position_axis is not None) or not spec.has_batch:
            raise ShapeError(
                f"{site.hook} has axes {list(spec.axes)}: it is one for all documents or "
                "positions, so it cannot be patched by position; use model.run_with_hooks"
            )
    if heads is None:
        return Plan(word, sites, [None])
    axes = [head_axis(spec) for spec in specs]
    counts = {
        0 if axis is None else model.blocks[site.layer].mixer.axis_sizes()[spec.axes[axis]]
        for axis, spec, site in zip(axes, specs, sites, strict=True)
    }
    if len(counts) > 1 or 0 in counts:
        raise ShapeError(
            f"heads={heads!r}: site {word!r} has {sorted(counts)} heads in layers "
            f"{[s.layer for s in sites]}; sweep layers with one number of heads, or heads=None"
        )
    most = counts.pop()
    chosen = list(range(most)) if isinstance(heads, str) else [int(h) for h in heads]
    if (isinstance(heads, str) and heads != "all") or not all(0 <= h < most for h in chosen):
        raise ShapeError(f"heads={heads!r}; allowed: 'all', or indices in 0..{most - 1}")
    return Plan(word, sites, list(chosen))


def make_columns(positions: Positions, tokens: Tensor) -> dict[str | int, Tensor]:
    """What is swept along the sequence, by label. [batch] or, for "all", [batch, pos]

    Raises:
        ShapeError: A position outside, or none at all.
    """
    batch, length = tokens.shape
    columns: dict[str | int, Tensor]
    if isinstance(positions, Mapping):
        for name, at in positions.items():
            if at.shape != (batch,) or not bool(((at >= 0) & (at < length)).all()):
                raise ShapeError(
                    f"positions[{name!r}] must hold one index in 0..{length - 1} for each of the "
                    f"{batch} documents; got {shown_indices(at)}"
                )
        columns = {name: at.to(tokens.device) for name, at in positions.items()}
    elif isinstance(positions, str):
        if positions != "all":
            raise ShapeError(f"positions={positions!r}; allowed: 'all', indices, a mapping, None")
        columns = {"all": torch.arange(length, device=tokens.device).expand(batch, -1)}
    else:
        wanted = range(length) if positions is None else [int(t) for t in positions]
        if not all(-length <= t < length for t in wanted):
            raise ShapeError(f"positions={list(wanted)}; allowed: 0..{length - 1}, or from the end")
        where = tokens[:, 0].long()
        columns = {t % length: torch.full_like(where, t % length) for t in wanted}
    if not columns:
        raise ShapeError("positions is empty; leave it None to sweep every position")
    return columns

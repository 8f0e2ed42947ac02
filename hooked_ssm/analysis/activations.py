"""Activations of one run at one position per document, for any site."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_ssm.analysis.sites import Site
from hooked_ssm.errors import ShapeError
from hooked_ssm.model import HookedModel


@torch.no_grad()
def activations_at(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    sites: list[Site],
    positions: Int[Tensor, "place batch"],
    attention_mask: Tensor | None = None,
) -> dict[Site, Tensor]:
    """Run the documents once; return every site at every place.

    Args:
        model: Its mode (train or eval) is the caller's.
        sites: Where; per-position sites (the carry) too.
        positions: One position of each document per place.
        attention_mask: False at padding. [batch, pos]

    Returns:
        Site -> activation. [place, batch, ...]

    Raises:
        ShapeError: A site without a position axis.
    """
    names: list[str] = []
    for site in sites:
        times = positions.unique().tolist() if site.per_position else []
        names += [f"{site.hook}.{t}" for t in times] if site.per_position else [site.hook]
    _, cache = model.run_with_cache(
        tokens,
        return_type=None,
        names_filter=list(dict.fromkeys(names)),
        attention_mask=attention_mask,
        return_cache_object=False,
    )
    documents = torch.arange(len(tokens), device=tokens.device)
    found = {}
    for site in sites:
        if site.per_position:
            times, index = positions.unique(return_inverse=True)
            stacked = torch.stack([cache[f"{site.hook}.{t}"] for t in times.tolist()])
            found[site] = stacked[index, documents]
            continue
        found[site] = cache[site.hook].movedim(position_axis(model, site.hook), 1)[
            documents, positions
        ]
    return found


def position_axis(model: HookedModel, hook: str) -> int:
    """Return the declared position axis of a hook.

    Raises:
        ShapeError: It has none.
    """
    axis = model.find_hook(hook).spec.position_axis
    if axis is None:
        raise ShapeError(f"{hook} has no position axis: there is nothing to take by position")
    return axis

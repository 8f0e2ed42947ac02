"""Interchange, many cells at a time: run one input with activations of another put in.

A cell is one activation at one position per document. The documents of all cells of a site are
packed into full batches that start at the site's layer, from the base run's residual stream.
Documents in which a patch cannot change anything are not run at all: where both runs have the
same activation, where the position lies behind the one that is read, and where a position no
longer acts on others (after the last layer's mixer). Logits are computed only where they are
read. All of this is exact: results equal one full forward per cell, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from hooked_ssm.analysis.sites import Site
from hooked_ssm.block import AFTER_MIXING
from hooked_ssm.errors import ShapeError
from hooked_ssm.model import HookedModel

Hook = tuple[str | Callable[..., Any], Callable[..., Any]]


class Cell(NamedTuple):
    """One patch per document.

    Attributes:
        site: Where.
        positions: At which position of each document. [batch]
    """

    site: Site
    positions: Int[Tensor, " batch"]


class _Rows(NamedTuple):
    """Documents to run: of which cell, which document, which position. Each [row]"""

    cell: Tensor
    document: Tensor
    position: Tensor

    def part(self, first: int, stop: int) -> _Rows:
        index = slice(first, stop)
        return _Rows(self.cell[index], self.document[index], self.position[index])


class Interchange:
    """Patches activations of a source run into a base run.

    Args:
        model: Put into eval mode by the caller.
        base: The documents that are run. [batch, pos]
        source: The documents whose activations are put in; shaped as `base`. [batch, pos]
        read_at: The position of each document where logits are read. [batch]
        attention_mask: False at padding, for both. [batch, pos]
        max_batch: Most documents in one forward.

    Raises:
        ShapeError: Shapes or devices differ, or a position lies outside.
    """

    def __init__(
        self,
        model: HookedModel,
        base: Tensor,
        source: Tensor,
        read_at: Tensor,
        *,
        attention_mask: Tensor | None = None,
        max_batch: int = 512,
    ):
        if base.shape != source.shape or base.device != source.device:
            raise ShapeError(
                f"base {tuple(base.shape)} on {base.device} and source {tuple(source.shape)} on "
                f"{source.device} must have one shape and device: patching goes by position"
            )
        self.model, self.base, self.source = model, base, source
        self.mask, self.max_batch = attention_mask, max_batch
        self.read_at = self._inside(read_at)
        names = [f"blocks.{layer}.hook_resid_pre" for layer in range(len(model.blocks))]
        logits, cache = model.run_with_cache(
            base,
            names_filter=names,
            return_cache_object=False,
            attention_mask=attention_mask,
            logit_positions=self.read_at[:, None],
        )
        self.base_logits: Float[Tensor, "batch d_vocab"] = logits[:, 0]
        self._resid = [cache[name] for name in names]

    def _inside(self, positions: Tensor) -> Tensor:
        length = self.base.shape[1]
        if positions.shape != self.base.shape[:1] or not bool(
            ((positions >= 0) & (positions < length)).all()
        ):
            raise ShapeError(
                f"positions must be one index in 0..{length - 1} for each of the "
                f"{len(self.base)} documents; got shape {tuple(positions.shape)}"
            )
        return positions.to(self.base.device)

    def run(
        self, cells: Sequence[Cell]
    ) -> Iterator[tuple[list[int], Float[Tensor, "cell batch d_vocab"]]]:
        """Run the cells; yield (their indices, logits where they are read), site by site."""
        by_site: dict[Site, list[int]] = {}
        for index, cell in enumerate(cells):
            by_site.setdefault(cell.site, []).append(index)
        positions = {
            site: torch.stack([self._inside(cells[i].positions) for i in indices])
            for site, indices in by_site.items()
        }
        base, source = (self._activations(ids, positions) for ids in (self.base, self.source))
        for site, indices in by_site.items():
            yield indices, self._run_site(site, positions[site], base[site], source[site])

    def _activations(self, ids: Tensor, positions: dict[Site, Tensor]) -> dict[Site, Tensor]:
        """A run's activations of all cells, from one forward. site -> [cell, batch, ...]"""
        names = []
        for site, at in positions.items():
            times = [f"{site.hook}.{t}" for t in at.unique().tolist()]
            names += times if site.per_position else [site.hook]
        _, cache = self.model.run_with_cache(
            ids,
            return_type=None,
            names_filter=names,
            attention_mask=self.mask,
            return_cache_object=False,
        )
        documents = torch.arange(len(ids), device=ids.device)
        return {site: self._gather(cache, site, at, documents) for site, at in positions.items()}

    def _gather(self, cache: Mapping[str, Tensor], site: Site, at: Tensor, rows: Tensor) -> Tensor:
        if site.per_position:
            times, index = at.unique(return_inverse=True)
            stacked = torch.stack([cache[f"{site.hook}.{t}"] for t in times.tolist()])
            return stacked[index, rows]
        return cache[site.hook].movedim(self._position_axis(site), 1)[rows, at]

    def _position_axis(self, site: Site) -> int:
        axis = self.model.find_hook(site.hook).spec.position_axis
        if axis is None:
            raise ShapeError(f"{site.hook} has no position axis: it cannot be patched by position")
        return axis

    def _run_site(self, site: Site, at: Tensor, base: Tensor, source: Tensor) -> Tensor:
        """All cells of a site. at: [cell, batch] -> logits [cell, batch, d_vocab]"""
        differs = (base != source).flatten(2).any(-1)
        differs &= at == self.read_at if self._acts_alone(site) else at <= self.read_at
        cell, document = differs.nonzero(as_tuple=True)
        rows = _Rows(cell, document, at[cell, document])
        logits = self.base_logits.repeat(len(at), 1, 1)
        for first in range(0, len(cell), self.max_batch):
            some = rows.part(first, first + self.max_batch)
            values = source[some.cell, some.document]
            logits[some.cell, some.document] = self._run_rows(site, some, values)
        return logits

    def _acts_alone(self, site: Site) -> bool:
        """Whether a position of the site acts on no other position's logits."""
        inside = site.hook.removeprefix(f"blocks.{site.layer}.")
        last = site.layer == len(self.model.blocks) - 1
        return last and inside.startswith((*AFTER_MIXING, "hook_mixer_out"))

    def _run_rows(self, site: Site, rows: _Rows, values: Tensor) -> Tensor:
        """One forward of documents, each with its own patch. [row, d_vocab]"""
        hooks = (
            self._carry_hooks(site, rows.position, values)
            if site.per_position
            else [self._put_in(site, rows.position, values)]
        )
        logits = self.model.run_with_hooks(
            self._resid[site.layer][rows.document],
            fwd_hooks=hooks,
            start_at_layer=site.layer,
            attention_mask=None if self.mask is None else self.mask[rows.document],
            logit_positions=self.read_at[rows.document, None],
        )
        return logits[:, 0]

    def _put_in(self, site: Site, positions: Tensor, values: Tensor) -> Hook:
        axis = self._position_axis(site)
        rows = torch.arange(len(positions), device=positions.device)

        def put(activation: Tensor, hook: HookPoint) -> Tensor:
            patched = activation.clone()
            patched.movedim(axis, 1)[rows, positions] = values.to(patched.dtype)
            return patched

        return site.hook, put

    def _carry_hooks(self, site: Site, positions: Tensor, values: Tensor) -> list[Hook]:
        def hook_at(t: int) -> Hook:
            here = (positions == t).view(-1, *[1] * (values.ndim - 1))

            def put(carried: Tensor, hook: HookPoint) -> Tensor:
                return torch.where(here, values.to(carried.dtype), carried)

            return f"{site.hook}.{t}", put

        return [hook_at(t) for t in positions.unique().tolist()]

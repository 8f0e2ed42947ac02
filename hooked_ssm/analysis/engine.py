"""Interchange, many cells at a time: run one input with activations of another put in.

A cell is one activation at some positions per document. The documents of all cells of a site are
packed into full batches that start at the site's layer and, where it pays, at the first patched
position, from what the base run left there (`resume`). Documents in which a patch cannot change
anything are not run at all: where both runs have the same activation, where the position lies
behind the one that is read, and where a position no longer acts on others (in the last layer,
once its mixer has mixed). Logits are computed only where they are read. All of this is exact:
results equal one full forward per cell, to rounding. While a hook of the user's own is attached,
which may mix documents or count positions, every cell runs all documents whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.analysis.exchange import Exchange, Rows, make_exchange
from hooked_ssm.analysis.resume import STARTS, Resumable
from hooked_ssm.analysis.sites import Site, site_spec
from hooked_ssm.analysis.standing import standing_edits
from hooked_ssm.block import AFTER_MIXING
from hooked_ssm.errors import ShapeError
from hooked_ssm.model import HookedModel

ENOUGH = 2**18
"""Numbers (tokens x d_model) per forward below which splitting it, to start later, saves little."""

Done = tuple[list[int], Float[Tensor, "cell batch d_vocab"]]


class Cell(NamedTuple):
    """One patch per document.

    Attributes:
        site: Where.
        positions: At which position of each document, or at which several. [batch] or [batch, k]
        head: Which head; None for all of the activation.
    """

    site: Site
    positions: Int[Tensor, "batch *k"]
    head: int | None = None


class Interchange:
    """Patches activations of a source run into a base run.

    Args:
        model: Put into eval mode by the caller.
        base: The documents that are run. [batch, pos]
        source: The documents whose activations are put in; shaped as `base`. [batch, pos]
        read_at: The position of each document where logits are read. [batch]
        attention_mask: False at padding, for both. [batch, pos]
        max_batch: Most documents in one forward.
        resume: Whether to start at the patched position where that is possible; None: where it
            pays. Never while a user's own hook is attached.

    Attributes:
        base_logits, source_logits: Of the runs without patches, where read. [batch, d_vocab]

    Raises:
        ShapeError: Shapes, dtypes or devices differ, or a position lies outside; before any run.
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
        resume: bool | None = None,
    ):
        check_pair(base, source, attention_mask)
        if max_batch < 1:
            raise ShapeError(f"max_batch={max_batch}; allowed: at least one document per forward")
        self.model, self.max_batch = model, max_batch
        self._shape, self._device = base.shape, base.device
        self.read_at = self._inside(read_at)
        if self.read_at.ndim != 1:
            raise ShapeError(f"read_at is one position per document, got {list(read_at.shape)}")
        mask = None if attention_mask is None else attention_mask.bool()
        # A user's own hook may mix documents or count positions: it sees all, in their order.
        self._whole = bool(standing_edits(model))
        self._base = Resumable(model, base, self.read_at, mask, self._whole)
        self._source = Resumable(model, source, self.read_at, mask, self._whole)
        self.base_logits: Float[Tensor, "batch d_vocab"] = self._base.logits
        self.source_logits: Float[Tensor, "batch d_vocab"] = self._source.logits
        wanted = self._base.pays() if resume is None else resume
        self._resumes = wanted and not self._whole

    def _inside(self, positions: Tensor) -> Tensor:
        batch, length = self._shape
        if positions.shape[:1] != (batch,) or not bool(
            ((positions >= 0) & (positions < length)).all()
        ):
            raise ShapeError(
                f"positions must be one index in 0..{length - 1} for each of the "
                f"{batch} documents; got shape {tuple(positions.shape)}"
            )
        return positions.to(self._device)

    def run(self, cells: Sequence[Cell]) -> Iterator[Done]:
        """Run the cells; yield (their indices, logits where they are read), site by site."""
        groups: dict[tuple[Site, bool], list[int]] = {}
        for index, cell in enumerate(cells):
            self._inside(cell.positions)
            groups.setdefault((cell.site, cell.head is not None), []).append(index)
        # What is light is fetched for a whole layer at once, what is heavy site by site.
        together: dict[tuple, list[tuple[Site, bool]]] = {}
        for site, by_head in groups:
            heavy = site.per_position or site_spec(self.model, site).heavy
            key = (site, by_head) if heavy else (site.layer,)
            together.setdefault(key, []).append((site, by_head))
        for part in together.values():
            members = [(site, by_head, groups[site, by_head]) for site, by_head in part]
            yield from self._run_sites(cells, members)

    def _run_sites(
        self, cells: Sequence[Cell], members: list[tuple[Site, bool, list[int]]]
    ) -> Iterator[Done]:
        names = []
        for site, _, indices in members:
            times = torch.cat([cells[i].positions.flatten() for i in indices]).unique()
            times = times[times < self._base.length].tolist()
            names += [f"{site.hook}.{t}" for t in times] if site.per_position else [site.hook]
        layer = members[0][0].layer
        base, source = (
            run.activations(layer, dict.fromkeys(names)) if names else {}
            for run in (self._base, self._source)
        )
        for site, by_head, indices in members:
            exchange = make_exchange(site, site_spec(self.model, site), base, source, by_head)
            yield from self._run_site(site, exchange, [cells[i] for i in indices], indices)

    def _run_site(
        self, site: Site, exchange: Exchange, cells: list[Cell], names: list[int]
    ) -> Iterator[Done]:
        """All cells of a site, in the order of their positions."""
        rows, order = self._rows(site, exchange, cells)
        counts = torch.bincount(rows.cell, minlength=len(cells)).cumsum(0).tolist()
        emitter = _Emitter(self.base_logits, max(1, self.max_batch // len(self.base_logits)))
        done = 0
        for first, stop in self._parts(site, len(rows.cell)):
            some = rows.part(first, stop)
            start = self._start(site, some)
            emitter.add(some, self._base.go_on(
                site.layer, start, some.document, exchange.hooks(some, start),
                self._whole or self._of_patterns(site),
            ))  # fmt: skip
            complete = sum(count <= stop for count in counts)
            for low, high, logits in emitter.take(done, complete):
                yield [names[order[i]] for i in range(low, high)], logits
            done = complete
        for low, high, logits in emitter.take(done, len(cells)):
            yield [names[order[i]] for i in range(low, high)], logits

    def _rows(self, site: Site, exchange: Exchange, cells: list[Cell]) -> tuple[Rows, list[int]]:
        """What must be run, sorted by cell, and the cells in the order of their positions."""
        stacked = [c.positions.to(self._device).reshape(self._shape[0], -1) for c in cells]
        width = max(x.shape[1] for x in stacked)
        at = torch.stack([x if x.shape[1] == width else _widened(x, width) for x in stacked])
        head = None
        if cells[0].head is not None:
            head = torch.tensor([c.head for c in cells], device=self._device)
        read = self.read_at[:, None]
        counts = at == read if self._acts_alone(site) else at <= read
        counts &= exchange.differs(at.clamp(max=self._base.length - 1), head)
        counts |= self._whole  # no document is left out of a forward
        beyond = self._shape[1]
        first = at.masked_fill(~counts, beyond).amin(-1)  # beyond: nothing to run
        key = torch.where(first < beyond, first, at.amin(-1)).amin(-1)
        order = key.argsort(stable=True)
        at, counts, first = at[order], counts[order], first[order]
        cell, document = (first < beyond).nonzero(as_tuple=True)
        positions = torch.where(counts, at, first[..., None])[cell, document]
        heads = None if head is None else head[order][cell]
        return Rows(cell, document, positions, heads), order.tolist()

    def _parts(self, site: Site, rows: int) -> list[tuple[int, int]]:
        """Split the rows into forwards of about equal size, or of one cell each."""
        if self._whole:
            batch = self._shape[0]
            return [(first, first + batch) for first in range(0, rows, batch)]
        parts = math.ceil(rows / self.max_batch)
        if self._can_resume(site):
            numbers = rows * self._base.length * self.model.cfg.d_model
            parts = max(parts, min(STARTS, rows, numbers // ENOUGH))
        edges = [rows * i // parts for i in range(parts + 1)] if parts else [0]
        return list(zip(edges[:-1], edges[1:], strict=True))

    def _start(self, site: Site, rows: Rows) -> int:
        if not self._can_resume(site):
            return 0
        return int(rows.at.min()) // self._base.stride * self._base.stride

    def _can_resume(self, site: Site) -> bool:
        """A pattern is one of all positions: it has no part that starts later, or ends sooner."""
        return self._resumes and not self._of_patterns(site)

    def _of_patterns(self, site: Site) -> bool:
        return "key_pos" in site_spec(self.model, site).axes

    def _acts_alone(self, site: Site) -> bool:
        """Whether a position of the site acts on no other position's logits."""
        inside = site.hook.removeprefix(f"blocks.{site.layer}.")
        mixed = inside.startswith((*AFTER_MIXING, "hook_mixer_out"))
        mixed |= inside.startswith("mixer.") and site_spec(self.model, site).reach == "position"
        return site.layer == len(self.model.blocks) - 1 and mixed


class _Emitter:
    """Collects rows until their cells are complete; holds little more than one forward's."""

    def __init__(self, base_logits: Tensor, cells_at_once: int):
        self._base, self._most = base_logits, cells_at_once
        self._cell: list[Tensor] = []
        self._document: list[Tensor] = []
        self._logits: list[Tensor] = []

    def add(self, rows: Rows, logits: Tensor) -> None:
        self._cell.append(rows.cell)
        self._document.append(rows.document)
        self._logits.append(logits)

    def take(self, done: int, complete: int) -> Iterator[tuple[int, int, Tensor]]:
        """Give out the cells from `done` to `complete`: (first, one past last, logits)."""
        if done == complete:
            return
        kept = [torch.cat(x) if x else None for x in (self._cell, self._document, self._logits)]
        cell, document, rows = kept
        for low in range(done, complete, self._most):
            high = min(low + self._most, complete)
            logits = self._base.repeat(high - low, 1, 1)
            if cell is not None and document is not None and rows is not None:
                here = (cell >= low) & (cell < high)
                logits[cell[here] - low, document[here]] = rows[here]
            yield low, high, logits
        if cell is not None and document is not None and rows is not None:
            left = cell >= complete
            self._cell, self._document = [cell[left]], [document[left]]
            self._logits = [rows[left]]


def check_pair(first: Tensor, second: Tensor, mask: Tensor | None = None) -> None:
    """Refuse two inputs, and a mask, that do not fit each other.

    Raises:
        ShapeError: Shapes, dtypes or devices differ.
    """
    if first.shape != second.shape or first.device != second.device:
        raise ShapeError(
            f"base {tuple(first.shape)} on {first.device} and source {tuple(second.shape)} on "
            f"{second.device} must have one shape and device: patching goes by position"
        )
    if first.ndim != 2 or first.dtype != second.dtype or first.is_floating_point():
        raise ShapeError(
            f"base ({first.dtype}, {first.ndim} axes) and source ({second.dtype}) must be token "
            "ids of one integer dtype, [batch, pos]"
        )
    if mask is not None and (mask.shape != first.shape or mask.device != first.device):
        raise ShapeError(
            f"attention_mask {tuple(mask.shape)} on {mask.device} must have the shape and device "
            f"of the tokens: {tuple(first.shape)} on {first.device}"
        )


def _widened(positions: Tensor, width: int) -> Tensor:
    """Repeat the first position of each document until there are `width`. [batch, width]"""
    more = positions[:, :1].expand(-1, width - positions.shape[1])
    return torch.cat([positions, more], dim=1)

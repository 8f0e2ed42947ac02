"""How values of a source run get into a base run at one site, row by row.

A row is one document with one patch. An exchange knows where the two runs differ at all, and
makes the hooks that put the source's values in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from hooked_ssm.analysis.sites import Site
from hooked_ssm.errors import ShapeError
from hooked_ssm.hook_names import HookSpec

Hook = tuple[str | Callable[..., Any], Callable[..., Any]]
HEAD_AXES = ("head", "kv_head", "group")


class Rows(NamedTuple):
    """Documents to run, each with its own patch.

    Attributes:
        cell: Of which cell. [row]
        document: Which document. [row]
        at: Which positions are patched; one may stand there twice. [row, k]
        head: Which head, None for the whole activation. [row]
    """

    cell: Tensor
    document: Tensor
    at: Tensor
    head: Tensor | None

    def part(self, first: int, stop: int) -> Rows:
        cut = slice(first, stop)
        head = None if self.head is None else self.head[cut]
        return Rows(self.cell[cut], self.document[cut], self.at[cut], head)


class Exchange(ABC):
    """One site's values in both runs."""

    @abstractmethod
    def differs(self, at: Tensor, head: Tensor | None) -> Tensor:
        """Where the runs differ. at: [cell, batch, k], head: [cell] -> [cell, batch, k]"""

    @abstractmethod
    def hooks(self, rows: Rows, start: int) -> list[Hook]:
        """Hooks for a run of these rows from position `start` on."""


def head_axis(spec: HookSpec) -> int | None:
    """Return the axis that counts heads (or groups of heads), None if there is none."""
    return next((i for i, axis in enumerate(spec.axes) if axis in HEAD_AXES), None)


class AlongAxis(Exchange):
    """A site whose activation has a position axis."""

    def __init__(self, name: str, spec: HookSpec, base: Tensor, source: Tensor, by_head: bool):
        self.name, self.source = name, source
        axes = [0, spec.position_axis, *([head_axis(spec)] if by_head else [])]
        if None in axes or not spec.has_batch:
            raise ShapeError(f"{name} has axes {list(spec.axes)}: no position to patch")
        self._axes: list[int] = axes  # type: ignore[assignment]
        self._differs = reduced(base != source, self._axes)

    def differs(self, at: Tensor, head: Tensor | None) -> Tensor:
        documents = torch.arange(at.shape[1], device=at.device)[:, None]
        index = [documents, at] if head is None else [documents, at, head[:, None, None]]
        return self._differs[tuple(index)]

    def hooks(self, rows: Rows, start: int) -> list[Hook]:
        values = self.source[self._index(rows.document, rows.at, rows.head)]
        here = torch.arange(len(rows.document), device=values.device)
        index = self._index(here, rows.at - start, rows.head)

        def put(activation: Tensor, hook: HookPoint) -> Tensor:
            patched = activation.clone()
            patched[index] = values.to(patched.dtype)
            return patched

        return [(self.name, put)]

    def _index(self, rows: Tensor, at: Tensor, head: Tensor | None) -> tuple:
        """The entries of some rows, positions and heads; [row, k, ...] comes out in front."""
        index: list[Any] = [slice(None)] * self.source.ndim
        given = [rows[:, None], at, None if head is None else head[:, None]]
        for axis, which in zip(self._axes, given, strict=False):
            index[axis] = which
        return tuple(index)


class PerPosition(Exchange):
    """A site with one hook point per position, such as a carried state."""

    def __init__(
        self,
        family: str,
        spec: HookSpec,
        base: Mapping[int, Tensor],
        source: Mapping[int, Tensor],
        by_head: bool,
    ):
        self.family, self.source = family, source
        self._head = head_axis(spec) if by_head else None
        axes = [0] if self._head is None else [0, self._head]
        self._differs = {t: reduced(base[t] != source[t], axes) for t in source}

    def differs(self, at: Tensor, head: Tensor | None) -> Tensor:
        found = torch.zeros_like(at, dtype=torch.bool)
        for t, differs in self._differs.items():
            here = differs[None] if head is None else differs[:, head].T
            found |= (at == t) & here[..., None]
        return found

    def hooks(self, rows: Rows, start: int) -> list[Hook]:
        return [self._hook(rows, t) for t in rows.at.unique().tolist()]

    def _hook(self, rows: Rows, t: int) -> Hook:
        value = self.source[t]
        here = (rows.at == t).any(1).view(-1, *[1] * (value.ndim - 1))
        if rows.head is not None:
            assert self._head is not None, "rows have heads only where the site has"
            heads = torch.arange(value.shape[self._head], device=value.device)
            shape = [1] * value.ndim
            shape[0], shape[self._head] = len(rows.head), len(heads)
            here = here & (rows.head[:, None] == heads).view(shape)

        def put(carried: Tensor, hook: HookPoint) -> Tensor:
            return torch.where(here, value[rows.document].to(carried.dtype), carried)

        return f"{self.family}.{t}", put


def reduced(flags: Tensor, axes: list[int]) -> Tensor:
    """Whether any flag is set along all axes but these, which come out in their order."""
    in_front = flags.movedim(axes, list(range(len(axes))))
    return in_front.flatten(len(axes)).any(-1) if flags.ndim > len(axes) else in_front


def make_exchange(
    site: Site,
    spec: HookSpec,
    base: Mapping[str, Tensor],
    source: Mapping[str, Tensor],
    by_head: bool,
) -> Exchange:
    """Return a site's exchange from the activations of both runs, by hook name."""
    if by_head and head_axis(spec) is None:
        raise ShapeError(
            f"{site.hook} has axes {list(spec.axes)}: no heads; leave heads=None, or choose sites "
            "such as 'query', 'value', 'carry' or 'pattern' of a mixer with heads"
        )
    if not site.per_position:
        return AlongAxis(site.hook, spec, base[site.hook], source[site.hook], by_head)
    prefix = len(site.hook) + 1

    def by_position(run: Mapping[str, Tensor]) -> dict[int, Tensor]:
        return {int(n[prefix:]): v for n, v in run.items() if n[:prefix] == f"{site.hook}."}

    return PerPosition(site.hook, spec, by_position(base), by_position(source), by_head=by_head)

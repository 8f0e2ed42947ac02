"""A run that later runs can step into: at any layer, and at some positions.

What a patch at layer l and position p cannot reach is what came before: the residual stream that
enters layer l, and what every later layer's mixer carried on from the tokens before p. Both are
kept here, so that a patched run computes only the rest, and logits only where they are read.
Tokens behind the last position that is read are left out from the start: every model is causal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_ssm.errors import ShapeError
from hooked_ssm.mixers import Carried, Segment
from hooked_ssm.model import HookedModel
from hooked_ssm.rules import shown_indices

STARTS = 16
"""At how many positions a run can be taken up again: more hardly saves more (1 - 1/STARTS)."""
WORTH = 8.0
"""Take up at a position if the bytes carried are at most so many times the residual stream's:
beyond, fetching it costs about what it saves (measured: `benchmarks/patching.py --resume`)."""
PAST_BYTES = 2**30
"""Most memory for what was carried, at all positions together; fewer positions where it is less."""


def _no_past(layer: int) -> Carried | None:
    """What the layers carry into a run from the first token on: nothing."""
    return None


class Resumable:
    """One forward of a model on some documents, kept.

    Args:
        model: In eval mode.
        tokens: The documents. [batch, pos]
        read_at: The position of each document where logits are read. [batch]
        mask: False at padding. [batch, pos]
        whole: Run all positions, also those behind the last one that is read.

    Attributes:
        entering: The residual stream that enters each layer. layer -> [batch, pos, d_model]
        logits: Where they are read. [batch, d_vocab]
        length: Positions that are run: up to the last one that is read.
    """

    def __init__(
        self,
        model: HookedModel,
        tokens: Int[Tensor, "batch pos"],
        read_at: Int[Tensor, " batch"],
        mask: Bool[Tensor, "batch pos"] | None = None,
        whole: bool = False,
    ):
        self.model, self.read_at = model, read_at
        self.length = tokens.shape[1] if whole else int(read_at.max()) + 1
        self._mask = None if mask is None else mask[:, : self.length]
        self._pasts: dict[int, list[Carried]] = {}
        self._leaving: Tensor | None = None
        self.entering: list[Tensor] = []
        embedded = model(tokens[:, : self.length], stop_at_layer=0, attention_mask=self._mask)
        segment = self.segment(0, self.length)
        self.logits: Float[Tensor, "batch d_vocab"] = self._through(
            embedded, 0, segment, read_at[:, None], keep=True
        )

    def pays(self) -> bool:
        """Whether taking up the run at a position costs less than the tokens before it.

        Never while somebody listens: a hook that counts positions would find them shifted.
        """
        if any(hook.has_hooks() for hook in self.model.hook_points()) or self.length <= STARTS:
            return False
        kept = sum(resid[0].nbytes for resid in self.entering)
        return self.stride < self.length and self._carried_bytes() <= WORTH * kept

    @cached_property
    def stride(self) -> int:
        """Distance of the positions at which the run can be taken up again."""
        fits = PAST_BYTES // max(1, self._carried_bytes() * len(self.read_at))
        return -(-self.length // min(STARTS, max(1, fits)))

    def _carried_bytes(self) -> int:
        """What all layers carry on of one document, half way through (keys and values grow)."""
        half = max(1, self.length // 2)
        one = torch.zeros(1, dtype=torch.long, device=self.read_at.device)
        carried = self._carry_on(self.segment(0, half, one), None, one)
        return sum(value.nbytes for layer in carried for value in layer.values())

    def activations(
        self, layer: int, names: Iterable[str], hooks: Sequence = ()
    ) -> dict[str, Tensor]:
        """Run one layer alone, with hooks if any, and return what its hook points saw."""
        cache, caching, _ = self.model.get_caching_hooks(list(names))
        with self.model.hooks(fwd_hooks=[*hooks, *caching]):
            self.model.blocks[layer](self.entering[layer].clone(), self.segment(0, self.length))
        return cache

    def leaving(self, documents: Int[Tensor, " row"]) -> Float[Tensor, "row pos d_model"]:
        """Return the residual stream that leaves the last layer."""
        if self._leaving is None:
            last = len(self.model.blocks) - 1
            segment = self.segment(0, self.length)
            self._leaving, _ = self.model.blocks[last](self.entering[last].clone(), segment)
        return self._leaving[documents]

    def go_on(
        self,
        layer: int,
        start: int,
        documents: Int[Tensor, " row"],
        hooks: list,
        whole: bool = False,
    ) -> Float[Tensor, "row d_vocab"]:
        """Run some documents from a layer and a position on, with hooks.

        Args:
            layer: The first layer to run.
            start: The first position to run: 0, or a multiple of `stride`.
            documents: Which documents; one may stand in several rows.
            hooks: Of the layers run; positions of what they see count from `start`.
            whole: Run to the end, not only to the last position that these rows read.
        """
        read = self.read_at[documents]
        stop = self.length if whole else int(read.max()) + 1
        segment = self.segment(start, stop, documents)
        past = _no_past if start == 0 else self._past_of(start, documents)
        resid = self.entering[layer][documents, start:stop]
        with self.model.hooks(fwd_hooks=hooks):
            return self._through(resid, layer, segment, (read - start)[:, None], past)

    def _through(
        self,
        resid: Tensor,
        first: int,
        segment: Segment,
        read: Tensor,
        past: Callable[[int], Carried | None] = _no_past,
        keep: bool = False,
    ) -> Tensor:
        """The layers from `first` on, and logits where they are read. [row, d_vocab]"""
        model, last = self.model, len(self.model.blocks) - 1
        final = (model.ln_final.hook_scale, model.ln_final.hook_normalized)
        early = not (model.blocks[last].listened_after_mixing() or any(h.listened for h in final))
        for layer in range(first, last + 1):
            if keep:
                self.entering.append(resid.clone())
            only_at = read if early and layer == last else None
            resid, _ = model.blocks[layer](resid, segment, past(layer), only_at)
        return model.logits_at(model.ln_final(resid), None if early else read)[:, 0]

    def segment(self, start: int, stop: int, rows: Tensor | None = None) -> Segment:
        """Where some documents' tokens from `start` up to `stop` stand; nothing goes on from it."""
        if self._mask is None:
            positions = torch.arange(start, stop, device=self.read_at.device)[None]
            return Segment(start, stop - start, positions, last=True)
        real = self._mask if rows is None else self._mask[rows]
        positions = (real.cumsum(1) - 1).clamp(min=0)
        return Segment(start, stop - start, positions[:, start:stop], real[:, start:stop], True)

    def _past_of(self, start: int, documents: Tensor) -> Callable[[int], Carried]:
        """What the layers carried on from before `start`, row by row, one layer at a time."""
        layers = self._past(start)
        return lambda layer: {name: value[documents] for name, value in layers[layer].items()}

    def _past(self, start: int) -> list[Carried]:
        """What every layer carried on from before `start`; one run in segments finds them all."""
        if not self._pasts:
            for first in range(0, self.length - self.stride, self.stride):
                stop = first + self.stride
                before = self._pasts.get(first)
                self._pasts[stop] = self._carry_on(self.segment(first, stop), before)
        return self._pasts[start]

    def _carry_on(
        self, segment: Segment, before: list[Carried] | None, documents: Tensor | None = None
    ) -> list[Carried]:
        """What the layers' mixers carry on after a segment, from what they carried into it."""
        segment = replace(segment, last=False)
        part = slice(segment.start, segment.start + segment.length)
        found = []
        for layer, block in enumerate(self.model.blocks):
            resid = self.entering[layer][slice(None) if documents is None else documents, part]
            carried = None if before is None else before[layer]
            found.append(block.mixer(block.ln1(resid), segment, carried)[1])
        return found


def read_positions(
    tokens: Int[Tensor, "batch pos"], read_at: Int[Tensor, " batch"] | None
) -> Int[Tensor, " batch"]:
    """Return where logits are read: as given, or at the last position.

    Raises:
        ShapeError: Not one position inside the sequence for each document.
    """
    batch, length = tokens.shape
    if read_at is None:
        return torch.full_like(tokens[:, 0], length - 1, dtype=torch.long)
    if read_at.shape != (batch,) or not bool(((read_at >= 0) & (read_at < length)).all()):
        raise ShapeError(
            f"read_at must be one index in 0..{length - 1} for each of the {batch} documents; got "
            f"{shown_indices(read_at)}"
        )
    return read_at.to(tokens.device).long()

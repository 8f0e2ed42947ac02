"""Path patching: what one part of the model tells another one directly, through the stream.

A sender's activation of the source run changes what it adds to the residual stream; only one
receiver sees the change, through its norm, and everything else reads what it read in the base
run. What follows from the receiver then runs freely. In a linear model the effects of all edges
that leave a sender add up to the effect of patching it.
Source: Wang et al. 2022 (IOI), Goldowsky-Dill et al. 2023; here for any mixer and any site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.analysis.contrast import contrast_words, warn_of_weak_contrast
from hooked_ssm.analysis.engine import check_pair
from hooked_ssm.analysis.exchange import Rows, make_exchange
from hooked_ssm.analysis.graph import Edge, Node, all_edges, check_edge, writes_after_mixing
from hooked_ssm.analysis.metrics import (
    MetricFunction,
    Metrics,
    measure,
    measure_run,
    named_metrics,
    normalised_recovery,
)
from hooked_ssm.analysis.resume import Resumable, read_positions
from hooked_ssm.analysis.sites import find_site, site_spec
from hooked_ssm.analysis.standing import refuse_standing_edits
from hooked_ssm.analysis.sweep import Direction, Positions, make_columns
from hooked_ssm.checks import AttentionMask, Count, checked
from hooked_ssm.errors import ConfigError, HookNameError, unknown
from hooked_ssm.html_table import largest, titled_table
from hooked_ssm.model import HookedModel
from hooked_ssm.progress import tqdm

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True)
class PathPatching:
    """Result of `path_patching`.

    Attributes:
        values: The metrics with one edge patched. [metric, edge, pos, batch]
        edges: The edges, in order.
        positions: Labels of the sender's positions: ["all"], indices, or names.
        metrics: Names of the metrics.
        base, source: The metrics of both runs without a patch. [metric, batch]
        direction: "denoise" or "noise", as in `activation_patching`.
    """

    values: Tensor = field(repr=False)
    edges: list[Edge]
    positions: list[str | int]
    metrics: list[str]
    base: Tensor = field(repr=False)
    source: Tensor = field(repr=False)
    direction: str

    def effect(self, metric: str | None = None) -> Float[Tensor, "edge pos batch"]:
        """Return the change of a metric that each edge makes, per document."""
        which = self._metric(metric)
        return self.values[which] - self.base[which]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per metric, edge and position: means over documents, error, recovery."""
        rows = []
        for which, metric in enumerate(self.metrics):
            effect = self.effect(metric)
            n = effect.shape[-1]  # one document has no error
            error = effect.std(-1) / n**0.5 if n > 1 else effect.mean(-1) * torch.nan
            share = normalised_recovery(self.values[which], self.base[which], self.source[which])
            for i, edge in enumerate(self.edges):
                for j, position in enumerate(self.positions):
                    rows.append({
                        "metric": metric,
                        "sender": str(edge.sender),
                        "receiver": str(edge.receiver),
                        "position": position,
                        "value": self.values[which, i, j].mean().item(),
                        "effect": effect[i, j].mean().item(),
                        "stderr": error[i, j].item(),
                        "recovery": share[i, j].item(),
                    })  # fmt: skip
        return pd.DataFrame(rows)

    @checked
    def heatmap(
        self, metric: str | None = None, *, show: str = "recovery", **kwargs: Any
    ) -> go.Figure:
        """Draw sender by receiver, summed over the sender's positions.

        Args:
            metric: Which metric; the first if None.
            show: "recovery" or "effect".
            kwargs: Passed on to `hooked_ssm.plots.heatmap`.
        """
        from hooked_ssm.plots import heatmap  # plotly is paid for on use

        if show not in ("recovery", "effect"):
            raise ConfigError(unknown("show", show, ("recovery", "effect")))
        which = self._metric(metric)
        name = self.metrics[which]
        means = contrast_words(self.base[which], self.source[which], self.direction)
        frame = self.frame[self.frame["metric"] == name]
        senders, receivers = (list(dict.fromkeys(frame[side])) for side in ("sender", "receiver"))
        table = frame.pivot_table(index="sender", columns="receiver", values=show, aggfunc="sum")
        words = {"recovery": f"recovery of {name}", "effect": f"change of {name}"}
        given = {"x_title": "receiver", "y_title": "sender", "value_name": words[show]}
        return heatmap(
            table.reindex(index=senders, columns=receivers).to_numpy(),
            rows=senders,
            cols=receivers,
            **{"title": f"{name}, {show} by path ({means})", **given, **kwargs},
        )

    def _repr_html_(self) -> str:
        detail = f"{self.direction}, {len(self.edges)} edges, the largest effects first"
        return titled_table("Path patching", largest(self.frame, "effect"), detail)

    def _metric(self, metric: str | None) -> int:
        if metric is None:
            return 0
        if metric not in self.metrics:
            raise HookNameError(unknown("metric", metric, self.metrics))
        return self.metrics.index(metric)


@checked
@torch.no_grad()
def path_patching(
    model: HookedModel,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: Metrics,
    *,
    edges: Sequence[tuple[Sequence, Sequence]] | None = None,
    positions: Positions = "all",
    direction: Direction = "denoise",
    read_at: Int[Tensor, " batch"] | None = None,
    attention_mask: AttentionMask | None = None,
    max_batch: Count = 512,
    progress: bool = False,
) -> PathPatching:
    """Patch edges of the residual stream, one at a time.

    Args:
        model, clean, corrupted, metric, direction, read_at, attention_mask, max_batch: As in
            `activation_patching`.
        edges: Pairs of sender and receiver: (("conv", 0), ("mixer_in", 1)), (("embed",),
            ("logits",)), (("z", 0, head), ("mlp_in", 1)); see `Node`. None: all edges between
            embedding, mixers, MLPs and logits.
        positions: Where the sender is patched, as in `activation_patching`; "all" by default.
        progress: Show a progress bar.

    Raises:
        ConfigError: An edge that cannot be: its receiver does not come later; or no metric.
        ShapeError, HookNameError: As in `activation_patching`, before anything runs.
        HookUnavailableError: A hook of the user's own is attached to the model.
    """
    check_pair(clean, corrupted, attention_mask)
    refuse_standing_edits(model, "path_patching")
    metrics = named_metrics(metric, len(clean), model.cfg.d_vocab)
    columns = make_columns(positions, clean)
    given = None if edges is None else [check_edge(model, Edge(*pair)) for pair in edges]  # type: ignore[arg-type]
    chosen = all_edges(model) if given is None else given
    if not chosen:
        raise ConfigError("edges is empty; leave it None for all of them")
    read_at = read_positions(clean, read_at)
    base, source = (corrupted, clean) if direction == "denoise" else (clean, corrupted)
    was_training = model.training
    model.eval()
    try:
        paths = _Paths(model, base, source, read_at, attention_mask, max_batch)
        start = measure_run(metrics, paths.base.logits, "base")
        goal = measure_run(metrics, paths.source.logits, "source")
        warn_of_weak_contrast(list(metrics), start, goal, direction)
        rows = list(columns.values())
        values = paths.values(chosen, rows, metrics, progress)
    finally:
        model.train(was_training)
    return PathPatching(values, chosen, list(columns), list(metrics), start, goal, direction)


class _Paths:
    """The two runs, and what a change of one sender does through one receiver."""

    def __init__(
        self,
        model: HookedModel,
        base: Tensor,
        source: Tensor,
        read_at: Tensor,
        mask: Tensor | None,
        max_batch: int,
    ):
        mask = None if mask is None else mask.bool()
        self.model, self.max_batch, self.read_at = model, max_batch, read_at
        self.base, self.source = (Resumable(model, x, read_at, mask) for x in (base, source))

    def values(
        self,
        edges: Sequence[Edge],
        columns: list[Tensor],
        metrics: Mapping[str, MetricFunction],
        progress: bool = False,
    ) -> Float[Tensor, "metric edge pos batch"]:
        """The metrics with each edge patched at each column of positions."""
        values = self.base.logits.new_empty(
            len(metrics), len(edges), len(columns), len(self.read_at)
        )
        senders = list(dict.fromkeys(edge.sender for edge in edges))
        for sender in tqdm(senders, disable=not progress, desc="senders"):
            changes = self.changes(sender, columns)
            for i, edge in enumerate(edges):
                if edge.sender == sender:
                    for j, change in enumerate(changes):
                        logits = self._through(edge.receiver, change)
                        values[:, i, j] = measure(metrics, logits)
        return values

    def changes(self, sender: Node, columns: list[Tensor]) -> list[Tensor]:
        """What patching a sender changes in the stream, per column. [batch, pos, d_model] each"""
        length, batch = self.base.length, len(self.read_at)
        if sender.layer is None:
            difference = self.source.entering[0] - self.base.entering[0]
            times = torch.arange(length, device=difference.device)
            return [
                difference * (at.view(batch, -1, 1) == times).any(1)[..., None] for at in columns
            ]
        site = find_site(self.model, sender.layer, sender.word)
        spec = site_spec(self.model, site)
        names = [site.hook]
        if site.per_position:
            names = [f"{site.hook}.{t}" for t in range(length)]
        part = "hook_mlp_out" if writes_after_mixing(site.hook) else "hook_mixer_out"
        out = f"blocks.{sender.layer}.{part}"
        both = [run.activations(sender.layer, names) for run in (self.base, self.source)]
        plain = self.base.activations(sender.layer, [out])[out]
        by_head = sender.head is not None
        exchange = make_exchange(site, spec, both[0], both[1], by_head)
        documents = torch.arange(batch, device=plain.device)
        head = torch.full_like(documents, sender.head or 0) if by_head else None
        found = []
        for at in columns:
            at = at.view(batch, -1)
            run = at < length  # what lies behind all that is read is not run, and changes nothing
            kept = torch.where(run, at, at.amin(1, keepdim=True)).clamp(max=length - 1)
            rows = Rows(documents, documents, kept, head)
            patched = self.base.activations(sender.layer, [out], exchange.hooks(rows, 0))[out]
            found.append(torch.where(run.any(1)[:, None, None], patched - plain, 0.0))
        return found

    def _through(self, receiver: Node, change: Tensor) -> Tensor:
        """Logits where only one receiver sees a change of the stream. [batch, d_vocab]"""
        logits = self.base.logits.clone()
        documents = change.flatten(1).any(1).nonzero()[:, 0]
        for first in range(0, len(documents), self.max_batch):
            some = documents[first : first + self.max_batch]
            logits[some] = self._rows(receiver, change[some], some)
        return logits

    def _rows(self, receiver: Node, change: Tensor, documents: Tensor) -> Tensor:
        model, base = self.model, self.base
        if receiver.layer is None:
            final = base.leaving(documents) + change
            read = self.read_at[documents, None]
            return model.logits_at(model.ln_final(final), read)[:, 0]
        block = model.blocks[receiver.layer]
        entering = base.entering[receiver.layer][documents]
        prefix = f"blocks.{receiver.layer}"
        if receiver.word == "mixer_in":
            name, norm, stream = f"{prefix}.hook_mixer_in", block.ln1, entering
        else:
            name, norm, stream = f"{prefix}.ln2.hook_normalized", block.ln2, entering
            if not block.parallel:
                out = f"{prefix}.hook_mixer_out"
                stream = entering + base.activations(receiver.layer, [out])[out][documents]
        seen = norm(stream + change)
        stop = int(self.read_at[documents].max()) + 1
        hook = (name, lambda x, hook: seen[:, :stop].clone())
        return base.go_on(receiver.layer, 0, documents, [hook])

"""Circuits: which edges of the residual stream carry a behaviour, scored, cut out, and tested.

    score(u -> v) = (source output of u - base output of u) . d metric / d what v reads

One backward scores every edge between embedding, mixers (or their heads), MLPs and logits, at
every position; `steps` > 1 averages the gradient over embeddings between both documents. A circuit
keeps the highest scores. Its faithfulness is measured, not estimated: the clean document is run
with every edge outside the circuit carrying what it carries in the corrupted run.
Source: Syed et al. 2023 (EAP), Hanna et al. 2024 (EAP-IG); positions: Sharma et al. 2024 (Mamba).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_ssm.analysis.attribution import GradientRuns, need_gradients
from hooked_ssm.analysis.circuit_run import CircuitRun, pruned
from hooked_ssm.analysis.contrast import warn_of_weak_contrast
from hooked_ssm.analysis.engine import check_pair
from hooked_ssm.analysis.graph import Edge, Node, all_edges
from hooked_ssm.analysis.metrics import (
    MetricFunction,
    measure,
    measure_run,
    named_metrics,
    normalised_recovery,
)
from hooked_ssm.analysis.resume import read_positions
from hooked_ssm.analysis.standing import refuse_standing_edits
from hooked_ssm.checks import AttentionMask, Count, checked
from hooked_ssm.errors import ConfigError
from hooked_ssm.html_table import titled_table
from hooked_ssm.model import HookedModel
from hooked_ssm.rules import Rule

if TYPE_CHECKING:
    import plotly.graph_objects as go


def _is_threshold(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value >= 0


Threshold = Annotated[Any, Rule("a number >= 0, or infinity", _is_threshold)]


@dataclass(frozen=True)
class Circuit:
    """Edges kept, and how well they alone do.

    Attributes:
        edges: The edges kept (those on a way from the embedding to the logits).
        kept: Where along the sequence each edge of the model is kept. [edge, pos]
        faithfulness: (circuit - corrupted) / (clean - corrupted) of the metric's means over
            documents, measured by intervention: 1 is the whole model, 0 none of it.
        scores: The kept edges' scores, summed over the positions kept.
        n_edges: Edges of the whole model.
    """

    edges: list[Edge]
    kept: Bool[Tensor, "edge pos"] = field(repr=False)
    faithfulness: float
    scores: list[float] = field(repr=False)
    n_edges: int

    @property
    def nodes(self) -> list[Node]:
        """The senders and receivers of the kept edges."""
        return list(dict.fromkeys(node for edge in self.edges for node in edge))

    @property
    def frame(self) -> pd.DataFrame:
        """One row per edge kept: sender, receiver, score, and at how many positions it is kept."""
        positions = self.kept.sum(1)[self.kept.any(1)].tolist()
        rows = zip(self.edges, self.scores, positions, strict=True)
        return pd.DataFrame(
            [(str(e.sender), str(e.receiver), s, n) for e, s, n in rows],
            columns=["sender", "receiver", "score", "positions"],
        )

    def graph(self, **kwargs: Any) -> go.Figure:
        """Draw the circuit; arguments as in `hooked_ssm.plots.circuit.circuit_graph`."""
        from hooked_ssm.plots.circuit import circuit_graph  # plotly is paid for on use

        title = f"{len(self.edges)} of {self.n_edges} edges, faithfulness {self.faithfulness:.2f}"
        edges = [
            (part_of(edge.sender), part_of(edge.receiver), score)
            for edge, score in zip(self.edges, self.scores, strict=True)
        ]
        return circuit_graph(edges, **{"title": title, **kwargs})

    def _repr_html_(self) -> str:
        detail = f"{len(self.edges)} of {self.n_edges} edges, faithfulness {self.faithfulness:.3f}"
        return titled_table("Circuit", self.frame, detail)


def part_of(node: Node) -> str:
    """Return the part of the model a node belongs to, for drawing: "mixer 0", "head 0.1"."""
    word = node.word.removesuffix("_in").removesuffix("_out")
    return str(Node("head" if node.head is not None else word, node.layer, node.head))


@dataclass(frozen=True)
class EdgeAttribution:
    """Result of `edge_attribution`.

    Attributes:
        edges: Every edge of the model, in order of the senders.
        values: The estimated effect on the metric of putting the corrupted sender's output into
            the clean run, over this edge, at each position. [edge, pos, batch]
        clean, corrupted: The metric of both runs. [batch]
    """

    edges: list[Edge]
    values: Float[Tensor, "edge pos batch"] = field(repr=False)
    clean: Tensor = field(repr=False)
    corrupted: Tensor = field(repr=False)
    _run: CircuitRun = field(repr=False)
    _metric: Mapping[str, MetricFunction] = field(repr=False)

    @cached_property
    def scores(self) -> Float[Tensor, "edge pos"]:
        """Means over documents."""
        return self.values.mean(-1)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per edge, positions summed, largest first: sender, receiver, score, stderr."""
        summed = self.values.sum(1)
        documents = summed.shape[-1]  # one has no standard error
        error = summed.std(-1) / documents**0.5 if documents > 1 else summed[:, 0] * math.nan
        frame = pd.DataFrame({
            "sender": [str(edge.sender) for edge in self.edges],
            "receiver": [str(edge.receiver) for edge in self.edges],
            "score": summed.mean(-1).tolist(),
            "stderr": error.tolist(),
        })  # fmt: skip
        return frame.sort_values("score", key=abs, ascending=False, ignore_index=True)

    def _repr_html_(self) -> str:
        return titled_table("Edge attribution", self.frame, f"{len(self.edges)} edges")

    @checked
    def circuit(
        self,
        edges: int | None = None,
        *,
        threshold: Threshold | None = None,
        positional: bool = False,
    ) -> Circuit:
        """Cut out a circuit and measure its faithfulness.

        Args:
            edges: Keep so many of the edges with the largest |score|...
            threshold: ... or all with |score| of at least this much.
            positional: Choose edges position by position: `edges` counts pairs of edge and
                position, and only at those they are kept.

        Raises:
            ConfigError: Not exactly one of `edges` and `threshold`.
        """
        if (edges is None) == (threshold is None):
            raise ConfigError("give exactly one of edges= and threshold=")
        scores = self.scores if positional else self.scores.sum(1, keepdim=True)
        size = scores.abs()
        if edges is not None:
            if not 0 <= edges <= size.numel():
                raise ConfigError(f"edges={edges}; allowed: 0..{size.numel()}")
            chosen = torch.zeros_like(size, dtype=torch.bool).flatten()
            chosen[size.flatten().argsort(descending=True, stable=True)[:edges]] = True
            chosen = chosen.view(size.shape)
        else:
            chosen = size >= threshold
        return self._measured(pruned(self.edges, chosen.expand_as(self.scores)))

    @checked
    def smallest(self, faithfulness: float = 0.9, *, positional: bool = False) -> Circuit:
        """Return the smallest circuit, by score, at least so faithful; the whole model at worst.

        Sizes grow by a quarter (at least one edge) from one try to the next.
        """
        most, size = self.scores.numel() if positional else len(self.edges), 1
        while True:
            found = self.circuit(min(size, most), positional=positional)
            if found.faithfulness >= faithfulness or size >= most:
                return found
            size = max(size + 1, int(size * 1.25))

    def _measured(self, kept: Tensor) -> Circuit:
        refuse_standing_edits(self._run.model, "measuring a circuit")
        logits = self._run.logits(dict(zip(self.edges, kept, strict=True)))
        patched = measure(self._metric, logits)[0]
        share = normalised_recovery(patched, self.corrupted, self.clean).item()
        here = kept.any(1)
        return Circuit(
            edges=[edge for edge, on in zip(self.edges, here.tolist(), strict=True) if on],
            kept=kept,
            faithfulness=share,
            scores=(self.scores * kept).sum(1)[here].tolist(),
            n_edges=len(self.edges),
        )


@checked
def edge_attribution(
    model: HookedModel,
    clean: Int[Tensor, "batch pos"],
    corrupted: Int[Tensor, "batch pos"],
    metric: MetricFunction,
    *,
    steps: Count = 1,
    heads: bool = True,
    read_at: Int[Tensor, " batch"] | None = None,
    attention_mask: AttentionMask | None = None,
) -> EdgeAttribution:
    """Score every edge of the model by gradient times difference (EAP; EAP-IG if steps > 1).

    Args:
        model: Any `HookedModel` in eval mode.
        clean, corrupted, read_at, attention_mask: As in `activation_patching`.
        metric: One metric with a gradient.
        steps: How many points between the documents' embeddings the gradient is averaged over.
        heads: Split mixers that name each head's share of their output (attention).

    Raises:
        ShapeError: Inputs do not fit each other; before anything runs.
        ConfigError: Train mode, a metric without a gradient, or steps < 1.
        HookUnavailableError: A hook of the user's own is attached to the model.
    """
    check_pair(clean, corrupted, attention_mask)
    need_gradients(model, "edge_attribution")
    refuse_standing_edits(model, "edge_attribution")
    named = dict(list(named_metrics(metric, len(clean), model.cfg.d_vocab).items())[:1])
    edges = all_edges(model, heads=heads)
    read_at = read_positions(clean, read_at)
    with torch.inference_mode(False), torch.enable_grad():
        mask = None if attention_mask is None else attention_mask.clone()
        runs = GradientRuns(model, clean.clone(), corrupted.clone(), read_at.clone(), mask)
        values = _scores(runs, edges, named, steps)
    warn_of_weak_contrast(list(named), runs.base_values, runs.source_values, "noise")
    with torch.no_grad():
        run = CircuitRun(model, clean, corrupted, edges, read_at, attention_mask)
    return EdgeAttribution(edges, values, runs.base_values[0], runs.source_values[0], run, named)


def _scores(
    runs: GradientRuns, edges: list[Edge], metric: Mapping[str, MetricFunction], steps: int
) -> Float[Tensor, "edge pos batch"]:
    """Gradient times difference of every edge."""
    model = runs.model
    sends = {edge.sender: _sends(model, edge.sender) for edge in edges}
    reads = {edge.receiver: _reads(model, edge.receiver) for edge in edges}
    outputs = list(dict.fromkeys([*sends.values(), "hook_embed"]))
    with torch.no_grad():
        logits, source = runs.cached(runs.source, outputs)
        runs.source_values = measure_run(metric, logits, "source")
        logits, base = runs.cached(runs.base, outputs)
        runs.base_values = measure_run(metric, logits, "base")
    names = list(dict.fromkeys(name for pair in reads.values() for name in pair))
    slope: dict[Node, Tensor] = {}
    for gradients, seen in runs.steps(names, metric, steps, base, source):
        for node, (stream, read) in reads.items():
            norm = _norm(model, node)
            # Back through the receiver's own norm: what it alone would see of the stream.
            _, back = torch.autograd.functional.vjp(norm, seen[stream], gradients[read][0])
            slope[node] = slope.get(node, 0.0) + back / steps
    found = []
    for edge in edges:
        name = sends[edge.sender]
        difference = source[name] - base[name]
        if edge.sender.head is not None:
            difference = difference[:, :, edge.sender.head]
        found.append((difference * slope[edge.receiver]).sum(-1).T)
    return torch.stack(found)


def _sends(model: HookedModel, node: Node) -> str:
    if node.layer is None:
        return "hook_embed"
    return model.hook_name(node.layer, node.word)


def _reads(model: HookedModel, node: Node) -> tuple[str, str]:
    """Hook names of the stream before a receiver's norm, and of what the norm gives it."""
    if node.layer is None:
        return f"blocks.{len(model.blocks) - 1}.hook_resid_post", "ln_final.hook_normalized"
    prefix = f"blocks.{node.layer}"
    if node.word == "mixer_in":
        return f"{prefix}.hook_resid_pre", f"{prefix}.hook_mixer_in"
    middle = "pre" if model.blocks[node.layer].parallel else "mid"
    return f"{prefix}.hook_resid_{middle}", f"{prefix}.ln2.hook_normalized"


def _norm(model: HookedModel, node: Node) -> torch.nn.Module:
    if node.layer is None:
        return model.ln_final
    block = model.blocks[node.layer]
    return block.ln1 if node.word == "mixer_in" else block.ln2  # type: ignore[return-value]

"""Running a circuit: receivers read the clean run over kept edges, else the corrupted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_ssm.analysis.graph import Edge, Node
from hooked_ssm.analysis.resume import Resumable
from hooked_ssm.model import HookedModel


class CircuitRun:
    """Runs the clean documents through some edges only.

    A receiver v reads the corrupted run's stream plus, over each kept edge u -> v, the difference
    that u's output makes: u run on what *it* reads here, less u in the corrupted run. All edges
    give the clean run, none the corrupted one.
    """

    def __init__(
        self,
        model: HookedModel,
        clean: Int[Tensor, "batch pos"],
        corrupted: Int[Tensor, "batch pos"],
        edges: Sequence[Edge],
        read_at: Int[Tensor, " batch"],
        mask: Tensor | None,
    ):
        self.model, self.read_at = model, read_at
        real = None if mask is None else mask.bool()
        self._corrupted = Resumable(model, corrupted, read_at, real)
        self._embedded = Resumable(model, clean, read_at, real).entering[0]
        self._senders = list(dict.fromkeys(edge.sender for edge in edges))
        self._layers = [self._of_layer(layer) for layer in range(len(model.blocks))]

    @torch.no_grad()
    def logits(self, kept: Mapping[Edge, Bool[Tensor, " pos"]]) -> Float[Tensor, "batch d_vocab"]:
        """Return the logits where they are read, with the edges kept where `kept` says."""
        model, corrupted = self.model, self._corrupted
        length = corrupted.length
        changes = {Node("embed"): self._embedded - corrupted.entering[0]}

        def seen(receiver: Node, stream: Tensor) -> Tensor:
            for sender, change in changes.items():
                mask = kept.get(Edge(sender, receiver))
                if mask is not None:
                    stream = stream + change * mask[:length, None].to(change.dtype)
            return stream

        for layer, block in enumerate(model.blocks):
            heads = [
                node for node in self._senders if node.layer == layer and node.head is not None
            ]
            entering = corrupted.entering[layer]
            changes |= self._mixer(layer, seen(Node("mixer_in", layer), entering), heads)
            if block.has_mlp:
                before = self._layers[layer]
                middle = entering if block.parallel else entering + before["hook_mixer_out"]
                out = block.mlp(block.ln2(seen(Node("mlp_in", layer), middle)))
                changes[Node("mlp_out", layer)] = block.hook_mlp_out(out) - before["hook_mlp_out"]
        everybody = torch.arange(len(self.read_at), device=self.read_at.device)
        final = seen(Node("logits"), corrupted.leaving(everybody))
        return model.logits_at(model.ln_final(final), self.read_at[:, None])[:, 0]

    def _mixer(self, layer: int, stream: Tensor, heads: Sequence[Node]) -> dict[Node, Tensor]:
        """What a mixer, or each of its heads, adds to the stream beyond the corrupted run."""
        block, before = self.model.blocks[layer], self._layers[layer]
        segment = self._corrupted.segment(0, self._corrupted.length)
        names = [f"blocks.{layer}.mixer.hook_result"] if heads else []
        cache, hooks, _ = self.model.get_caching_hooks(names) if names else ({}, [], [])
        with self.model.hooks(fwd_hooks=hooks):
            mixed, _ = block.mixer(block.hook_mixer_in(block.ln1(stream)), segment)
            mixed = block.hook_mixer_out(mixed)
        if not heads:
            return {Node("mixer_out", layer): mixed - before["hook_mixer_out"]}
        change = cache[names[0]] - before["mixer.hook_result"]
        return {node: change[:, :, node.head] for node in heads}

    def _of_layer(self, layer: int) -> dict[str, Tensor]:
        """What a layer's senders put out in the corrupted run, by the hook's name in the block."""
        heads = any(n.layer == layer and n.head is not None for n in self._senders)
        inside = ["hook_mixer_out"]
        inside += ["hook_mlp_out"] if self.model.blocks[layer].has_mlp else []
        inside += ["mixer.hook_result"] if heads else []
        cache = self._corrupted.activations(layer, [f"blocks.{layer}.{name}" for name in inside])
        return {name: cache[f"blocks.{layer}.{name}"] for name in inside}


def pruned(edges: Sequence[Edge], chosen: Bool[Tensor, "edge pos"]) -> Bool[Tensor, "edge pos"]:
    """Return the choice without edges that lie on no way from the embedding to the logits."""
    on = {edge for edge, here in zip(edges, chosen.any(1).tolist(), strict=True) if here}
    while True:
        fed = {("embed", None), *(_part(e.receiver) for e in on)}
        used = {("logits", None), *(_part(e.sender) for e in on)}
        kept = {e for e in on if _part(e.sender) in fed and _part(e.receiver) in used}
        if kept == on:
            marks = [edge in on for edge in edges]
            return chosen & torch.tensor(marks, device=chosen.device)[:, None]
        on = kept


def _part(node: Node) -> tuple[str, int | None]:
    """What a node belongs to: a mixer reads for all its heads."""
    if node.layer is None:
        return node.word, None
    return ("mlp" if node.word.startswith("mlp") else "mixer"), node.layer

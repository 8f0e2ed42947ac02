"""The residual stream as a graph: what writes to it, what reads it, and which edges there can be.

Senders add to the stream: the embedding, every mixer (or one head of it), every MLP. Receivers
read the sum of all senders before them, through their norm: every mixer, every MLP, the logits.
An edge is one sender's share of what one receiver reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hooked_ssm.analysis.exchange import head_axis
from hooked_ssm.analysis.sites import find_site, site_spec
from hooked_ssm.block import AFTER_MIXING
from hooked_ssm.errors import ConfigError, HookNameError
from hooked_ssm.model import HookedModel
from hooked_ssm.rules import is_integer

RECEIVERS = ("mixer_in", "mlp_in", "logits")


class Node(NamedTuple):
    """A sender or receiver.

    Attributes:
        word: "embed", "logits", a block-level word ("mixer_in", "mixer_out", "mlp_in",
            "mlp_out"), or for senders any site of a layer by word or role ("conv", "carry", "z").
        layer: None for "embed" and "logits".
        head: One head of a sender whose activation has heads; None for all.
    """

    word: str
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        place = self.word if self.layer is None else f"{self.word} {self.layer}"
        return place if self.head is None else f"{place}.{self.head}"


class Edge(NamedTuple):
    """One sender's share of what one receiver reads."""

    sender: Node
    receiver: Node

    def __str__(self) -> str:
        return f"{self.sender} -> {self.receiver}"


def writes_after_mixing(hook: str) -> bool:
    """Whether a block's hook point belongs to its MLP rather than to its mixer."""
    inside = hook.split(".", 2)[2]
    return inside.startswith(AFTER_MIXING)


def sender_hook(model: HookedModel, node: Node) -> str | None:
    """Return the hook name, or family, of a sender's site; None for the embedding.

    Raises:
        HookNameError: There is no such site.
        ConfigError: It is the residual stream itself, not a part that is added to it.
    """
    if node.word == "embed":
        return None
    if node.layer is None or node.word in ("logits", "resid_pre", "resid_mid", "resid_post"):
        raise ConfigError(
            f"{node} cannot send: senders are ('embed',), and sites of a layer's mixer or MLP, "
            "such as ('mixer_out', 0), ('conv', 0), ('z', 0, 1) or ('mlp_out', 0)"
        )
    return find_site(model, node.layer, node.word).hook


def stage_of_sender(model: HookedModel, node: Node) -> int:
    """When a sender writes: -1 for the embedding, 2 l for mixer l, 2 l + 1 for MLP l."""
    hook = sender_hook(model, node)
    if hook is None:
        return -1
    return 2 * _layer(model, node) + writes_after_mixing(hook)


def stage_of_receiver(model: HookedModel, node: Node) -> int:
    """When a receiver reads: it sees the senders of smaller stages.

    Raises:
        ConfigError: The node cannot receive.
    """
    if node.word == "logits":
        return 2 * len(model.blocks)
    if node.word not in RECEIVERS or node.head is not None:
        raise ConfigError(
            f"{node} cannot receive; allowed: ('mixer_in', layer), ('mlp_in', layer), ('logits',)"
        )
    layer = _layer(model, node)
    block = model.blocks[layer]
    if node.word == "mlp_in" and not block.has_mlp:
        raise HookNameError(f"layer {layer} of the {model.title} has no mlp_in: it has no MLP")
    return 2 * layer + (node.word == "mlp_in" and not block.parallel)


def _layer(model: HookedModel, node: Node) -> int:
    if node.layer is None or not 0 <= node.layer < len(model.blocks):
        raise HookNameError(
            f"{node}: layer {node.layer} does not exist: allowed 0..{len(model.blocks) - 1}"
        )
    return node.layer


def check_edge(model: HookedModel, edge: Edge) -> Edge:
    """Return the edge if there can be such a one.

    Raises:
        ConfigError: The receiver reads before the sender writes, or a node cannot do its part.
    """
    edge = Edge(_node(edge[0]), _node(edge[1]))
    _check_head(model, edge.sender)
    if stage_of_sender(model, edge.sender) >= stage_of_receiver(model, edge.receiver):
        raise ConfigError(
            f"no edge {edge}: {edge.receiver} reads the residual stream before {edge.sender} "
            "writes to it; a receiver must come later"
        )
    return edge


def _node(given: Sequence) -> Node:
    """A node from its parts."""
    fits = isinstance(given, Sequence) and not isinstance(given, str) and 1 <= len(given) <= 3
    if not fits or not isinstance(given[0], str) or not all(map(_is_index, given[1:])):
        raise ConfigError(
            f"edges holds {given!r}; allowed: (word,), (word, layer) or (word, layer, head), such "
            "as ('embed',), ('mixer_out', 0) or ('z', 0, 1)"
        )
    return Node(*given)


def _is_index(value: object) -> bool:
    return value is None or is_integer(value)


def _check_head(model: HookedModel, node: Node) -> None:
    if node.head is None:
        return
    layer = _layer(model, node)
    spec = site_spec(model, find_site(model, layer, node.word))
    axis = head_axis(spec)
    count = 0 if axis is None else model.blocks[layer].mixer.axis_sizes()[spec.axes[axis]]
    if not 0 <= node.head < count:
        raise ConfigError(
            f"{node}: head {node.head} does not exist; "
            + (f"allowed: 0..{count - 1}" if count else f"{node.word} has no heads")
        )


def block_senders(model: HookedModel, *, heads: bool = False) -> list[Node]:
    """Return the embedding and every mixer and MLP, in order; or heads, where mixers name theirs.

    Args:
        heads: Split the mixers that have `hook_result`, each head's share of their output.
    """
    found = [Node("embed")]
    for layer, block in enumerate(model.blocks):
        if heads and "hook_result" in block.mixer.specs:
            count = block.mixer.axis_sizes()["head"]
            found += [Node("result", layer, head) for head in range(count)]
        else:
            found.append(Node("mixer_out", layer))
        if block.has_mlp:
            found.append(Node("mlp_out", layer))
    return found


def block_receivers(model: HookedModel) -> list[Node]:
    """Return every mixer and MLP, in order, and the logits."""
    found = []
    for layer, block in enumerate(model.blocks):
        found.append(Node("mixer_in", layer))
        if block.has_mlp:
            found.append(Node("mlp_in", layer))
    return [*found, Node("logits")]


def all_edges(model: HookedModel, *, heads: bool = False) -> list[Edge]:
    """Return every edge between block-level senders and receivers, in order of the senders."""
    return possible_edges(model, block_senders(model, heads=heads), block_receivers(model))


def possible_edges(
    model: HookedModel, senders: Iterable[Node], receivers: Iterable[Node]
) -> list[Edge]:
    """Return the edges that can be, among the pairs of these nodes."""
    receivers = list(receivers)
    return [
        Edge(sender, receiver)
        for sender in senders
        for receiver in receivers
        if stage_of_sender(model, sender) < stage_of_receiver(model, receiver)
    ]

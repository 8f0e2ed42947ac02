"""Path patching: effects by hand, sums over paths, and an independent way to freeze the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hooked_ssm.analysis import metrics
from hooked_ssm.analysis.graph import Edge, Node, all_edges
from hooked_ssm.analysis.patching import activation_patching
from hooked_ssm.analysis.path_patching import path_patching
from hooked_ssm.errors import ConfigError, HookNameError
from hooked_ssm.model import HookedModel
from tests.analysis.micro import NOTHING, micro, unit
from tests.analysis.test_patching import difference, pair
from tests.models import tiny

EMBED, LOGITS = Node("embed"), Node("logits")


def two_steps() -> HookedModel:
    """Layer 0 copies token 0 from the position before as 3 at dim 1; layer 1 doubles that at 2."""
    return micro([unit(0, 1, 3), NOTHING], [NOTHING, unit(1, 2, 2)])


def test_effects_by_hand() -> None:
    """clean 0 3 -> logits [0 3 6 1]; corrupted 3 3 -> [0 0 0 1]; everything goes over layer 0."""
    model = two_steps()
    clean, corrupted = torch.tensor([[0, 3]]), torch.tensor([[3, 3]])
    assert model(clean)[0, -1].tolist() == [0, 3, 6, 1]
    zero, one, two = torch.tensor([0]), torch.tensor([1]), torch.tensor([2])
    asked = {"two": metrics.logit_difference(two, zero), "one": metrics.logit_difference(one, zero)}
    result = path_patching(model, clean, corrupted, asked)
    effects = {
        str(edge): [result.effect(name)[i, 0, 0].item() for name in asked]
        for i, edge in enumerate(result.edges)
    }
    assert effects == {
        "embed -> mixer_in 0": [6, 3],  # the whole chain follows from what layer 0 reads
        "embed -> mixer_in 1": [0, 0],
        "embed -> logits": [0, 0],
        "mixer_out 0 -> mixer_in 1": [6, 0],
        "mixer_out 0 -> logits": [0, 3],
        "mixer_out 1 -> logits": [6, 0],
    }
    head = path_patching(
        model, clean, corrupted, asked,
        edges=[(("result", 0, 0), ("mixer_in", 1)), (("result", 0, 1), ("mixer_in", 1)),
               (("x", 0), ("mixer_in", 1))],
    )  # fmt: skip
    assert head.effect("two")[:, 0, 0].tolist() == [6, 0, 6]


def test_effects_by_hand_through_a_relu() -> None:
    """The MLP of layer 0 doubles what is positive: 3 at dim 1 becomes 3 + 6, and is doubled."""
    model = micro([unit(0, 1, 3), NOTHING], [NOTHING, unit(1, 2, 2)], mlp="relu")
    clean, corrupted = torch.tensor([[0, 3]]), torch.tensor([[3, 3]])
    metric = metrics.logit_difference(torch.tensor([1]), torch.tensor([0]))
    result = path_patching(
        model, clean, corrupted, metric,
        edges=[(("mixer_out", 0), ("mlp_in", 0)), (("mixer_out", 0), ("logits",)),
               (("mlp_out", 0), ("logits",)), (("mlp_out", 0), ("mlp_in", 1))],
    )  # fmt: skip
    # mlp_in 0: MLP 0 adds 6 to the stream, MLP 1 twice that: 18. The other edges: 3, 6 and 12.
    assert result.effect()[:, 0, 0].tolist() == [18, 3, 6, 12]


def test_paths_add_up_to_the_total_effect_in_a_linear_model() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(-2, 3, (4, 4, 4), generator=generator).tolist()
    model = micro(draw[:2], draw[2:], mlp="linear")
    clean, corrupted = torch.tensor([[0, 1, 2, 3], [3, 2, 0, 1]]), torch.tensor([[1, 0, 0, 3]] * 2)
    metric = metrics.logit_difference(torch.tensor([2, 3]), torch.tensor([0, 1]))
    result = path_patching(model, clean, corrupted, metric, positions=[0, 1, 2, 3])
    effect = result.effect()
    for word, layer in [("mixer_out", 0), ("mlp_out", 0), ("mixer_out", 1), ("mlp_out", 1)]:
        exact = activation_patching(model, clean, corrupted, metric, sites=[word], layers=[layer])
        mine = [e.sender == Node(word, layer) for e in result.edges]
        want = exact.sites[word].values[0, 0] - exact.base[0]
        torch.testing.assert_close(effect[torch.tensor(mine)].sum(0), want, atol=1e-10, rtol=0)
    from_embed = effect[torch.tensor([e.sender == EMBED for e in result.edges])].sum((0, 1))
    torch.testing.assert_close(from_embed, (result.source - result.base)[0], atol=1e-10, rtol=0)


def frozen(model: HookedModel, base: Tensor, source: Tensor, edge: Edge, hook: str) -> Tensor:
    """The same by freezing: hold every other mixer and MLP at its base output. [batch, d_vocab]"""
    outs = [n for n in model.hook_dict if n.endswith(("hook_mixer_out", "hook_mlp_out"))]
    _, kept = model.run_with_cache(base, names_filter=outs)
    _, there = model.run_with_cache(source, names_filter=hook)
    own = f"blocks.{edge.sender.layer}.hook_mixer_out"
    reads = {"mixer_in": f"blocks.{edge.receiver.layer}.hook_mixer_in",
             "mlp_in": f"blocks.{edge.receiver.layer}.ln2.hook_normalized"}  # fmt: skip
    name = reads.get(edge.receiver.word, "ln_final.hook_normalized")
    seen = {}
    hold = [(n, lambda x, hook, n=n: kept[n].clone()) for n in outs if n != own]
    put = (hook, lambda x, hook: there[hook.name].clone())
    look = (name, lambda x, hook: seen.__setitem__("x", x.clone()))
    model.run_with_hooks(base, fwd_hooks=[*hold, put, look])
    return model.run_with_hooks(base, fwd_hooks=[(name, lambda x, hook: seen["x"])])[:, -1]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "word"),
    [("mamba", "conv"), ("mamba", "state"), ("based", "mixed"), ("h3", "write"),
     ("attention-2heads", "pattern"), ("gated_delta_net", "key"), ("hyena", "mixer_out")],
)  # fmt: skip
def test_equals_freezing_everything_else(name: str, word: str) -> None:
    model = tiny(name, dtype=torch.float64)
    clean, corrupted = pair()
    receivers = [Node("mixer_in", 1), LOGITS]
    receivers += [Node("mlp_in", 0), Node("mlp_in", 1)] if model.blocks[0].has_mlp else []
    edges = [Edge(Node(word, 0), receiver) for receiver in receivers]
    result = path_patching(model, clean, corrupted, difference(), edges=edges, max_batch=2)
    for i, edge in enumerate(edges):
        want = frozen(model, corrupted, clean, edge, model.hook_name(0, word))
        torch.testing.assert_close(
            result.values[0, i, 0], difference()(want), atol=1e-10, rtol=0, msg=str(edge)
        )


def test_one_sender_position_at_a_time_and_its_plot() -> None:
    model = tiny("mamba")
    clean, corrupted = pair()
    edges = [(("carry", 0), ("mixer_in", 1))]
    result = path_patching(model, clean, corrupted, difference(), edges=edges, positions=[0, 8])
    assert result.effect()[0, 0].abs().max() == 0  # before the tokens that differ
    assert result.effect()[0, 1].abs().max() > 0
    assert list(result.frame["sender"].unique()) == ["carry 0"]
    figure = path_patching(model, clean, corrupted, difference()).heatmap()
    assert len(figure.data[0].y) == 3 and len(figure.data[0].x) == 3


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("edge", "text"),
    [
        ((("mixer_out", 1), ("mixer_in", 0)), "no edge mixer_out 1 -> mixer_in 0"),
        ((("mixer_out", 1), ("mixer_in", 1)), "must come later"),
        ((("mlp_out", 0), ("mlp_in", 0)), "must come later"),
        ((("logits",), ("logits",)), "cannot send"),
        ((("resid_pre", 0), ("logits",)), "cannot send"),
        ((("embed",), ("resid_pre", 1)), "cannot receive"),
        ((("stat", 0), ("logits",)), "has no stat"),
        ((("embed",), ("mixer_in", 7)), "allowed 0..1"),
    ],
)
def test_impossible_edges_are_refused_before_anything_runs(edge: tuple, text: str) -> None:
    model = tiny("based")
    clean, corrupted = pair()
    fired: list[str] = []

    def look(x: torch.Tensor, hook: object) -> None:
        fired.append("embedding")

    look.only_reads = True
    model.add_hook("hook_embed", look)
    with pytest.raises((ConfigError, HookNameError), match=text):
        path_patching(model, clean, corrupted, difference(), edges=[edge])
    assert fired == []


def test_all_edges_respect_parallel_blocks() -> None:
    model = tiny("attention", parallel_attn_mlp=True)
    edges = {str(edge) for edge in all_edges(model)}
    assert "mixer_out 0 -> mlp_in 0" not in edges and "mixer_out 0 -> mlp_in 1" in edges
    assert "mixer_out 0 -> mlp_in 0" in {str(e) for e in all_edges(tiny("attention"))}

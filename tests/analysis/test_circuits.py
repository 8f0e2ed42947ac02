"""Circuits: scores by hand, the two ends of faithfulness, pruning, drawing, a trained model."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.analysis import metrics
from hooked_ssm.analysis.circuits import edge_attribution
from hooked_ssm.analysis.graph import Node, possible_edges
from hooked_ssm.analysis.path_patching import path_patching
from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.plots.circuit import circuit_graph
from tests.analysis.micro import micro
from tests.analysis.test_patching import difference, pair
from tests.analysis.test_path_patching import two_steps
from tests.models import tiny


def test_the_circuit_by_hand() -> None:
    model = two_steps()
    clean, corrupted = torch.tensor([[0, 3]]), torch.tensor([[3, 3]])
    metric = metrics.logit_difference(torch.tensor([2]), torch.tensor([0]))
    scores = edge_attribution(model, clean, corrupted, metric)
    top = scores.frame.head(3)
    assert set(zip(top["sender"], top["receiver"], strict=True)) == {
        ("embed", "mixer_in 0"), ("result 0.0", "mixer_in 1"), ("result 1.1", "logits"),
    }  # fmt: skip
    assert top["score"].tolist() == [-6, -6, -6]  # what corrupting each edge takes away
    assert (scores.frame["score"][3:] == 0).all()
    circuit = scores.smallest(0.99)
    assert circuit.faithfulness == pytest.approx(1) and len(circuit.edges) == 3
    at = scores.circuit(3, positional=True)
    assert at.faithfulness == pytest.approx(1)
    # The token at 0 is read at 0, then copied to 1, where everything else happens.
    assert {str(e): k.nonzero()[:, 0].tolist() for e, k in zip(scores.edges, at.kept, strict=True)
            if k.any()} == {"embed -> mixer_in 0": [0], "result 0.0 -> mixer_in 1": [1],
                            "result 1.1 -> logits": [1]}  # fmt: skip
    assert scores.circuit(2).edges == []  # two edges of a chain of three lead nowhere
    assert scores.circuit(2).faithfulness == pytest.approx(0)
    figure = circuit.graph()
    assert figure.layout.title.text == "3 of 9 edges, faithfulness 1.00"
    assert "head 0.0" in figure.data[-1].text


@pytest.mark.parametrize("steps", [1, 3])
def test_scores_are_path_effects_where_the_model_is_linear(steps: int) -> None:
    draw = torch.randint(-2, 3, (4, 4, 4), generator=torch.Generator().manual_seed(0)).tolist()
    model = micro(draw[:2], draw[2:], mlp="linear")
    clean, corrupted = torch.tensor([[0, 1, 2, 3], [3, 2, 0, 1]]), torch.tensor([[1, 0, 0, 3]] * 2)
    metric = metrics.logit_difference(torch.tensor([2, 3]), torch.tensor([0, 1]))
    scores = edge_attribution(model, clean, corrupted, metric, steps=steps)
    exact = path_patching(
        model, clean, corrupted, metric, edges=scores.edges, positions=[0, 1, 2, 3],
        direction="noise",
    )  # fmt: skip
    torch.testing.assert_close(scores.values, exact.effect(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["mamba", "based-2heads", "attention-2heads", "mixed"])
def test_all_edges_give_the_clean_run_and_none_the_corrupted(name: str) -> None:
    model = tiny(name, dtype=torch.float64)
    clean, corrupted = pair()
    scores = edge_attribution(model, clean, corrupted, difference())
    whole, none = scores.circuit(len(scores.edges)), scores.circuit(0)
    assert whole.faithfulness == pytest.approx(1, abs=1e-9)
    assert none.faithfulness == pytest.approx(0, abs=1e-9)
    assert whole.n_edges == len(whole.edges) == len(scores.edges)
    with torch.no_grad():
        want = difference()(model(clean)[:, -1])
    torch.testing.assert_close(scores.clean, want, atol=1e-10, rtol=0)
    assert not any(hook.has_hooks() for hook in model.hook_points())


def test_parallel_blocks_and_heads_off() -> None:
    model = tiny("attention-2heads", dtype=torch.float64, parallel_attn_mlp=True)
    clean, corrupted = pair()
    scores = edge_attribution(model, clean, corrupted, difference(), heads=False)
    assert {e.sender for e in scores.edges} == {
        Node("embed"), Node("mixer_out", 0), Node("mlp_out", 0), Node("mixer_out", 1),
        Node("mlp_out", 1),
    }  # fmt: skip
    assert scores.circuit(len(scores.edges)).faithfulness == pytest.approx(1, abs=1e-9)
    nodes = {e.sender for e in scores.edges}, {e.receiver for e in scores.edges}
    assert len(possible_edges(model, *nodes)) == len(scores.edges)


def test_thresholds_and_refusals() -> None:
    model = tiny("mamba")
    clean, corrupted = pair()
    scores = edge_attribution(model, clean, corrupted, difference())
    assert scores.circuit(threshold=0.0).n_edges == len(scores.circuit(threshold=0.0).edges)
    assert scores.circuit(threshold=float("inf")).edges == []
    with pytest.raises(ConfigError, match="exactly one"):
        scores.circuit()
    with pytest.raises(ConfigError, match="allowed: 0.."):
        scores.circuit(1000)
    with pytest.raises(ConfigError, match="train mode"):
        edge_attribution(model.train(), clean, corrupted, difference())
    with pytest.raises(ShapeError, match="without edges"):
        circuit_graph([])

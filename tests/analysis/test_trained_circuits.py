"""On trained recall models: circuits agree with the mechanism, estimates with exact patching."""

from __future__ import annotations

import functools

import pytest
import torch

from hooked_ssm.analysis import metrics
from hooked_ssm.analysis.attribution import agreement, attribution_patching
from hooked_ssm.analysis.circuits import edge_attribution
from hooked_ssm.analysis.graph import Edge, Node
from hooked_ssm.analysis.patching import activation_patching
from hooked_ssm.analysis.path_patching import path_patching
from hooked_ssm.demo import TASK, DemoResult, train_and_evaluate

pytestmark = pytest.mark.slow
DOCUMENTS = 32


@functools.cache
def trained(name: str) -> DemoResult:
    result = train_and_evaluate(name, seed=0, d_model=64, documents=64, progress=False)
    result.model.eval()
    return result


def documents(name: str):
    """Original and corrupted key documents, where to read, and the logit difference."""
    task, generator = TASK.single_query(), torch.Generator().manual_seed(0)
    batch = task.sample(DOCUMENTS, "test", generator=generator).trim()
    corrupted = task.corrupt(batch, "query_item_orig", generator=generator).tokens
    read = batch.positions["query_item"]
    with torch.no_grad():
        logits = trained(name).model(corrupted)[torch.arange(DOCUMENTS), read]
    wrong = logits.scatter(1, batch.answer[:, None], -torch.inf).argmax(-1)
    return batch, corrupted, read, metrics.logit_difference(batch.answer, wrong)


def test_the_attention_models_circuit_holds_the_previous_token_head() -> None:
    result = trained("attention")
    assert result.evaluation.mechanism == "induction"
    batch, corrupted, read, metric = documents("attention")
    scores = edge_attribution(result.model, batch.tokens, corrupted, metric, steps=5, read_at=read)
    circuit = scores.smallest(0.9)
    assert circuit.faithfulness > 0.9 and len(circuit.edges) < circuit.n_edges
    assert {Node("result", 0, 0), Node("result", 1, 0)} <= set(circuit.nodes)
    _, cache = result.model.run_with_cache(batch.tokens, names_filter="blocks.0.mixer.hook_pattern")
    rows, value = torch.arange(DOCUMENTS), batch.positions["target_item_orig"]
    previous = cache["pattern", 0][rows, 0, value, value - 1]
    assert previous.mean() > 0.5


def test_the_mamba_models_circuit_runs_through_both_mixers() -> None:
    result = trained("mamba")
    assert result.evaluation.mechanism == "direct retrieval"
    batch, corrupted, read, metric = documents("mamba")
    scores = edge_attribution(result.model, batch.tokens, corrupted, metric, steps=5, read_at=read)
    circuit = scores.smallest(0.9)
    assert circuit.faithfulness > 0.9 and len(circuit.edges) < circuit.n_edges
    assert Edge(Node("mixer_out", 1), Node("logits")) in circuit.edges
    # Inside the last mixer the answer passes its convolution, then its scan (not the skip).
    paths = path_patching(
        result.model, batch.tokens, corrupted, metric, read_at=read,
        edges=[((word, 1), ("logits",)) for word in ("conv", "mixed", "gate")],
    )  # fmt: skip
    conv, scan, gate = paths.frame["recovery"]
    assert conv > 0.9 and scan > 0.9 and abs(gate) < 0.1


@pytest.mark.parametrize("name", ["attention", "mamba"])
def test_estimates_rank_as_exact_patching_does(name: str) -> None:
    """cases.jsonl, attribution-zero-and-linear: rank correlation is reported and > 0."""
    batch, corrupted, read, metric = documents(name)
    sites = ["resid_pre", "mixer_out", *(["conv", "state", "carry"] if name == "mamba" else ["z"])]
    given = {"sites": sites, "read_at": read}
    exact = activation_patching(trained(name).model, batch.tokens, corrupted, metric, **given)
    estimated = attribution_patching(
        trained(name).model, batch.tokens, corrupted, metric, steps=8, **given
    )
    table = agreement(estimated, exact).set_index("site")
    assert table.loc["all", "rank_correlation"] > 0.4

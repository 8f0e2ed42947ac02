"""Circuits of trained recall models, their faithfulness, and how well attribution estimates it.

    python benchmarks/circuits.py

Takes the models of notebooks/checkpoints (the demo's recipes), corrupts the key in 64 documents,
scores all edges (EAP-IG, 5 steps), and cuts out the smallest circuits found with faithfulness
above 0.9: whole edges, and edges at single positions. Then compares attribution patching (8 steps)
with exact patching, cell by cell. Prints the tables of benchmarks/RESULTS.md.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hooked_ssm import HookedModel
from hooked_ssm.analysis import metrics
from hooked_ssm.analysis.attribution import agreement, attribution_patching
from hooked_ssm.analysis.circuits import edge_attribution
from hooked_ssm.analysis.patching import activation_patching
from hooked_ssm.demo import TASK

CHECKPOINTS = Path(__file__).parents[1] / "notebooks" / "checkpoints"
SITES = {
    "attention": ["resid_pre", "mixer_out", "z"],
    "based": ["resid_pre", "mixer_out"],
    "mamba": ["resid_pre", "mixer_out", "conv", "state", "carry"],
}


def documents(model: HookedModel) -> tuple[Tensor, Tensor, Tensor, metrics.Metric]:
    """Documents, the same with another key, where the answer is read, and answer - its rival."""
    generator = torch.Generator().manual_seed(0)
    batch = TASK.single_query().sample(64, "test", generator=generator).trim()
    corrupted = TASK.single_query().corrupt(batch, "query_item_orig", generator=generator).tokens
    read_at = batch.positions["query_item"]
    with torch.no_grad():
        logits = model(corrupted)[torch.arange(len(corrupted)), read_at]
    rival = logits.scatter(1, batch.answer[:, None], -torch.inf).argmax(-1)
    return batch.tokens, corrupted, read_at, metrics.logit_difference(batch.answer, rival)


def main() -> None:
    torch.set_num_threads(1)
    circuits, estimates = [], []
    for name, sites in SITES.items():
        model = HookedModel.from_pretrained(CHECKPOINTS / name)
        clean, corrupted, read_at, metric = documents(model)
        scores = edge_attribution(model, clean, corrupted, metric, steps=5, read_at=read_at)
        for positional in (False, True):
            circuit = scores.smallest(0.9, positional=positional)
            of = scores.scores.numel() if positional else circuit.n_edges
            kept = int(circuit.kept.sum()) if positional else len(circuit.edges)
            unit = "edge and position" if positional else "edge"
            edges = ", ".join(f"{edge.sender} → {edge.receiver}" for edge in circuit.edges)
            circuits.append(
                f"| {name} | {unit} | {kept} of {of} | {circuit.faithfulness:.2f} | {edges} |"
            )
        given = {"sites": sites, "read_at": read_at}
        exact = activation_patching(model, clean, corrupted, metric, **given)
        estimated = attribution_patching(model, clean, corrupted, metric, steps=8, **given)
        for site, row in agreement(estimated, exact).set_index("site").iterrows():
            estimates.append(
                f"| {name} | {site} | {row['cells']:.0f} | {row['rank_correlation']:.2f} | "
                f"{row['mean_error']:.2f} | {row['largest_effect']:.2f} |"
            )
    print("| model | unit | kept | faithfulness | edges |\n|---|---|---|---|---|")
    print("\n".join(circuits))
    print("\n| model | site | cells | rank correlation | mean error | largest effect |")
    print("|---|---|---|---|---|---|")
    print("\n".join(estimates))


if __name__ == "__main__":
    main()

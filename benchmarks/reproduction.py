"""The paper's experiments at d_model 64, from the runs of a sweep, beside the paper's numbers.

    hooked-ssm sweep experiments/reproduction.yaml --out runs/reproduction
    python benchmarks/reproduction.py runs/reproduction

Accuracy is measured again on 3,200 new test documents (the paper has 320, of which the error is up
to 0.03); attributions are those of the runs' own evaluations. Prints benchmarks/RESULTS.md's table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hooked_ssm import HookedModel
from hooked_ssm.sweeps.run_folder import RunFolder
from hooked_ssm.sweeps.table import results_table
from hooked_ssm.training import answer_accuracy, checkpoint_folders

DOCUMENTS = 3200
# (task, architecture, variant) -> the paper's test accuracy at d_model 64
PAPER = {
    ("ar_32", "attention", ""): "1.000",
    ("ar_32", "based", ""): "0.991",
    ("ar_32", "mamba", ""): "0.806",
    ("ar_32", "mamba", "conv 2"): "0.91",
    ("ar_32", "mamba", "conv 1"): "0.02",
    ("ar_32", "hyena", ""): "0.028",
    ("ar_32", "h3", ""): "0.019",
    ("ar_32", "base_conv", ""): "0.038",
    ("pcfg_easy", "attention", ""): "0.94",
    ("pcfg_easy", "based", ""): "0.92",
    ("pcfg_easy", "mamba", ""): "0.96",
}


def accuracy_again(run: RunFolder) -> float:
    """The trained model's accuracy on documents that no evaluation has seen."""
    model = HookedModel.from_pretrained(checkpoint_folders(run.training)[-1])
    task = run.spec().build_task()
    documents = task.sample(DOCUMENTS, "test", generator=torch.Generator().manual_seed(1))
    return answer_accuracy(model, documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    print(
        "| task | model | lr | steps | accuracy | paper | @ Key | @ Query | @ Value | mechanism |"
    )
    print("|---" * 10 + "|")
    for row in results_table(folder).itertuples():
        name = f"{row.architecture}{', ' if row.variant else ''}{row.variant}"
        paper = PAPER.get((row.task, row.architecture, row.variant), "")
        if row.state != "complete":
            print(f"| {row.task} | {name} | {row.lr:g} | {row.state} | | {paper} | | | | |")
            continue
        accuracy = accuracy_again(RunFolder(folder / row.run))
        error = (accuracy * (1 - accuracy) / DOCUMENTS) ** 0.5
        shares = (row.attribution_key, row.attribution_query, row.attribution_value)
        print(
            f"| {row.task} | {name} | {row.lr:g} | {row.steps:.0f} | "
            f"{accuracy:.3f} ± {error:.3f} | {paper} | "
            + " | ".join(f"{share:.3f}" for share in shares)
            + f" | {row.mechanism}{f' ({row.timing})' if isinstance(row.timing, str) else ''} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

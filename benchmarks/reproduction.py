"""The paper's experiments at d_model 64, from the runs of a sweep, beside the paper's numbers.

    hooked-ssm sweep experiments/reproduction.yaml --out runs/reproduction
    python benchmarks/reproduction.py runs/reproduction

Prints both tables of benchmarks/RESULTS.md: each cell at the learning rate that is best on dev
documents, and every run. "320" is the run's own evaluation, of as many documents as the paper's
(error up to 0.03); "3,200" are new ones, and "unseen" those of them that are not among the training
documents too, as short sentences may be. Attributions are those of the runs' own evaluations.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from hooked_ssm import HookedModel
from hooked_ssm.sweeps import RunFolder, best_over_lr, results_table
from hooked_ssm.tasks import FixedSet, TaskBatch
from hooked_ssm.training import answer_accuracy, checkpoint_folders, training_stream

DOCUMENTS = 3200


class Paper(NamedTuple):
    """What the paper reports at d_model 64: test accuracy and attribution @ Value."""

    accuracy: str
    value: str = ""


PAPER = {
    ("ar_32", "attention", ""): Paper("1.000", "1.00"),
    ("ar_32", "based", ""): Paper("0.991", "1.00"),
    ("ar_32", "mamba", ""): Paper("0.806", "0.00"),
    ("ar_32", "mamba", "conv 2"): Paper("0.91"),
    ("ar_32", "mamba", "conv 1"): Paper("0.02"),
    ("ar_32", "hyena", ""): Paper("0.028", "0.00"),
    ("ar_32", "h3", ""): Paper("0.019", "0.00"),
    ("ar_32", "base_conv", ""): Paper("0.038"),
    ("pcfg_easy", "attention", ""): Paper("0.94", "about 1"),
    ("pcfg_easy", "based", ""): Paper("0.92", "0.9 to 1"),
    ("pcfg_easy", "mamba", ""): Paper("0.96", "below 0.1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    table = results_table(folder)
    best = best_over_lr(table)
    head("task", "model", "lr", "320", "3,200", "unseen", "paper", "@ Key", "@ Query", "@ Value",
         "paper's", "mechanism")  # fmt: skip
    for row in best.to_dict("records"):
        paper = PAPER.get((row["task"], row["architecture"], row["variant"]), Paper(""))
        again, unseen = accuracy_again(RunFolder(folder / row["run"]))
        line(
            row["task"], name_of(row), f"{row['lr']:g}", f"{row['accuracy']:.3f}", again, unseen,
            paper.accuracy, *(f"{row[f'attribution_{p}']:.3f}" for p in ("key", "query", "value")),
            paper.value, mechanism_of(row),
        )  # fmt: skip
    print()
    head("task", "model", "lr", "steps", "training loss", "dev accuracy", "test accuracy")
    for row in table.to_dict("records"):
        numbers = [row[name] for name in ("loss", "dev_accuracy", "accuracy")]
        steps = RunFolder(folder / row["run"]).steps_done()
        line(row["task"], name_of(row), f"{row['lr']:g}", str(steps),
             *("" if pd.isna(x) else f"{x:.3f}" for x in numbers))  # fmt: skip


def accuracy_again(run: RunFolder) -> tuple[str, str]:
    """Return the accuracy on new test documents, and on those that training has not seen."""
    spec = run.spec()
    model = HookedModel.from_pretrained(checkpoint_folders(run.training)[-1])
    generator = torch.Generator().manual_seed(1)
    documents = spec.build_task().sample(DOCUMENTS, "test", generator=generator)
    stream = training_stream(spec.build_train_task(), spec.train_config(run.training))
    at = spec.build_task().answer_position
    new = ~among(documents, stream) if isinstance(stream, FixedSet) else documents.lengths > 0
    unseen = f"{with_error(model, documents[new], at)} of {int(new.sum()):,}"
    return with_error(model, documents, at), "all are" if bool(new.all()) else unseen


def with_error(model: HookedModel, documents: TaskBatch, position: str) -> str:
    accuracy = answer_accuracy(model, documents, position=position)
    error = (accuracy * (1 - accuracy) / len(documents)) ** 0.5
    return f"{accuracy:.3f} ± {error:.3f}"


def among(documents: TaskBatch, training: FixedSet) -> torch.Tensor:
    """Return which documents stand in the training set, whatever they ask. [document]"""
    seen = {words for part in torch.arange(len(training)).split(4096)
            for words in sentences(training[part])}  # fmt: skip
    return torch.tensor([words in seen for words in sentences(documents)])


def sentences(batch: TaskBatch) -> list[tuple[int, ...]]:
    """Return the tokens before each document's divider."""
    ends = batch.positions["divider"].tolist()
    return [tuple(row[:end]) for row, end in zip(batch.tokens.tolist(), ends, strict=True)]


def name_of(row: dict[str, Any]) -> str:
    return f"{row['architecture']}{', ' if row['variant'] else ''}{row['variant']}"


def mechanism_of(row: dict[str, Any]) -> str:
    when = f" ({row['timing']})" if isinstance(row["timing"], str) else ""
    return f"{row['mechanism']}{when}"


def head(*names: str) -> None:
    line(*names)
    print("|---" * len(names) + "|")


def line(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

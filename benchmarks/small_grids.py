"""What the small versions of experiments/*.yaml show, from the folders of their runs.

    for name in ar_32 ar_32_reversed ...; do
        hooked-ssm sweep experiments/$name.yaml --small --out runs/grids/$name
    done
    python benchmarks/small_grids.py runs/grids/*

Prints a row per model: test accuracy by d_model, each at the learning rate that is best on dev
documents, and the mechanism at the largest d_model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from hooked_ssm.sweeps import best_over_lr, results_table

COLUMNS = ("experiment", "model", "d_model", "accuracy", "chance", "@ Key", "@ Query", "@ Value",
           "mechanism")  # fmt: skip
MODEL = ["task", "architecture", "variant", "n_layers"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for folder in parser.parse_args().folders:
        table = results_table(folder)
        if (table["state"] != "complete").any():
            raise SystemExit(f"{folder}: not all runs are complete; run its sweep to the end first")
        best = best_over_lr(table).sort_values("d_model")
        for _, runs in best.groupby(MODEL):
            print(row(folder.name, runs), flush=True)


def row(experiment: str, runs: pd.DataFrame) -> str:
    """Return a model's line, from its runs in the order of their widths."""
    widest = runs.iloc[-1]
    name = widest["architecture"] + (widest["variant"] and f", {widest['variant']}")
    if widest["n_layers"] != 2:
        name += f", {widest['n_layers']} layer" + "s" * int(widest["n_layers"] > 1)
    when = f" ({widest['timing']})" if isinstance(widest["timing"], str) else ""
    shares = [widest[f"attribution_{place}"] for place in ("key", "query", "value")]
    cells = [
        experiment,
        name,
        " / ".join(map(str, runs["d_model"])),
        " / ".join(f"{accuracy:.3f}" for accuracy in runs["accuracy"]),
        f"{widest['chance']:.3g}",
        *("" if pd.isna(share) else f"{share:.3f}" for share in shares),
        f"{widest['mechanism']}{when}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

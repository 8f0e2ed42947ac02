"""A sweep's report: one offline page with the paper's figures, and the table as CSV and Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError
from hooked_ssm.files import make_folder, new_file, write_text
from hooked_ssm.sweeps.table import (
    best_over_lr,
    refuse_other_runs,
    results_table,
    task_descriptions,
)

ABOUT = """
Each cell (architecture, variant, layers, d_model) is shown at the learning rate that is best on
{dev} documents, averaged over seeds; accuracies are those on {test} documents. A rate at which runs
are missing comes after those at which more are complete.

Attribution is the share of the original answer's probability that comes back when one activation of
the original document is restored at the input of the last block, the key in context being replaced.
@ Value near 1 is induction; @ Key and @ Query summing to 1 is direct retrieval: early @ Query, late
@ Key. Attributions of unsolved runs are noise. Where runs lie on one spot, the markers of later
architectures are smaller, so that all show.
"""


@checked
def write_report(folder: Path | str, out: Path | str, command: str | None = None) -> list[Path]:
    """Write the report of a sweep's folder to `out`, and its table beside it; return the files.

    Raises:
        CheckpointError: The folder holds no runs, or a damaged one.
        ConfigError: `out` is no name of an HTML file, or lies in a file; several runs are of one
            cell, learning rate and seed, or of one cell and other settings; two tasks have one
            name; or a task of one's own is not known.
    """
    page = Path(out)
    if page.suffix not in (".html", ".htm"):
        raise ConfigError(f"out={str(out)!r}; allowed: a file that ends in .html")
    table = results_table(folder)
    title, tasks = f"Sweep {Path(folder).resolve().name}", task_descriptions(folder)
    text = sweep_page(table, tasks, title=title, command=command)
    make_folder(page.parent, "out")
    files = [page, page.with_suffix(".csv"), page.with_suffix(".parquet")]
    write_text(page, text)
    with new_file(files[1]) as temporary:
        table.to_csv(temporary, index=False)
    with new_file(files[2]) as temporary:
        table.to_parquet(temporary, index=False)
    return files


def sweep_page(
    table: pd.DataFrame,
    tasks: Mapping[str, str] | None = None,
    *,
    title: str = "Sweep",
    command: str | None = None,
) -> str:
    """Return the report page of a table of runs, one that is unfinished too.

    Args:
        table: Of `results_table`.
        tasks: What each task asks, of `task_descriptions`.
        title, command: What heads the page.

    Raises:
        ConfigError: Several runs are of one cell, learning rate and seed.
    """
    from hooked_ssm import plots  # plotly is imported only where something is drawn

    refuse_other_runs(table)

    complete = table[table["state"] == "complete"]
    sections: list[Any] = [plots.Section("Runs", _overview(table))]
    for task, runs in complete.groupby("task", sort=False):
        about = [tasks[task]] if tasks and task in tasks else []
        sections.append(plots.Section(f"Task {task}", [*about, *_task(runs)]))
    shown = [name for name in complete.columns if name not in ("state", "reason", "recipe")]
    if len(complete):
        sections.append(plots.Section("All complete runs", [complete[shown]]))
    return plots.report_page(title, sections, command=command)


def _overview(table: pd.DataFrame) -> list[Any]:
    counts = table["state"].value_counts()
    words = ", ".join(f"{count} {state}" for state, count in counts.items())
    items: list[Any] = [f"{len(table)} run{'s' * (len(table) > 1)}: {words}."]
    complete = table[table["state"] == "complete"]
    if len(complete):
        splits = {"dev": complete["dev_split"], "test": complete["split"]}
        items.append(ABOUT.format(**{name: _words(column) for name, column in splits.items()}))
    failed = table[table["state"] == "failed"]
    if len(failed):
        labels = ["run", "task", "architecture", "variant", "n_layers", "d_model", "lr", "seed"]
        items += ["Failed runs:", failed[[*labels, "reason"]]]
    return items


def _task(runs: pd.DataFrame) -> list[Any]:
    from hooked_ssm import plots

    best = best_over_lr(runs)
    plain = best[best["variant"] == ""]
    items: list[Any] = []
    if len(plain):
        items.append(_accuracies(plain))
        if plain["d_model"].nunique() > 1:
            items.append(plots.accuracy_by_width(plain))
    for architecture, some in best.groupby("architecture", sort=False):
        if some["variant"].any():
            items.append(plots.accuracy_by_variant(some, title=f"{architecture}: variants"))
            items.append(_accuracies(some))
    deep = best[best["n_layers"] > 1]
    if len(deep):
        # another mixer setting may well be another mechanism: variants stand apart
        names = deep["architecture"] + deep["variant"].map(lambda v: v and f", {v}")
        deep = deep.assign(architecture=names)
        single = deep["architecture"].is_unique
        bars = plots.attribution_bars(_rows(deep)) if single else plots.attribution_boxes(deep)
        items += [plots.mechanism_scatter(_rows(deep)), bars]
    title = f"{_words(runs['dev_split'])} against {_words(runs['split'])}, every run"
    items.append(plots.dev_against_test(runs, title=title[0].upper() + title[1:]))
    return items


def _words(splits: pd.Series) -> str:
    return " or ".join(sorted(splits.dropna().unique()))


def _accuracies(best: pd.DataFrame) -> pd.DataFrame:
    """Return mean accuracies: a row per architecture, variant and layers, a column per width.

    Where cells are means over different numbers of runs, a column per width says how many.
    """
    rows = ["architecture", *(["variant"] if best["variant"].any() else []), "n_layers"]
    cells = best.groupby([*rows, "d_model"], sort=False)["accuracy"]
    means, counts = cells.mean().unstack(), cells.size().unstack()
    named = {f"d={width}": means[width] for width in sorted(means.columns)}
    if counts.stack().nunique() > 1:
        named |= {f"runs at d={w}": counts[w].astype("Int64") for w in sorted(counts.columns)}
    return pd.DataFrame(named).reset_index()


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return runs as rows of results.json, which the mechanism figures read."""
    positions = ("key", "query", "value")
    return [
        {
            "architecture": row["architecture"],
            "accuracy": row["accuracy"],
            "mechanism": row["mechanism"],
            "attribution": {p: _number(row[f"attribution_{p}"]) for p in positions},
            "attribution_error": {p: _number(row[f"attribution_error_{p}"]) for p in positions},
        }
        for row in frame.to_dict("records")
    ]


def _number(value: float) -> float | None:
    return None if pd.isna(value) else value

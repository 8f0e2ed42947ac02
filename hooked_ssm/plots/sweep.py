"""The figures of a sweep, from the table of its runs (`hooked_ssm.sweeps.results_table`).

Runs of several seeds give a point at their mean and a bar from the least to the most.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.plots import theme
from hooked_ssm.plots.labels import escape
from hooked_ssm.plots.training import DASHES

POSITIONS = ("key", "query", "value")


@checked
def accuracy_by_width(frame: pd.DataFrame, *, title: str | None = "Accuracy by width") -> go.Figure:
    """Draw accuracy over d_model, a line per architecture; dashes tell numbers of layers apart.

    Args:
        frame: Columns architecture, n_layers, d_model, accuracy, chance; runs at equal
            coordinates are averaged, so choose the learning rate before.
    Raises:
        ShapeError: No rows.
        ConfigError: A column is missing.
    """
    _check(frame, ("architecture", "n_layers", "d_model", "accuracy", "chance"))
    fig = theme.figure(title=escape(title) if title else None, height=460)
    layers = sorted(frame["n_layers"].unique())
    colour = theme.colours(frame["architecture"])
    for (architecture, count), runs in frame.groupby(["architecture", "n_layers"], sort=False):
        words = _depth(count, layers)
        dash = DASHES[layers.index(count) % len(DASHES)]
        line = {"color": colour[architecture], "dash": dash, "width": 2.5}
        fig.add_trace(_line(runs, "d_model", f"{architecture}{words}", line))
    widths = sorted(frame["d_model"].unique())
    fig.update_xaxes(title_text="d_model", type="log", tickvals=widths, ticktext=widths)
    return _accuracy_axis(fig, frame["chance"])


@checked
def accuracy_by_variant(
    frame: pd.DataFrame, *, title: str | None = "Accuracy by variant"
) -> go.Figure:
    """Draw accuracy over variants (such as widths of a convolution), a line per d_model.

    Dashes tell numbers of layers apart.

    Args:
        frame: Columns variant, n_layers, d_model, accuracy, chance, of one architecture. "" is
            "as is".
    Raises:
        ShapeError: No rows.
        ConfigError: A column is missing.
    """
    _check(frame, ("variant", "n_layers", "d_model", "accuracy", "chance"))
    frame = frame.assign(variant=frame["variant"].replace("", "as is").map(escape))
    fig = theme.figure(title=escape(title) if title else None, height=420)
    widths, layers = (sorted(frame[name].unique()) for name in ("d_model", "n_layers"))
    for (width, count), runs in frame.groupby(["d_model", "n_layers"]):
        line = {
            "color": theme.PALETTE[widths.index(width) % len(theme.PALETTE)],
            "dash": DASHES[layers.index(count) % len(DASHES)],
            "width": 2.5,
        }
        fig.add_trace(_line(runs, "variant", f"d_model {width}{_depth(count, layers)}", line))
    order = sorted(frame["variant"].unique(), key=_in_order)
    fig.update_xaxes(type="category", categoryorder="array", categoryarray=order)
    return _accuracy_axis(fig, frame["chance"])


@checked
def attribution_boxes(
    frame: pd.DataFrame, *, title: str | None = "Where the answer is restored"
) -> go.Figure:
    """Draw attribution @ Key, @ Query and @ Value per architecture: a box over its runs.

    The axis ends at -0.5 and 1.5: attributions of unsolved runs are noise and may lie far outside.

    Args:
        frame: Columns architecture, run and attribution_key, attribution_query, attribution_value.
    Raises:
        ShapeError: No rows.
        ConfigError: A column is missing.
    """
    columns = [f"attribution_{position}" for position in POSITIONS]
    _check(frame, ("architecture", "run", *columns))
    fig = theme.figure(title=escape(title) if title else None, height=440)
    for position, column, colour in zip(POSITIONS, columns, theme.PALETTE, strict=False):
        fig.add_box(
            x=frame["architecture"].map(escape),
            y=frame[column],
            name=f"@ {position.title()}",
            text=frame["run"],
            boxpoints="all",
            jitter=0.4,
            pointpos=0,
            marker={"color": colour, "size": 5},
            line_width=1.5,
            hovertemplate=f"%{{x}}, run %{{text}}<br>@ {position.title()} %{{y:.3f}}"
            "<extra></extra>",
        )
    fig.update_layout(boxmode="group", legend={"orientation": "h", "y": 1.08, "x": 0})
    fig.update_xaxes(type="category", showgrid=False)
    return fig.update_yaxes(title_text="attribution", range=[-0.5, 1.5])


@checked
def dev_against_test(
    frame: pd.DataFrame, *, title: str | None = "Pairs asked in training against others"
) -> go.Figure:
    """Draw each run's accuracy on test documents over that on dev documents.

    Args:
        frame: Columns architecture, run, accuracy, dev_accuracy; split and dev_split, if they are
            there, say what the documents are.
    Raises:
        ShapeError: No rows.
        ConfigError: A column is missing.
    """
    _check(frame, ("architecture", "run", "accuracy", "dev_accuracy"))
    fig = theme.figure(title=escape(title) if title else None, height=480)
    dev, test = (_documents(frame, *names) for names in (("dev_split", "dev"), ("split", "test")))
    colour = theme.colours(frame["architecture"])
    diagonal = {"color": theme.INK, "dash": "dot", "width": 1.5}
    fig.add_shape(type="line", x0=0, y0=0, x1=1, y1=1, line=diagonal, layer="below")
    for architecture, runs in frame.groupby("architecture", sort=False):
        fig.add_scatter(
            x=runs["dev_accuracy"],
            y=runs["accuracy"],
            text=runs["run"],
            mode="markers",
            name=escape(architecture),
            marker={"color": colour[architecture], "size": 9},
            hovertemplate=f"run %{{text}}<br>{dev} %{{x:.3f}}<br>{test} %{{y:.3f}}<extra></extra>",
        )
    on_dev, on_test = f"accuracy on {dev}", f"accuracy on {test}"
    fig.update_xaxes(title_text=on_dev, range=[-0.03, 1.05], tickformat=".0%")
    return fig.update_yaxes(title_text=on_test, range=[-0.03, 1.05], tickformat=".0%")


def _documents(frame: pd.DataFrame, column: str, usual: str) -> str:
    """Return the splits that a column names, or the usual one."""
    return " or ".join(sorted(frame[column].dropna().unique())) if column in frame else usual


def _depth(count: Any, layers: Sequence[Any]) -> str:
    """Return how a line's name says its number of layers, where there are several numbers."""
    return f", {count} layer{'s' if count > 1 else ''}" if len(layers) > 1 else ""


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names as people do: conv 2 before conv 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _line(runs: pd.DataFrame, x: str, name: str, line: dict[str, object]) -> go.Scatter:
    points = runs.groupby(x)["accuracy"].agg(["mean", "min", "max", "count"])
    bars = {
        "array": points["max"] - points["mean"],
        "arrayminus": points["mean"] - points["min"],
        "color": line["color"],
        "thickness": 1.5,
    }
    return go.Scatter(
        x=points.index.to_numpy(),
        y=points["mean"].to_numpy(),
        customdata=points["count"].to_numpy(),
        error_y=bars if (points["count"] > 1).any() else None,
        name=escape(name),
        mode="lines+markers",
        line=line,
        marker={"size": 8},
        hovertemplate=f"{escape(name)}<br>{x} %{{x}}<br>accuracy %{{y:.3f}} "
        "(%{customdata} runs)<extra></extra>",
    )


def _accuracy_axis(fig: go.Figure, chance: pd.Series) -> go.Figure:
    fig.update_yaxes(title_text="accuracy", range=[-0.03, 1.05], tickformat=".0%")
    if chance.nunique() == 1:
        guess = float(chance.iloc[0])
        fig.add_hline(
            y=guess,
            line={"color": theme.INK, "dash": "dot", "width": 1.5},
            annotation={"text": f"chance {guess:.1%}", "font": {"color": theme.INK, "size": 12}},
            annotation_position="top right",
        )
    return fig


def _check(frame: pd.DataFrame, columns: Sequence[str]) -> None:
    for name in columns:
        if name not in frame.columns:
            raise ConfigError(
                f"the table has no column {name!r}; it has {', '.join(map(str, frame.columns))}. "
                "Give a table of hooked_ssm.sweeps.results_table"
            )
    if frame.empty:
        raise ShapeError("the table has no rows; expected at least one complete run")

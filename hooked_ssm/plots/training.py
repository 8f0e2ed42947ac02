"""Curves over training, one per run."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.plots import theme
from hooked_ssm.plots.labels import escape
from hooked_ssm.plots.tensors import Number

DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS_UP_TO = 40  # points of a curve that get a marker each


@checked
def accuracy_curve(
    histories: Mapping[str, pd.DataFrame],
    chance: Number | None = None,
    *,
    title: str | None = "Accuracy over training",
) -> go.Figure:
    """Draw accuracy over steps, a line per run; runs of one architecture share its colour.

    Args:
        histories: Name of the run -> frame with columns step, accuracy (and perhaps loss); rows
            without an accuracy are left out.
        chance: The accuracy of guessing, drawn as a dotted line.
    Raises:
        ShapeError: No history, or one without its columns.
    """
    fig = _curves(histories, "accuracy", title)
    fig.update_yaxes(title_text="accuracy", range=[-0.03, 1.05], tickformat=".0%")
    if chance is not None:
        fig.add_hline(
            y=chance,
            line={"color": theme.INK, "dash": "dot", "width": 1.5},
            annotation={
                "text": f"chance {chance:.1%}",
                "font": {"color": theme.INK, "size": 12},
                "xanchor": "right",
            },
            annotation_position="top right",
        )
    return fig


@checked
def loss_curve(
    histories: Mapping[str, pd.DataFrame], *, title: str | None = "Loss over training"
) -> go.Figure:
    """Draw the loss over steps on a log axis, a line per run; as `accuracy_curve` otherwise."""
    fig = _curves(histories, "loss", title)
    return fig.update_yaxes(title_text="loss (log scale)", type="log", dtick="D2", tickformat="~g")


def _curves(histories: Mapping[str, pd.DataFrame], column: str, title: str | None) -> go.Figure:
    if not histories:
        raise ShapeError("histories is empty; expected at least one {name: DataFrame}")
    fig = theme.figure(title=escape(title) if title else None, height=420)
    colour = theme.colours(histories, shared=True)
    used: list[str] = []
    for name, history in histories.items():
        missing = [c for c in ("step", column) if c not in history.columns]
        if missing:
            raise ConfigError(
                f"the history of {name!r} has no column {missing[0]!r}; it has "
                f"{', '.join(map(str, history.columns))}"
            )
        kept = history[["step", column]].dropna()
        dash = DASHES[used.count(colour[name]) % len(DASHES)]
        used.append(colour[name])
        fig.add_scatter(
            x=kept["step"].to_numpy(),
            y=kept[column].to_numpy(),
            name=escape(name),
            mode="lines+markers" if len(kept) <= MARKERS_UP_TO else "lines",
            line={"color": colour[name], "dash": dash, "width": 2.5},
            marker={"size": 5},
            hovertemplate=f"{escape(name)}<br>step %{{x}}<br>{column} %{{y:.4g}}<extra></extra>",
        )
    fig.update_layout(showlegend=True)  # a single run's name too
    return fig.update_xaxes(title_text="step", rangemode="tozero")

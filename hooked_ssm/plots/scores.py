"""Bars of detection scores per head or channel group, and the loss at each position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.plots import theme
from hooked_ssm.plots.labels import escape, listing

COLUMNS = ("layer", "unit", "index", "score", "error", "chance")


@checked
def score_bars(
    frame: pd.DataFrame,
    *,
    units: Sequence[str] = ("head", "group"),
    title: str | None = "Detection scores",
) -> go.Figure:
    """Draw a bar per head or channel group, layer by layer, with standard errors and chance.

    Where the frame has them, the causal score (probability lost without that mixing) and that of
    its resampled control stand beside it.

    Args:
        frame: `DetectionScores.frame`.
        units: Which rows: "head", "group", "channel", "layer".
    Raises:
        ConfigError: The frame lacks a column.
        ShapeError: It has no such rows.
    """
    missing = [c for c in COLUMNS if c not in frame.columns]
    if missing:
        raise ConfigError(
            f"the frame has no column {listing(missing)}; it has {', '.join(frame.columns)}. Pass "
            "the frame of detection scores"
        )
    rows = frame[frame["unit"].isin(list(units))]
    if rows.empty:
        raise ShapeError(f"no row of unit {listing(list(units))}: there is nothing to draw")
    fig = theme.figure(title=escape(title) if title else None, height=400)
    labels = [f"L{row.layer} {row.unit} {row.index}" for row in rows.itertuples(index=False)]
    series = [("by pattern", "score", "error"), ("lost without it", "drop", "drop_error")]
    series.append(("lost without others", "control_drop", "control_error"))
    for (name, column, error), colour in zip(series, theme.PALETTE, strict=False):
        if column not in rows:
            continue
        fig.add_bar(
            x=labels,
            y=rows[column].to_numpy(),
            name=name,
            offsetgroup=name,
            error_y={"array": rows[error].to_numpy(), "color": theme.INK},
            marker={"color": colour},
            hovertemplate=f"%{{x}}<br>{name} %{{y:.3f}}<extra></extra>",
        )
    fig.add_scatter(
        x=labels,
        y=rows["chance"].to_numpy(),
        name="chance (uniform pattern)",
        mode="markers",
        offsetgroup="by pattern",  # which is what it is the chance of
        marker={"symbol": "line-ew-open", "size": 36, "color": theme.INK},
        hovertemplate="chance %{y:.3f}<extra></extra>",
    )
    fig.update_layout(
        barmode="group",
        scattermode="group",
        bargap=0.25,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
    )
    fig.update_xaxes(type="category", showgrid=False)
    return fig.update_yaxes(title_text="score", zeroline=True)


@checked
def loss_by_position(
    curves: Mapping[str, pd.DataFrame], *, title: str | None = "Loss at each position"
) -> go.Figure:
    """Draw the loss at each position, a line per model with its standard error as a band.

    Args:
        curves: Name -> frame with columns position, loss, error (`LossCurve.frame`).
    Raises:
        ShapeError: There is no curve.
    """
    if not curves:
        raise ShapeError("curves is empty; expected at least one {name: DataFrame}")
    fig = theme.figure(title=escape(title) if title else None, height=420)
    colour = theme.colours(curves)
    for name, frame in curves.items():
        x, loss, error = (frame[c].to_numpy() for c in ("position", "loss", "error"))
        line = {"color": colour[name], "width": 2.5}
        for edge, fill in ((loss - error, None), (loss + error, "tonexty")):
            fig.add_scatter(
                x=x, y=edge, mode="lines", line={"width": 0, "color": colour[name]}, fill=fill,
                opacity=0.3, showlegend=False, hoverinfo="skip",
            )  # fmt: skip
        fig.add_scatter(
            x=x,
            y=loss,
            name=escape(name),
            mode="lines",
            line=line,
            hovertemplate=f"{escape(name)}<br>position %{{x}}<br>loss %{{y:.4g}}<extra></extra>",
        )
    fig.update_xaxes(title_text="position", rangemode="tozero")
    return fig.update_yaxes(title_text="loss", rangemode="tozero")

"""How models solve a recall task: attributions by position, architecture and site.

Rows are those of results.json: {"architecture", "accuracy", "attribution": {"key", "query",
"value"}, "mechanism"}; "@ Value" and so on name the position at which one activation of the
original run was restored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import plotly.graph_objects as go

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.plots import theme
from hooked_ssm.plots.labels import escape, fixed

Row: TypeAlias = Mapping[str, Any]
XAxis: TypeAlias = Literal["query", "key+query"]

POSITIONS = ("key", "query", "value")
SOLVED_FROM = 0.9  # accuracy, for rows that carry no verdict
MOST_WITH_NUMBERS = 6  # architectures whose bars have room for a number each
LOW, HIGH = -0.2, 1.2  # the ends of both axes: attributions of unsolved runs may lie far outside
CUT = (-0.4, 1.4)  # where bars are cut, for the same reason

REGIONS: dict[str, list[tuple[str, float, float, float, float]]] = {
    # name, x from, x to, y from, y to
    "query": [
        ("induction", -0.15, 0.25, 0.75, 1.15),
        ("direct retrieval, late", -0.15, 0.25, -0.15, 0.25),
        ("direct retrieval, early", 0.75, 1.15, -0.15, 0.25),
    ],
    "key+query": [
        ("induction", -0.15, 0.25, 0.75, 1.15),
        ("direct retrieval", 0.75, 1.15, -0.15, 0.25),
    ],
}


@checked
def mechanism_scatter(
    rows: Sequence[Row],
    *,
    x: XAxis = "query",
    title: str | None = "How each model recalls",
) -> go.Figure:
    """Draw each run by its attribution @ Value (up) and @ Query (across).

    Colour is the architecture, a circle is a solved run, a cross an unsolved one. Runs outside
    -0.2..1.2 (noise of unsolved runs) are drawn at the edge, without error bars, and a note says
    how many; hovering gives their values. Where runs lie on one spot, the markers of later
    architectures are smaller, so that all show.

    Args:
        rows: Rows of results.json; "attribution_error" in the shape of "attribution" adds bars.
        x: "query", or "key+query" for the sum, which is near 1 for direct retrieval of either kind.
    Raises:
        ConfigError: Another `x`, or a row without its entries.
    """
    _check(rows)
    fig = theme.figure(title=escape(title) if title else None, height=520)
    for name, x0, x1, y0, y1 in REGIONS[x]:
        _region(fig, name, (x0, x1), (y0, y1))
    groups = _by_architecture(rows)
    colour = theme.colours(groups)
    for i, (architecture, runs) in enumerate(groups.items()):
        # runs of several architectures often coincide: the later ones are smaller, so all show
        size = max(20 - 3 * i, 8)
        fig.add_trace(_scatter(architecture, runs, x, colour[architecture], size))
    if any(_solved(r) for r in rows) and not all(_solved(r) for r in rows):
        _shape_legend(fig)
    outside, missing = sum(_off_scale(r, x) for r in rows), sum(_is_missing(r, x) for r in rows)
    notes = []
    if outside:
        verb = "lies" if outside == 1 else "lie"
        notes.append(f"{outside} of {len(rows)} runs {verb} outside, drawn at the edge")
    if missing:
        notes.append(f"{missing} of {len(rows)} runs without attributions")
    if notes:
        _note(fig, "; ".join(notes))
    words = " + ".join(f"@ {part.title()}" for part in x.split("+"))
    fig.update_xaxes(title_text=f"attribution {words}", range=[LOW, HIGH], dtick=0.25)
    fig.update_yaxes(title_text="attribution @ Value", range=[LOW, HIGH], dtick=0.25)
    # the zero lines would run through the regions and their names
    fig.update_xaxes(zeroline=False).update_yaxes(zeroline=False)
    return fig.update_layout(legend_itemsizing="constant")


@checked
def attribution_bars(
    rows: Sequence[Row], *, title: str | None = "Where the answer is restored"
) -> go.Figure:
    """Draw attribution @ Key, @ Query and @ Value per architecture, as grouped bars.

    Several runs of one architecture give their mean, with bars from the least to the most.
    Architectures of which no run is solved are hatched: their attributions are noise. Bars are cut
    at -0.4 and 1.4; numbers on them, and hovering, give their values.

    Raises:
        ConfigError: A row without its entries.
    """
    _check(rows)
    groups = _by_architecture(rows)
    solved = {a: any(_solved(r) for r in runs) for a, runs in groups.items()}
    labels = [escape(a) if solved[a] else f"{escape(a)}<br>(unsolved)" for a in groups]
    fig = theme.figure(title=escape(title) if title else None, height=420)
    several = any(len(runs) > 1 for runs in groups.values())
    for position, colour in zip(POSITIONS, theme.PALETTE, strict=False):
        values = [_measured(runs, position) for runs in groups.values()]
        mean = np.array([np.mean(v) for v in values])
        cut = (mean < CUT[0]) | (mean > CUT[1])
        ends = [(max(v), min(v)) for v in values]
        spread = {
            "array": np.where(cut, 0, [most for most, _ in ends] - mean),
            "arrayminus": np.where(cut, 0, mean - [least for _, least in ends]),
            "color": theme.INK,
        }
        fig.add_bar(
            x=labels,
            y=np.clip(mean, *CUT),
            customdata=mean,
            name=f"@ {position.title()}",
            marker={
                "color": colour,
                "pattern": {"shape": ["" if s else "/" for s in solved.values()]},
            },
            error_y=spread if several else None,
            # beside bars of spread, or on bars narrower than it, a number is not legible
            text=None
            if several or len(groups) > MOST_WITH_NUMBERS
            else ["–" if np.isnan(m) else fixed(m, 2) for m in mean],
            textposition="outside",
            textfont={"size": 11},
            textangle=0,
            hovertemplate=f"%{{x}}<br>@ {position.title()}: %{{customdata:.3f}}<extra></extra>",
        )
    fig.update_layout(barmode="group", bargap=0.3, legend={"orientation": "h", "y": 1.08, "x": 0})
    fig.update_xaxes(type="category", showgrid=False)
    if any((bar.y != bar.customdata)[~np.isnan(bar.y)].any() for bar in fig.data):
        _note(fig, "longer bars of unsolved runs are cut")
    low, high = _bar_range(fig)
    return fig.update_yaxes(title_text="attribution", range=[low, high], zeroline=True)


def _check(rows: Sequence[Row]) -> None:
    if not rows:
        raise ShapeError("rows is empty; expected at least one row of results.json")
    for i, row in enumerate(rows):
        missing = [k for k in ("architecture", "attribution") if k not in row]
        missing += [p for p in POSITIONS if not missing and p not in row["attribution"]]
        if "mechanism" not in row and "accuracy" not in row:
            missing.append("mechanism (or accuracy)")
        if missing:
            raise ConfigError(
                f"row {i} has no {missing[0]!r}; it has {', '.join(row)}. Rows are those of "
                'results.json: "architecture", "accuracy", "attribution": {"key", "query", '
                '"value"}, "mechanism"'
            )


def _solved(row: Row) -> bool:
    verdict = row.get("mechanism")
    return verdict != "unsolved" if verdict else float(row["accuracy"]) >= SOLVED_FROM


def _by_architecture(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row["architecture"]), []).append(row)
    return groups


def _attribution(row: Row, what: str) -> float:
    """Sum the attributions of "query" or "key+query"; NaN if one was not measured."""
    parts = [row["attribution"][p] for p in what.split("+")]
    return math.nan if None in parts else float(sum(parts))


def _measured(runs: Sequence[Row], position: str) -> list[float]:
    """Return the attributions that were measured; one NaN if none was."""
    values = [_attribution(r, position) for r in runs]
    return [v for v in values if not math.isnan(v)] or [math.nan]


def _error(row: Row, what: str) -> float:
    """Standard error of a sum of independent attributions; 0 where the row carries none."""
    errors = row.get("attribution_error") or {}
    return math.sqrt(sum(float(errors.get(p) or 0) ** 2 for p in what.split("+")))


def _is_missing(row: Row, x: XAxis) -> bool:
    return any(math.isnan(_attribution(row, axis)) for axis in (x, "value"))


def _off_scale(row: Row, x: XAxis) -> bool:
    shares = [_attribution(row, axis) for axis in (x, "value")]
    return not _is_missing(row, x) and any(not LOW <= share <= HIGH for share in shares)


def _scatter(
    architecture: str, runs: Sequence[Row], x: XAxis, colour: str, size: int
) -> go.Scatter:
    xs = [_attribution(r, x) for r in runs]
    ys = [_attribution(r, "value") for r in runs]
    trace = go.Scatter(
        x=np.clip(xs, LOW + 0.02, HIGH - 0.02),
        y=np.clip(ys, LOW + 0.02, HIGH - 0.02),
        mode="markers",
        name=escape(architecture),
        customdata=[_hover(r) for r in runs],
        hovertemplate="%{customdata}<extra></extra>",
        marker={
            "color": colour,
            "size": size,
            "symbol": ["circle" if _solved(r) else "x" for r in runs],
            "line": {"color": "#ffffff", "width": 1},
        },
    )
    if any("attribution_error" in r for r in runs):
        bars = {"color": colour, "thickness": 1.5, "width": 3}
        inside = [not _off_scale(r, x) for r in runs]
        errors = zip(runs, inside, strict=True)
        pairs = [(_error(r, x), _error(r, "value")) if fits else (0, 0) for r, fits in errors]
        trace.error_x = {"array": [across for across, _ in pairs], **bars}
        trace.error_y = {"array": [up for _, up in pairs], **bars}
    return trace


def _hover(row: Row) -> str:
    head = escape(row["architecture"])
    if row.get("mechanism"):
        head += f": {escape(row['mechanism'])}"
    lines = [head]
    if "accuracy" in row:
        lines.append(f"accuracy {float(row['accuracy']):.1%}")
    lines += [f"@ {p.title()} {_attribution(row, p):.3f}" for p in POSITIONS]
    return "<br>".join(lines)


def _region(fig: go.Figure, name: str, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Shade where a mechanism puts its runs, its name just inside the plot beside it."""
    fig.add_shape(
        type="rect",
        x0=x[0],
        x1=x[1],
        y0=y[0],
        y1=y[1],
        layer="below",
        line={"color": theme.INK, "width": 1, "dash": "dot"},
        fillcolor="rgba(127,127,127,0.12)",
    )
    top = y[0] > 0.5
    fig.add_annotation(
        x=x[0] if x[0] < 0.5 else x[1],
        y=y[0] if top else y[1],
        xanchor="left" if x[0] < 0.5 else "right",
        yanchor="top" if top else "bottom",
        align="left" if x[0] < 0.5 else "right",
        text=name,
        showarrow=False,
    )


def _note(fig: go.Figure, text: str) -> None:
    """Write above the plot, at its right end."""
    fig.add_annotation(
        text=text,
        showarrow=False,
        font_size=12,
        xref="paper",
        yref="paper",
        x=1,
        y=1,
        xanchor="right",
        yanchor="bottom",
    )


def _shape_legend(fig: go.Figure) -> None:
    for name, symbol in (("solved", "circle"), ("unsolved", "x")):
        fig.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=name,
            marker={"color": theme.INK, "symbol": symbol, "size": 10},
            legendgroup="shape",
            legendgrouptitle={"text": "task"},
            hoverinfo="skip",
        )


def _bar_range(fig: go.Figure) -> list[float]:
    """Fit the bars, with room for the numbers at their ends."""
    values = np.concatenate([bar.y for bar in fig.data])
    low, high = np.nanmin(values, initial=0.0), np.nanmax(values, initial=1.0)
    return [float(low) - 0.1 if low < -0.02 else -0.05, float(high) + 0.15]

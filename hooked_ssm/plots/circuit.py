"""A circuit as a graph: parts of the model from the embedding up to the logits, edges by score."""

from __future__ import annotations

import re
from collections.abc import Sequence

import plotly.graph_objects as go

from hooked_ssm.checks import checked
from hooked_ssm.errors import ShapeError
from hooked_ssm.plots import theme
from hooked_ssm.plots.labels import escape

_PLACE = re.compile(r"^(\w+) (\d+)(?:\.(\d+))?$")
WIDEST = 7.0
BOX = {  # reads on light and dark pages, and over the edges that end at it
    "showarrow": False,
    "bgcolor": "#4a5058",
    "bordercolor": "#4a5058",
    "borderpad": 4,
    "font": {"color": "#ffffff", "size": 12},
}
BEND = 0.18  # how far an edge that skips levels bows out, so that it passes the nodes between


@checked
def circuit_graph(
    edges: Sequence[tuple[str, str, float]], *, title: str | None = None, height: int | None = None
) -> go.Figure:
    """Draw edges between parts of a model; width is |score|, blue is positive, red negative.

    Args:
        edges: (sender, receiver, score); parts are "embed", "logits", "mixer 0", "mlp 1", or
            "head 0.1" (head 1 of the mixer in layer 0). An edge into a mixer that is drawn head by
            head ends at each of its heads.

    Raises:
        ShapeError: No edges.
    """
    if not edges:
        raise ShapeError("edges is empty: a circuit without edges has nothing to draw")
    lines = _towards_heads(edges)
    places = _places(list(dict.fromkeys(part for line in lines for part in line[:2])))
    most = max(abs(score) for _, _, score in lines) or 1.0
    fig = theme.figure(title=escape(title) if title else None)
    for sender, receiver, score in sorted(lines, key=lambda line: abs(line[2])):
        fig.add_trace(_line(sender, receiver, score, score / most, places))
    reach = [x for line in fig.data for x in line.x]
    names = [escape(part) for part in places]
    xs, ys = zip(*places.values(), strict=True)
    fig.add_scatter(x=xs, y=ys, text=names, mode="markers", hoverinfo="text", name="parts")
    for x, y, name in zip(xs, ys, names, strict=True):
        fig.add_annotation(x=x, y=y, text=name, **BOX)
    levels = len({y for _, y in places.values()})
    fig.update_layout(showlegend=False, height=height or min(140 + 64 * levels, 1400))
    fig.update_xaxes(visible=False, range=[min(reach) - 0.4, max(reach) + 0.4])
    return fig.update_yaxes(visible=False, range=[-0.4, levels - 0.6])


def _towards_heads(edges: Sequence[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    """Let what a mixer reads end at its heads, where those are what is drawn of it."""
    heads: dict[str, list[str]] = {}
    for sender, _, _ in edges:
        found = _PLACE.match(sender)
        if found and found[1] == "head":
            own = heads.setdefault(f"mixer {found[2]}", [])
            own += [] if sender in own else [sender]
    return [
        (sender, end, score)
        for sender, receiver, score in edges
        for end in heads.get(receiver, [receiver])
    ]


def _level(part: str) -> float:
    if part == "embed":
        return -1.0
    found = _PLACE.match(part)
    return float("inf") if found is None else 2.0 * int(found[2]) + (found[1] == "mlp")


def _places(parts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Where each part stands: one level per mixer or MLP, heads side by side."""
    levels = sorted({_level(part) for part in parts})
    places = {}
    for y, level in enumerate(levels):
        here = sorted(part for part in parts if _level(part) == level)
        for i, part in enumerate(here):
            places[part] = (i - (len(here) - 1) / 2, float(y))
    return places


def _line(
    sender: str,
    receiver: str,
    score: float,
    share: float,
    places: dict[str, tuple[float, float]],
) -> go.Scatter:
    (x0, y0), (x1, y1) = places[sender], places[receiver]
    bow = BEND * (abs(y1 - y0) - 1) * (-1 if (int(y0) + int(y1)) % 2 else 1)
    bow *= 1.0 if x0 == x1 else 0.4
    return go.Scatter(
        x=[x0, (x0 + x1) / 2 + bow, x1],
        y=[y0, (y0 + y1) / 2, y1],
        mode="lines",
        line={
            "shape": "spline",
            "width": max(0.5, WIDEST * abs(share)),
            "color": theme.POSITIVE if score >= 0 else theme.NEGATIVE,
        },
        opacity=0.75,
        hoverinfo="text",
        text=f"{escape(sender)} → {escape(receiver)}: {score:.4g}",
        name=f"{escape(sender)} → {escape(receiver)}",
    )

"""One look for every figure: colours, fonts and a template that each figure is given.

The template is passed per figure; plotly's global default is never touched. Paper and plot are
transparent and the ink is a mid grey that reads on white (4.5:1) and on near black (4.6:1), so
that one figure serves light and dark pages.

Colours:
    Categories: Okabe & Ito 2008, made for colour-blind readers; black is left out (invisible on
        dark), yellow is darkened (invisible on white), three of Tol 2021 follow.
    Signed values: ColorBrewer RdBu, red below zero, near white at zero, blue above.
    0..1 values: viridis, perceptually uniform.
"""

from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go

INK = "#767676"
FAINT = "rgba(127,127,127,0.25)"
GAP = "rgba(127,127,127,0.35)"  # behind heatmap cells: a missing cell is not a near-white zero
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

NEGATIVE, POSITIVE = "#b2182b", "#2166ac"

DIVERGING = [
    [0.0, "#67001f"],
    [0.1, NEGATIVE],
    [0.2, "#d6604d"],
    [0.3, "#f4a582"],
    [0.4, "#fddbc7"],
    [0.5, "#f7f7f7"],
    [0.6, "#d1e5f0"],
    [0.7, "#92c5de"],
    [0.8, "#4393c3"],
    [0.9, POSITIVE],
    [1.0, "#053061"],
]
SEQUENTIAL = [
    [0.0, "#440154"],
    [0.111, "#482878"],
    [0.222, "#3e4989"],
    [0.333, "#31688e"],
    [0.444, "#26828e"],
    [0.556, "#1f9e89"],
    [0.667, "#35b779"],
    [0.778, "#6ece58"],
    [0.889, "#b5de2b"],
    [1.0, "#fde725"],
]

PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#999999",
    "#BFA900",
    "#AA4499",
    "#44AA99",
)

# An architecture keeps its colour from figure to figure.
ARCHITECTURE_COLOURS = {
    "attention": "#0072B2",
    "based": "#56B4E9",
    "base_conv": "#999999",
    "mamba": "#D55E00",
    "mamba2": "#E69F00",
    "hyena": "#CC79A7",
    "h3": "#AA4499",
    "delta_net": "#009E73",
    "gated_delta_net": "#44AA99",
    "gla": "#BFA900",
}


def _axis(**more: object) -> dict[str, object]:
    return {
        "color": INK,
        "linecolor": INK,
        "gridcolor": FAINT,
        "zerolinecolor": INK,
        "zerolinewidth": 1,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": INK,
        "automargin": True,
        "title": {"standoff": 12},
        **more,
    }


_COLOUR_BAR = {
    "outlinewidth": 0,
    "thickness": 14,
    "ypad": 0,
    "ticksuffix": "\u2003",  # keeps the title off the tick labels
    "tickcolor": INK,
    "tickfont": {"color": INK},
    "title": {"side": "right", "font": {"color": INK}},
}

TEMPLATE = go.layout.Template(
    layout={
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13, "color": INK},
        "title": {"font": {"size": 16}, "x": 0.01, "xanchor": "left", "yref": "container"},
        "colorway": list(PALETTE),
        "margin": {"l": 64, "r": 24, "t": 64, "b": 56},
        "xaxis": _axis(),
        "yaxis": _axis(),
        "coloraxis": {"colorbar": _COLOUR_BAR},
        "legend": {"bgcolor": "rgba(0,0,0,0)", "font": {"color": INK}},
        "hoverlabel": {
            "bgcolor": "#222222",
            "bordercolor": "#222222",
            "font": {"family": FONT, "size": 13, "color": "#ffffff"},
            "align": "left",
        },
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": PALETTE[0]},
    },
    data={"heatmap": [{"colorbar": _COLOUR_BAR, "xgap": 1, "ygap": 1, "hoverongaps": False}]},
)


def architecture_of(name: str) -> str | None:
    """Return the architecture a run's name starts with, if any: "Mamba, seed 1" -> "mamba"."""
    key = name.strip().lower().replace(" ", "_").replace("-", "_")
    if key.startswith("baseconv"):
        key = key.replace("baseconv", "base_conv", 1)
    fitting = [a for a in ARCHITECTURE_COLOURS if key.startswith(a)]
    return max(fitting, key=len, default=None)


def colours(names: Iterable[str], *, shared: bool = False) -> dict[str, str]:
    """Return a colour per name: an architecture's own, or the next of the palette still free.

    Args:
        shared: Whether all names of an architecture have its colour, as where dashes tell them
            apart; else the first one has it.
    """
    names = list(dict.fromkeys(names))
    chosen: dict[str, str] = {}
    for name in names:
        own = ARCHITECTURE_COLOURS.get(architecture_of(name) or "")
        if own and (shared or own not in chosen.values()):
            chosen[name] = own
    free = [c for c in PALETTE if c not in chosen.values()] or list(PALETTE)
    others = [n for n in names if n not in chosen]
    chosen.update({n: free[i % len(free)] for i, n in enumerate(others)})
    return {n: chosen[n] for n in names}


def figure(*, title: str | None = None, height: int | None = None) -> go.Figure:
    """Return an empty figure in the house look."""
    return styled(go.Figure(), title=title, height=height)


def styled(fig: go.Figure, *, title: str | None = None, height: int | None = None) -> go.Figure:
    """Give `fig` the house look, a title and a height, and return it."""
    fig.update_layout(template=TEMPLATE, height=height)
    if title:
        fig.update_layout(title_text=title)
    else:
        fig.update_layout(margin_t=32)
    return fig

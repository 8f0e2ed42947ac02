"""Token-mixing patterns: which key position each query position reads, per head or channel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hooked_ssm.errors import ConfigError
from hooked_ssm.plots import theme
from hooked_ssm.plots.heatmap import (
    WIDTH,
    category_axis,
    colour_scale,
    heat_trace,
    shared_colour_axis,
    side_by_side,
)
from hooked_ssm.plots.labels import Labels, checked, escape, token_labels
from hooked_ssm.plots.tensors import ArrayLike, Limits, with_axes

HEIGHTS = (430, 330, 250, 220, 190)  # pixels of a row of so many facets
AXES = ["[query_pos key_pos]", "[head query_pos key_pos]"]


def pattern(
    pattern: ArrayLike,
    tokens: Labels | None = None,
    *,
    signed: bool | None = None,
    names: Sequence[str] | None = None,
    kind: str = "head",
    most: int = 6,
    title: str | None = None,
    range: Limits | None = None,
) -> go.Figure:
    """Draw a token-mixing pattern, queries down, keys across, one facet per head or channel.

    Args:
        pattern: [query_pos key_pos] or [head query_pos key_pos]; signed values keep their sign.
        tokens: The document's tokens. [pos]
        signed: A diverging scale centred at zero; if None, when any value is negative.
        names: Titles of the facets; "head 0", ... if None.
        kind: What a facet is: "head" or "channel".
        most: At most so many facets, the first ones; the title says how many are left out.
        range: The values at the ends of the scale; from the values if None.
    Raises:
        ShapeError: The pattern has other axes, or tokens or names do not fit.
    """
    z = with_axes(pattern, AXES, "pattern")
    z = z[None] if z.ndim == 2 else z
    if most < 1:
        raise ConfigError(f"most is {most}; expected at least 1 facet")
    titles = [f"{kind} {i}" for i, _ in enumerate(z)]
    titles = titles if names is None else checked(names, len(z), "names")
    shown = z[:most]
    signed = bool((z < 0).any()) if signed is None else signed
    fig = _facets(shown, tokens, titles[:most] if len(z) > 1 or names else None)
    scale = colour_scale(shown, zero_centred=signed, limits=range)
    colours = shared_colour_axis(scale, "weight", fig.layout.height)
    fig.update_layout(coloraxis=colours, plot_bgcolor=theme.GAP)
    if len(shown) < len(z):
        left_out = f"the first {len(shown)} of {len(z)} {kind}s"
        title = f"{title} ({left_out})" if title else left_out.capitalize()
    return fig.update_layout(title_text=escape(title), margin_t=72) if title else fig


def _facets(z: np.ndarray, tokens: Labels | None, titles: Sequence[str] | None) -> go.Figure:
    """One square heatmap per head. z: [head query_pos key_pos]"""
    most = 3 if z.shape[2] > 8 else 5
    across = side_by_side(titles or [""] * len(z), z.shape[2], most=most)
    down = math.ceil(len(z) / across)
    keys = token_labels(tokens, z.shape[2])
    # with fewer queries than keys (one decoding step, say) the queries are the last positions
    queries = keys[-z.shape[1] :] if z.shape[1] <= z.shape[2] else token_labels(None, z.shape[1])
    fig = make_subplots(
        rows=down,
        cols=across,
        shared_xaxes="all",
        shared_yaxes="all",
        subplot_titles=[escape(t) for t in titles] if titles else None,
        horizontal_spacing=0.04,
        vertical_spacing=min(0.1, 0.3 / down),
    )
    theme.styled(fig, height=130 + down * HEIGHTS[across - 1])
    fig.update_layout(margin_t=48 if titles else 32)
    for i, matrix in enumerate(z):
        trace = heat_trace(matrix, queries, keys, names=("query", "key", "weight"), text=False)
        trace.update(coloraxis="coloraxis")
        fig.add_trace(trace, row=i // across + 1, col=i % across + 1)
    fig.update_xaxes(category_axis(None, WIDTH / across / z.shape[2]), constrain="domain")
    room = (HEIGHTS[across - 1] - 50) / z.shape[1]
    fig.update_yaxes(category_axis(None, room), autorange="reversed", constrain="domain")
    for i, _ in enumerate(z):
        row, col = i // across + 1, i % across + 1
        lowest = i + across >= len(z)
        fig.update_xaxes(showticklabels=lowest, row=row, col=col)
        fig.update_xaxes(title_text="key position" if lowest else None, row=row, col=col)
    fig.update_yaxes(title_text="query position", col=1)
    if len(z) == 1 and z.shape[1] == z.shape[2]:
        fig.update_yaxes(scaleanchor="x")  # facets are linked in zoom instead; both is not possible
    return fig.update_annotations(font_size=13, yshift=4)

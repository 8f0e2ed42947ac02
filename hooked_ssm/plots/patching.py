"""Patching results: one heatmap of layer by position, or one per site."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hooked_ssm.errors import ShapeError
from hooked_ssm.plots import theme
from hooked_ssm.plots.heatmap import (
    WIDTH,
    category_axis,
    colour_scale,
    heat_trace,
    height_for,
    labelled_heatmap,
    shared_colour_axis,
    side_by_side,
)
from hooked_ssm.plots.labels import Labels, axis_labels, checked, escape, token_labels
from hooked_ssm.plots.tensors import ArrayLike, Limits, with_axes

WIDE = 24  # positions from which small multiples are stacked, not set side by side


def patching_heatmap(
    values: ArrayLike | Mapping[str, ArrayLike],
    tokens: Labels | None = None,
    sites: Sequence[str] | None = None,
    *,
    layers: Labels | None = None,
    title: str | None = None,
    value_name: str = "effect",
    x_title: str = "position",
    range: Limits | None = None,
) -> go.Figure:
    """Draw the effect of patching each layer at each position, on a scale centred at zero.

    Args:
        values: [layer pos]; or one such matrix per site, [site layer pos], or a mapping from site
            to matrix: small multiples with one shared colour bar.
        tokens: The document's tokens, to label the positions. [pos]
        sites: Names of the sites, the titles of the small multiples; needed for [site layer pos].
        layers: Labels of the layers; indices if None.
        range: The values at the ends of the scale, widened to be symmetric.
    Raises:
        ShapeError: The values have other axes, or labels that do not fit.
    """
    if isinstance(values, Mapping):
        sites = list(values)
        values = np.stack([with_axes(v, ["[layer pos]"], k) for k, v in values.items()])
    z = with_axes(values, ["[layer pos]", "[site layer pos]"], "values")
    cols = token_labels(tokens, z.shape[-1])
    if z.ndim == 2 or (sites is not None and len(sites) == len(z) == 1):
        z = z if z.ndim == 2 else z[0]
        return labelled_heatmap(
            z,
            axis_labels(layers, z.shape[0], "layers"),
            cols,
            title=title or (sites[0] if sites else None),
            titles=("layer", x_title, value_name),
            limits=range,
        )
    if sites is None:
        raise ShapeError(
            f"values has shape {list(z.shape)}, [site layer pos], but sites is None; pass the "
            f"names of the {len(z)} sites"
        )
    rows = axis_labels(layers, z.shape[1], "layers")
    fig = _multiples(z, rows, cols, checked(sites, len(z), "sites"), (x_title, value_name))
    scale = colour_scale(z, zero_centred=True, limits=range)
    colours = shared_colour_axis(scale, value_name, fig.layout.height)
    fig.update_layout(coloraxis=colours, plot_bgcolor=theme.GAP)
    return fig.update_layout(title_text=escape(title)) if title else fig


def _multiples(
    z: np.ndarray,
    rows: Sequence[str],
    cols: Sequence[str],
    sites: Sequence[str],
    words: tuple[str, str],
) -> go.Figure:
    """One small heatmap per site. z: [site layer pos]"""
    x_title, value_name = words
    across = 1 if len(cols) >= WIDE else side_by_side(sites, len(cols))
    down = math.ceil(len(sites) / across)
    fig = make_subplots(
        rows=down,
        cols=across,
        shared_xaxes=True,
        shared_yaxes=True,
        subplot_titles=[escape(s) for s in sites],
        horizontal_spacing=0.03,
        vertical_spacing=min(0.12, 0.3 / down),
    )
    tall = height_for(len(rows), row=18, least=170)
    theme.styled(fig, title=" ", height=100 + down * tall)
    for i, matrix in enumerate(z):
        trace = heat_trace(matrix, rows, cols, names=("layer", x_title, escape(value_name)))
        # small cells: the printed values would overlap
        trace.update(coloraxis="coloraxis", texttemplate=None)
        fig.add_trace(trace, row=i // across + 1, col=i % across + 1)
    fig.update_xaxes(category_axis(None, WIDTH / across / len(cols)))
    fig.update_yaxes(category_axis(None, (tall - 60) / len(rows)), autorange="reversed")
    for col in range(1, across + 1):
        lowest = down if (down - 1) * across + col <= len(sites) else down - 1
        fig.update_xaxes(title_text=x_title, showticklabels=True, row=lowest, col=col)
    fig.update_yaxes(title_text="layer", col=1)
    return fig.update_annotations(font_size=13, yshift=4)

"""A heatmap of any matrix, and the parts that the other heatmaps share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.plots import theme
from hooked_ssm.plots.labels import Labels, axis_labels, escape
from hooked_ssm.plots.tensors import ArrayLike, Limits, with_axes

MAX_CELLS_WITH_TEXT = 200
MAX_CELLS_WITH_GAPS = 4_000  # beyond it the lines between the cells only cost time
ROW_HEIGHT = 28
MARGINS = 170  # pixels of a figure's height that are not cells
WIDTH = 640  # pixels for the cells of a figure in a narrow notebook
LEAST_ROOM = 11  # pixels in which a label can stand, turned by 90 degrees
LONGEST_BAR = 260


def heatmap(
    values: ArrayLike,
    *,
    rows: Labels | None = None,
    cols: Labels | None = None,
    title: str | None = None,
    x_title: str | None = None,
    y_title: str | None = None,
    value_name: str = "value",
    zero_centred: bool = True,
    range: Limits | None = None,
    text: bool | Literal["auto"] = "auto",
    hover: Sequence[Sequence[str]] | np.ndarray | None = None,
) -> go.Figure:
    """Draw a matrix, first row on top; hovering shows row, column and value.

    Args:
        values: The matrix; NaN and infinite cells are gaps. [row col]
        rows, cols: Labels; indices if None. Repeated labels get their index.
        value_name: What a value is: the title of the colour bar.
        zero_centred: A diverging scale, symmetric about zero; else a sequential one.
        range: The values at the ends of the scale, widened to be symmetric if zero_centred; from
            the values if None.
        text: The value printed in each cell; "auto" does so up to 200 cells, which is also the
            most that True allows.
        hover: One more line of hover text per cell. [row col]
    Raises:
        ShapeError: `values` is no matrix, or labels or hover texts do not fit it.
    """
    z = with_axes(values, ["[row col]"], "values")
    return labelled_heatmap(
        z,
        axis_labels(rows, z.shape[0], "rows"),
        axis_labels(cols, z.shape[1], "cols"),
        title=title,
        titles=(y_title, x_title, value_name),
        zero_centred=zero_centred,
        limits=range,
        text=text,
        hover=hover,
    )


def labelled_heatmap(
    z: np.ndarray,
    rows: Sequence[str],
    cols: Sequence[str],
    *,
    title: str | None,
    titles: tuple[str | None, str | None, str],
    zero_centred: bool = True,
    limits: Limits | None = None,
    text: bool | Literal["auto"] = "auto",
    hover: Sequence[Sequence[str]] | np.ndarray | None = None,
) -> go.Figure:
    """Draw a matrix with labels that are escaped already; titles are of y axis, x axis, values."""
    y_title, x_title, value_name = titles
    names = (escape(y_title or "row"), escape(x_title or "col"), escape(value_name))
    trace = heat_trace(z, rows, cols, names=names, text=text, hover=hover)
    trace.update(colour_scale(z, zero_centred=zero_centred, limits=limits))
    height = height_for(z.shape[0])
    trace.update(colorbar=colour_bar(value_name, height))
    fig = theme.figure(title=escape(title) if title else None, height=height)
    fig.add_trace(trace)
    fig.update_layout(plot_bgcolor=theme.GAP)
    fig.update_xaxes(category_axis(x_title, WIDTH / z.shape[1]))
    room = (height - MARGINS) / z.shape[0]
    return fig.update_yaxes(category_axis(y_title, room), autorange="reversed")


def heat_trace(
    z: np.ndarray,
    rows: Sequence[str],
    cols: Sequence[str],
    *,
    names: tuple[str, str, str],
    text: bool | Literal["auto"] = "auto",
    hover: Sequence[Sequence[str]] | np.ndarray | None = None,
) -> go.Heatmap:
    """Return the trace of one matrix with escaped labels; names are those of row, col and value.

    Labels are categories of the axes, so that hover texts cost nothing per cell and plotly thins
    the tick labels by itself at any zoom.
    """
    row, col, value = names
    lines = [f"{row}: %{{y}}", f"{col}: %{{x}}", f"{value}: %{{z:.4g}}"]
    trace = go.Heatmap(z=z, x=list(cols), y=list(rows))
    if hover is not None:
        trace.customdata = _hover_texts(hover, z.shape)
        lines.append("%{customdata}")
    trace.hovertemplate = "<br>".join(lines) + "<extra></extra>"
    if text is not False and z.size <= MAX_CELLS_WITH_TEXT:
        trace.texttemplate = "%{z:.2f}"
    if z.size > MAX_CELLS_WITH_GAPS:
        trace.update(xgap=0, ygap=0)
    return trace


def colour_scale(
    z: np.ndarray, *, zero_centred: bool, limits: Limits | None = None
) -> dict[str, Any]:
    """Return colorscale, zmin, zmax (and zmid = 0 if zero_centred) for a heatmap trace of `z`.

    Raises:
        ConfigError: `limits` is not low < high.
    """
    if limits is not None and not limits[0] < limits[1]:
        raise ConfigError(f"range is {limits}; expected (low, high) with low < high")
    finite = z[np.isfinite(z)]
    if zero_centred:
        ends = limits if limits is not None else finite
        most = float(np.max(np.abs(ends), initial=0.0)) or 1.0
        return {"colorscale": theme.DIVERGING, "zmin": -most, "zmax": most, "zmid": 0}
    if limits is None:
        low = float(np.min(finite, initial=0.0))
        high = float(np.max(finite)) if finite.size else 1.0
        limits = (low, high if high > low else low + 1.0)
    return {"colorscale": theme.SEQUENTIAL, "zmin": limits[0], "zmax": limits[1]}


def shared_colour_axis(scale: dict[str, Any], value_name: str, height: int) -> dict[str, Any]:
    """Return a layout's coloraxis for several traces, from `colour_scale`'s answer.

    Args:
        height: Of the figure, in pixels.
    """
    axis = {"colorscale": scale["colorscale"], "cmin": scale["zmin"], "cmax": scale["zmax"]}
    if "zmid" in scale:
        axis["cmid"] = scale["zmid"]
    return {**axis, "colorbar": colour_bar(value_name, height)}


def colour_bar(value_name: str, height: int) -> dict[str, Any]:
    """Return a colour bar's title and length: as tall as the plot, but no taller than is of use."""
    bar: dict[str, Any] = {"title": {"text": escape(value_name)}}
    if height - MARGINS > LONGEST_BAR:
        bar.update(lenmode="pixels", len=LONGEST_BAR, y=1, yanchor="top")
    return bar


def category_axis(title: str | None, room: float) -> dict[str, Any]:
    """Return the settings of an axis whose ticks are the labels of rows or columns.

    Args:
        room: Pixels per label. With enough of them every label is shown; else plotly thins them.
    """
    axis: dict[str, Any] = {
        "type": "category",
        "showgrid": False,
        "zeroline": False,
        "autotickangles": [0, -90],
        "title": {"text": escape(title) if title else None},
    }
    if room >= LEAST_ROOM:
        axis.update(dtick=1, tickfont={"size": int(min(13, max(10, room - 2)))})
    return axis


def side_by_side(titles: Sequence[str], cols: int, *, most: int = 5) -> int:
    """Return how many small multiples with `cols` columns stand in a row; rows are equally full.

    As many as leave the labels and the titles their room.
    """
    n, longest = len(titles), max(1, *map(len, titles))
    most = max(1, min(most, WIDTH // (12 * cols), WIDTH // (7 * longest)))
    return math.ceil(n / math.ceil(n / most))


def height_for(n_rows: int, *, row: int = ROW_HEIGHT, least: int = 300, most: int = 900) -> int:
    """Return a figure height in pixels for so many rows, margins included."""
    return int(min(max(MARGINS + n_rows * row, least), most))


def _hover_texts(hover: Sequence[Sequence[str]] | np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    texts = np.array([[escape(cell) for cell in line] for line in hover], dtype=object)
    if texts.shape != shape:
        raise ShapeError(f"hover has shape {list(texts.shape)}, but the values {list(shape)}")
    return texts

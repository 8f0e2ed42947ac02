"""Where restoring one activation restores the answer: every site against every position."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError, ShapeError, unknown
from hooked_ssm.plots.heatmap import labelled_heatmap
from hooked_ssm.plots.labels import escape, listing
from hooked_ssm.plots.tensors import Limits

COLUMNS = ("corrupt", "restore", "site", "layer", "direction", "attribution")

TITLES = {
    "restore": "Corrupted: {corrupt}; one activation restored",
    "corrupt": "Original; one activation corrupted: {corrupt}",
}
DONE = {"corrupt": "corrupted"}
"""What was done, and what to one activation, by a mechanistic evaluation's direction."""


@checked
def site_restoration(
    frame: pd.DataFrame,
    corrupt: str | None = None,
    *,
    direction: str | None = None,
    sites: list[str] | None = None,
    title: str | None = None,
    range: Limits | None = (-1.0, 1.0),
) -> go.Figure:
    """Draw attribution by (layer, site), down, and patched position, across, for one corruption.

    Args:
        frame: Tidy rows of a mechanistic evaluation, with columns corrupt, restore, site, layer,
            direction, attribution, and if there original, corrupted, restored for the hover text.
            Rows of the same cell (several runs) are averaged.
        corrupt, direction: Which rows; the first that the frame holds if None. The title says it.
        sites: Only these, in this order; all, in the frame's order, if None.
        range: The values at the ends of the scale; from the values if None.
    Raises:
        ConfigError: A column, corruption, direction or site that the frame has not.
    """
    rows = _select(frame, {"corrupt": corrupt, "direction": direction})
    if sites is not None:
        for site in sites:
            if site not in set(rows["site"]):
                raise ConfigError(unknown("site", site, rows["site"].unique()))
        rows = rows[rows["site"].isin(sites)]
    order = sites or list(rows["site"].unique())
    keys = sorted(
        dict.fromkeys(zip(rows["layer"], rows["site"], strict=True)),
        key=lambda key: (key[0], order.index(key[1])),
    )
    positions = list(rows["restore"].unique())
    numeric = [c for c in ("attribution", "original", "corrupted", "restored") if c in rows]
    cells = rows.groupby(["layer", "site", "restore"], sort=False)[numeric].mean()
    table = {c: cells[c].unstack("restore").reindex(keys)[positions].to_numpy() for c in numeric}
    corrupt, direction = rows["corrupt"].iloc[0], rows["direction"].iloc[0]
    if title is None:
        title = TITLES.get(direction, "Corrupted: {corrupt}; {direction}").format(
            corrupt=corrupt, direction=direction
        )
    return labelled_heatmap(
        table["attribution"],
        [escape(f"L{layer} {site}") for layer, site in keys],
        [escape(p) for p in positions],
        title=title,
        titles=("layer and site", f"{DONE.get(direction, 'restored')} position", "attribution"),
        limits=range,
        hover=_probabilities(table) if "restored" in table else None,
    )


def _select(frame: pd.DataFrame, wanted: dict[str, str | None]) -> pd.DataFrame:
    missing = [c for c in COLUMNS if c not in frame.columns]
    if missing:
        raise ConfigError(
            f"the frame has no column {listing(missing)}; it has {', '.join(frame.columns)}. "
            "Pass the rows of a mechanistic evaluation"
        )
    if frame.empty:
        raise ShapeError("the frame has no rows: there is nothing to draw")
    for column, value in wanted.items():
        allowed = frame[column].unique()
        if value is None:
            value = allowed[0]
        elif value not in allowed:
            raise ConfigError(unknown(column, value, allowed))
        frame = frame[frame[column] == value]
    return frame


def _probabilities(table: dict[str, np.ndarray]) -> np.ndarray:
    """Return one hover line per cell with the mean probabilities of the original answer."""
    words = [c for c in ("original", "corrupted", "restored") if c in table]
    lines = np.empty(table["restored"].shape, dtype=object)
    for cell in np.ndindex(*lines.shape):
        lines[cell] = ", ".join(f"{w} {table[w][cell]:.3f}" for w in words)
    return lines

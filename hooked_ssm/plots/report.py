"""A report: texts, tables and figures in one page that needs nothing else."""

from __future__ import annotations

import html
import math
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral, Real
from typing import TypeAlias

import pandas as pd
import plotly.graph_objects as go

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError
from hooked_ssm.plots.html import HtmlFigure, page, plotly_piece
from hooked_ssm.plots.labels import fixed

Item: TypeAlias = str | go.Figure | pd.DataFrame | HtmlFigure

PACKAGES = ("hooked-ssm", "torch", "transformer-lens", "plotly")


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, in order.

    Attributes:
        title: The heading; none if empty.
        items: Texts (an empty line starts a new paragraph, `backticks` set code), plotly figures,
            tables (DataFrames, shown without their index) and HTML figures.
    """

    title: str
    items: Sequence[Item] = field(default_factory=tuple)


@checked
def report_page(
    title: str,
    sections: Sequence[Section | tuple[str, Sequence[Item]]],
    *,
    command: str | None = None,
    versions: Mapping[str, str] | None = None,
    time: datetime | None = None,
) -> str:
    """Return one self-contained HTML page; plotly.js is embedded once, if a figure needs it.

    Everything the caller passes is escaped, tokens such as `</script>` included.

    Args:
        sections: Sections, or (title, items) pairs.
        command: How it was made; this process's command line if None.
        versions: Of what made it; of Python and the main packages if None.
        time: When it was made; now if None.
    Raises:
        ConfigError: An item of another type.
    """
    scripts: list[str] = []
    body = [f"<header><h1>{html.escape(title)}</h1>", _about(command, versions, time), "</header>"]
    for section in sections:
        section = section if isinstance(section, Section) else Section(*section)
        body.append("<section>")
        if section.title:
            body.append(f"<h2>{html.escape(section.title)}</h2>")
        for item in section.items:
            body.append(_piece(item, f"figure-{len(body)}", scripts))
        body.append("</section>")
    return page(title, "\n".join(body), list(dict.fromkeys(scripts)))


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the main packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _about(command: str | None, versions: Mapping[str, str] | None, time: datetime | None) -> str:
    command = shlex.join(sys.argv) if command is None else command
    versions = installed_versions() if versions is None else versions
    time = datetime.now().astimezone() if time is None else time
    entries = {
        "Command": f"<code>{html.escape(command)}</code>",
        "Versions": html.escape(", ".join(f"{k} {v}" for k, v in versions.items())),
        "Made": html.escape(time.strftime("%Y-%m-%d %H:%M %Z").strip()),
    }
    return (
        f'<dl class="about">{"".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in entries.items())}</dl>'
    )


def _piece(item: Item, div_id: str, scripts: list[str]) -> str:
    """Return an item as HTML, and add the scripts it needs to `scripts`."""
    if isinstance(item, str):
        return text_html(item)
    if isinstance(item, pd.DataFrame):
        return table_html(item)
    if isinstance(item, go.Figure):
        scripts.append("plotly")
        return plotly_piece(item, div_id)
    if isinstance(item, HtmlFigure):
        scripts.extend(item.scripts)
        return f'<div class="figure">{item.body}</div>'
    raise ConfigError(
        f"cannot put a {type(item).__name__} in a report; allowed: str, plotly Figure, "
        "DataFrame, HtmlFigure"
    )


def text_html(text: str) -> str:
    """Return paragraphs, escaped, with `backticks` as code."""
    paragraphs = [p.strip() for p in re.split(r"\n\s*\n", text) if p.strip()]
    coded = [re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(p)) for p in paragraphs]
    return "\n".join(f"<p>{p}</p>" for p in coded)


def table_html(frame: pd.DataFrame) -> str:
    """Return a table without the index, cells escaped, numbers to the right."""
    classes = [
        ' class="number"' if _is_numeric(frame.iloc[:, i]) else "" for i in range(frame.shape[1])
    ]
    head = "".join(
        f"<th{c}>{html.escape(str(name))}</th>"
        for c, name in zip(classes, frame.columns, strict=True)
    )
    columns = [_cells(frame.iloc[:, i]) for i in range(frame.shape[1])]
    rows = [
        "".join(f"<td{c}>{v}</td>" for c, v in zip(classes, row, strict=True))
        for row in zip(*columns, strict=True)
    ]
    lines = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _is_numeric(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def _cells(column: pd.Series) -> list[str]:
    """Return a column's entries as HTML, its numbers in one format."""
    numbers = [float(value) for value in column if _is_fractional(value)]
    digits = _digits(numbers)
    return [_cell(value, digits) for value in column]


def _digits(numbers: Sequence[float]) -> int | None:
    """Return the digits behind the point that fit all numbers; None: each as short as it is."""
    finite = [abs(number) for number in numbers if math.isfinite(number)]
    chosen = all(float(f"{x:.3g}") == x for x in finite)  # such as learning rates, by a person
    if chosen and any(round(x, 3) != x for x in finite):
        return None
    largest = max(finite, default=0.0)
    return None if largest >= 1e6 else 1 if largest >= 100 else 3


def _is_fractional(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, Integral | bool) and value == value


def _cell(value: object, digits: int | None) -> str:
    if value is None or value is pd.NA or value is pd.NaT or value != value:
        return "–"
    if not _is_fractional(value):
        return html.escape(str(value))
    number = float(value)  # type: ignore[arg-type]
    if digits is None or not math.isfinite(number):
        return f"{number:.4g}"
    return fixed(number, digits)

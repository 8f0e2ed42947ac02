"""Write a figure to a file: a page that works offline, or a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import plotly.graph_objects as go

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError, MissingDependencyError, unknown
from hooked_ssm.files import make_folder, write_bytes
from hooked_ssm.plots.html import HtmlFigure, page, plotly_piece
from hooked_ssm.plots.screenshot import screenshot
from hooked_ssm.plots.tensors import Number

EXTENSIONS = (".html", ".png", ".svg")


@checked
def save(
    figure: go.Figure | HtmlFigure,
    path: str | Path,
    *,
    width: int = 900,
    scale: Number = 2,
    background: str | None = None,
) -> Path:
    """Write `figure` to `path` and return the path; the file appears whole or not at all.

    Args:
        path: Its extension says what is written: .html (one self-contained page), .png or .svg
            (made by kaleido in a headless Chrome). Folders around it are made.
        width: Pixels of a picture, unless the figure has its own; times `scale` in a .png.
        background: A colour behind a picture; transparent if None.
    Raises:
        ConfigError: Another extension, an `HtmlFigure` as .svg, or a file where a folder should be.
        FileError: It cannot be written there.
        MissingDependencyError: kaleido or Chrome is needed and not there.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in EXTENSIONS:
        raise ConfigError(f"{unknown('extension', kind, EXTENSIONS)} (path: {path})")
    if kind == ".html":
        data = _page(figure).encode()
    elif not isinstance(figure, HtmlFigure):
        data = _picture(figure, kind[1:], width, scale, background)
    elif kind == ".png":
        data = screenshot(_page(figure), width=width, scale=scale, background=background)
    else:
        raise ConfigError(f"{figure.title} can be saved as .html or .png, not as {kind}")
    make_folder(path.parent, "the picture's folder")
    write_bytes(path, data)
    return path


def _page(figure: go.Figure | HtmlFigure) -> str:
    if isinstance(figure, HtmlFigure):
        return page(figure.title, figure.body, figure.scripts)
    title = figure.layout.title.text or "Figure"
    return page(title, plotly_piece(figure, "figure"), ["plotly"])


def _picture(
    figure: go.Figure, kind: str, width: int, scale: Number, background: str | None
) -> bytes:
    if importlib.util.find_spec("kaleido") is None:
        raise MissingDependencyError(
            f"saving as .{kind} needs kaleido; install it with: pip install "
            "'hooked-ssm[notebooks]', or save as .html"
        )
    if background is not None:
        figure = go.Figure(figure).update_layout(paper_bgcolor=background)
    from kaleido.errors import ChromeNotFoundError

    try:
        return figure.to_image(format=kind, width=figure.layout.width or width, scale=scale)
    except (ChromeNotFoundError, RuntimeError) as error:
        # plotly turns the first into a bare RuntimeError
        if not isinstance(error, ChromeNotFoundError) and "Chrome" not in str(error):
            raise
        raise MissingDependencyError(
            f"saving as .{kind} needs Chrome or Chromium, which kaleido did not find; install it "
            "(apt-get install chromium, or: plotly_get_chrome), or save as .html"
        ) from error

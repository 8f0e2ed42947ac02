"""HTML that stands alone: pages without one network reference, and pieces of such pages.

A piece carries the names of the scripts it needs, and a page embeds each script once.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

# The browser is told to load nothing: what is not in the page is not wanted. plotly.js builds
# functions from strings, hence 'unsafe-eval'.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; worker-src blob:"
)

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --soft: #59636e;
  --line: #d9dee3; --tint: #f5f7f9; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e4e7ea; --soft: #9aa4ae;
  --line: #343a40; --tint: #1d2125; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .75rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.75rem 0 .5rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
p { margin: .6rem 0; max-width: 44rem; }
code { font: .88em/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  background: var(--tint); border-radius: 4px; padding: .1em .35em; overflow-wrap: anywhere; }
dl.about { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0;
  color: var(--soft); font-size: .88rem; }
dl.about dt { font-weight: 600; } dl.about dd { margin: 0; min-width: 0; }
.figure { margin: 1rem 0; } .scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .9rem .4rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; border-bottom-width: 2px; }
td.number, th.number { text-align: right; }
.js-plotly-plot [class$="tick"] text, .js-plotly-plot .legendtext, .js-plotly-plot .bartext,
.js-plotly-plot .cbaxis text, .js-plotly-plot .annotation-text { fill: var(--soft) !important; }
.js-plotly-plot text[class$="title"] { fill: var(--ink) !important; }
@media print { main { max-width: none; } .modebar-container { display: none; } }
"""

PLOTLY_CONFIG: dict[str, Any] = {"displaylogo": False, "responsive": True}


def plotly_script() -> str:
    """Return plotly.js, whole."""
    return str(get_plotlyjs())


SCRIPTS: dict[str, Callable[[], str]] = {"plotly": plotly_script}


@dataclass(frozen=True)
class HtmlFigure:
    """A drawing that is HTML, not a plotly figure; Jupyter shows it, `save` writes a page.

    Attributes:
        body: The piece of HTML.
        scripts: Names of the scripts it needs, keys of `SCRIPTS`.
        title: The title of the page that `save` writes.
        about: What it shows, for `repr`.
    """

    body: str
    scripts: tuple[str, ...]
    title: str
    about: str

    def to_html(self) -> str:
        """Return the piece with its scripts, for a page that has them not."""
        return script_tags(self.scripts) + self.body

    def save(self, path: str | Path, **kwargs: Any) -> Path:
        """Write a self-contained .html page, or a .png, and return its path; as `plots.save`."""
        from hooked_ssm.plots.save import save

        return save(self, path, **kwargs)

    def _repr_html_(self) -> str:
        """Embed scripts once per notebook, see `notebook_scripts`."""
        return script_tags(notebook_scripts(self.scripts)) + self.body

    def __repr__(self) -> str:
        return f"{self.about}, {len(self.body) / 1e6:.1f} MB of HTML without the scripts"


_embedded_by: dict[str, str] = {}  # script -> the notebook cell whose output holds it


def notebook_scripts(scripts: Iterable[str]) -> list[str]:
    """Return the scripts that this output must carry: all, but those another cell's output holds.

    Outside a notebook nothing is known about the page, so all are returned. The cell that embedded
    a script does so again when it runs again, because its output is replaced.
    """
    cell = _running_cell()
    if cell is None:
        return list(scripts)
    return [s for s in scripts if _embedded_by.setdefault(s, cell) == cell]


def _running_cell() -> str | None:
    """Return what identifies the notebook cell that is running: its id, or else its code."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    if shell is None or not hasattr(shell, "get_parent"):
        return None
    parent = shell.get_parent() or {}
    cell = parent.get("metadata", {}).get("cellId") or parent.get("content", {}).get("code")
    return str(cell) if cell else None


def script_tags(names: Iterable[str]) -> str:
    """Return the scripts as tags, each once."""
    return "".join(f"<script>{SCRIPTS[n]()}</script>\n" for n in dict.fromkeys(names))


def safe_json(value: object) -> str:
    """Return JSON that can stand inside a <script>: no `<`, so no `</script>` and no `<!--`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def plotly_piece(fig: go.Figure, div_id: str) -> str:
    """Return a figure as a <div> and the call that draws it; plotly.js itself is not included."""
    height = fig.layout.height or 450
    piece = fig.to_html(
        full_html=False,
        include_plotlyjs=False,
        include_mathjax=False,
        config=PLOTLY_CONFIG,
        default_height=f"{height}px",
        div_id=div_id,
    )
    return f'<div class="figure">{piece}</div>'


def page(title: str, body: str, scripts: Sequence[str]) -> str:
    """Return a whole page that works with no network, in light and dark.

    Args:
        body: HTML, safe already.
        scripts: Names of the scripts the body needs; each is embedded once.
    """
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n"
        f"{script_tags(scripts)}</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )

"""circuitsvis' view of attention heads, without network and without repeating its script.

circuitsvis' own output probes the network and loads its script from a CDN, or else carries 1.3 MB
of it per widget, and a token that holds `</script>` breaks the page. Here the bundled script is
embedded once per page, and the tokens are JSON without `<`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from uuid import uuid4

import numpy as np

from hooked_ssm.errors import ConfigError, MissingDependencyError
from hooked_ssm.plots import theme
from hooked_ssm.plots.html import SCRIPTS, HtmlFigure, safe_json
from hooked_ssm.plots.labels import Labels, checked, visible
from hooked_ssm.plots.pattern import AXES
from hooked_ssm.plots.tensors import ArrayLike, with_axes

REMEDY = (
    "install it with: pip install 'hooked-ssm[notebooks]' (or: pip install circuitsvis). "
    "plots.pattern draws the same in plotly"
)

# The script may come later than the widget: a notebook draws its outputs in any order.
WIDGET = """<div id="{id}" style="margin:15px 0;padding:12px;background:#fff;color:#111;\
color-scheme:light;border-radius:6px;max-width:46rem;overflow-x:auto">The circuitsvis script is \
not in this page yet: run the first cell that shows attention heads again.</div>
<script>(function draw() {{
  if (!window.CircuitsVis) {{ return void setTimeout(draw, 200); }}
  CircuitsVis.render("{id}", CircuitsVis.AttentionHeads, {props});
}})();</script>
"""


def attention_heads(
    pattern: ArrayLike,
    tokens: Labels,
    *,
    names: Labels | None = None,
    most: int = 16,
) -> HtmlFigure:
    """Show attention heads with circuitsvis: small ones to choose from, one of them large.

    Args:
        pattern: [query_pos key_pos] or [head query_pos key_pos]; negative weights are red.
        tokens: The document's tokens. [pos]
        names: Names of the heads; "Head 0", ... if None.
        most: At most so many heads, the first ones.
    Raises:
        MissingDependencyError: circuitsvis is not installed.
        ShapeError: The pattern has other axes, or tokens or names do not fit.
    """
    circuitsvis_script_path()  # before any work
    z = with_axes(pattern, AXES, "pattern")
    z = z[None] if z.ndim == 2 else z
    if most < 1:
        raise ConfigError(f"most is {most}; expected at least 1 head")
    titles = [f"Head {i}" for i, _ in enumerate(z)]
    titles = titles if names is None else checked(names, len(z), "names")
    shown = np.nan_to_num(z[:most], nan=0.0, posinf=0.0, neginf=0.0)
    largest = float(np.abs(shown).max()) or 1.0
    props = {
        # 4 decimals of the largest weight: the colours need no more, and pages stay small
        "attention": np.round(shown.astype(np.float64), _decimals(largest)).tolist(),
        "tokens": [visible(t) for t in checked(tokens, z.shape[2], "tokens")],
        "attentionHeadNames": titles[:most],
        "maxValue": largest,
        "minValue": -largest,
        "positiveColor": theme.POSITIVE,
        "negativeColor": theme.NEGATIVE,
    }
    left_out = "" if len(shown) == len(z) else f" (the first {most} of {len(z)})"
    about = f"Attention heads: {len(shown)}{left_out}, {z.shape[1]} positions"
    body = WIDGET.format(id=f"attention-heads-{uuid4().hex}", props=safe_json(props))
    if left_out:
        body = f"<p>The first {most} of {len(z)} heads.</p>\n{body}"
    return HtmlFigure(body=body, scripts=("circuitsvis",), title="Attention heads", about=about)


def circuitsvis_script_path() -> Path:
    """Return where circuitsvis keeps its bundled script; the package is found, not imported.

    Raises:
        MissingDependencyError: circuitsvis is not installed, or without its script.
    """
    try:
        spec = importlib.util.find_spec("circuitsvis")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise MissingDependencyError(f"attention_heads needs circuitsvis; {REMEDY}")
    path = Path(spec.origin).parent / "dist" / "cdn" / "iife.js"
    if not path.is_file():
        raise MissingDependencyError(f"circuitsvis is installed without {path}; {REMEDY}")
    return path


def circuitsvis_script() -> str:
    """Return circuitsvis' bundled script, fit to stand inside a <script>."""
    source = circuitsvis_script_path().read_text(encoding="utf-8")
    source = source.replace("</script", "<\\/script")  # in a string, where the two are the same
    source = source.split("//# sourceMappingURL=")[0]  # a file that no page has
    # JupyterLab runs scripts inside a function: a `var` is not global there
    return f"if (!window.CircuitsVis) {{ {source}\nwindow.CircuitsVis = CircuitsVis; }}"


def _decimals(largest: float) -> int:
    return max(0, 4 - int(np.floor(np.log10(largest))) - 1)


SCRIPTS["circuitsvis"] = circuitsvis_script

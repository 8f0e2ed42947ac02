"""Write an executed notebook as one HTML page that needs no network.

    python notebooks/page.py 01_getting_started.ipynb --out page.html

nbconvert's templates load require.js, MathJax and mermaid from elsewhere, which none of these
notebooks uses, and leave out plotly's interactive figures; here plotly.js stands in the page, once.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import nbformat
import plotly.io as pio
from nbconvert import HTMLExporter

from hooked_ssm.plots.html import plotly_piece, script_tags

PLOTLY = "application/vnd.plotly.v1+json"
TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}<link rel="icon" href="data:,">{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
"""


def offline_page(notebook: nbformat.NotebookNode) -> str:
    """Return the notebook with its outputs as one page."""
    notebook = copy.deepcopy(notebook)
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    drawn = [o for o in outputs if PLOTLY in o.get("data", {})]
    for i, output in enumerate(drawn):
        figure = pio.from_json(json.dumps(output.data[PLOTLY]))
        script = script_tags(["plotly"]) if i == 0 else ""
        output.data = {"text/html": script + plotly_piece(figure, f"figure-{i}")}
    exporter = HTMLExporter(raw_template=TEMPLATE)
    page, _ = exporter.from_notebook_node(notebook)
    return str(page)


def main() -> None:
    """Read the command line and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    page = offline_page(nbformat.read(given.notebook, as_version=4))
    given.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

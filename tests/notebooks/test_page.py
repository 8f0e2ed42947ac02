"""A notebook as a page, in a real browser: figures are drawn, nothing is asked from elsewhere."""

from __future__ import annotations

import json

import pytest
import torch

from hooked_ssm.plots import attention_heads, pattern
from tests.browser import needs_browser
from tests.devtools import Seen, open_page
from tests.notebooks.scripts import FOLDER, load

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbconvert")
pytest.importorskip("choreographer")

DRAWN = """(() => {
  const all = s => [...document.querySelectorAll(s)];
  return {
    pictures: all("img").length,
    broken: all("img").filter(i => !i.complete || !i.naturalWidth).length,
    plots: all(".js-plotly-plot .main-svg .heatmaplayer image").length,
    canvases: all("canvas").filter(c => c.width && c.height).length,
    labels: all(".js-plotly-plot .xtick text").map(t => t.textContent),
    cells: all(".jp-Cell").length,
    text: document.body.innerText,
  };
})()"""
READY = """document.readyState == "complete"
  && document.querySelectorAll(".js-plotly-plot .heatmaplayer image").length > 0
  && document.querySelectorAll("canvas").length > 2"""


def output_cell(data: dict):
    cell = nbformat.v4.new_code_cell("a_figure")
    cell.outputs = [nbformat.v4.new_output("display_data", data=data)]
    return cell


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Seen:
    """A committed notebook, with an interactive figure and an attention view as a reader has."""
    module = load("page")
    notebook = nbformat.read(FOLDER / "01_getting_started.ipynb", as_version=4)
    weights = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0)).tril()
    tokens = ["<bos>", "</script>", "<!--"]
    figure = json.loads(pattern(weights[0], tokens).to_json())
    notebook.cells += [
        output_cell({module.PLOTLY: figure}),
        output_cell({module.PLOTLY: figure}),
        output_cell({"text/html": attention_heads(weights, tokens)._repr_html_()}),
    ]
    path = tmp_path_factory.mktemp("page") / "notebook.html"
    path.write_text(module.offline_page(notebook), encoding="utf-8")
    assert path.read_text().count("plotly.js v") == 1  # the script, once for two figures
    return open_page(path, READY, DRAWN)


@needs_browser
def test_figures_are_drawn(seen):
    assert seen.value["pictures"] >= 1 and seen.value["broken"] == 0
    assert seen.value["plots"] == 2
    assert seen.value["canvases"] == 3  # two small heads and the large one
    assert seen.value["labels"][:3] == ["<bos> (0)", "</script> (1)", "<!-- (2)"]
    assert seen.value["cells"] > 20 and "Getting started" in seen.value["text"]


@needs_browser
def test_nothing_leaves_the_machine_and_nothing_goes_wrong(seen):
    assert any(address.startswith("file:") for address in seen.requests)  # they are heard
    assert seen.outside == []
    assert seen.errors == []

"""Every notebook runs from the top, draws its figures, and is committed with them."""

from __future__ import annotations

import re

import pytest

from tests.notebooks.scripts import FOLDER, load

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIGURES = {"application/vnd.plotly.v1+json", "image/png"}
LARGEST = 600_000  # bytes that a code host renders at once
DRAWS = re.compile(r"\bplots\.\w+\(|\.(heatmap|plot|graph)\(|\bfigure\.")


def drawing_cells(notebook) -> list[str]:
    """Sources of the cells whose last expression is a figure."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [source for source in code if DRAWS.search(source)]


def cells_with_figures(notebook) -> list[str]:
    return [
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code"
        and any(is_figure(output.get("data", {})) for output in cell.outputs)
    ]


def is_figure(data: dict) -> bool:
    return bool(FIGURES & set(data)) or "CircuitsVis.render(" in data.get("text/html", "")


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 8


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_draws(path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PLOTLY_RENDERER", raising=False)
    notebook = load("execute").execute(path)  # raises where a cell fails
    assert drawing_cells(notebook), "a notebook shows at least one figure"
    assert cells_with_figures(notebook) == drawing_cells(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_with_its_outputs(path):
    """Made by `python notebooks/execute.py`: run once from the top, figures as pictures."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    results = [(c, o) for c in code for o in c.outputs if o.output_type == "execute_result"]
    assert all(output.execution_count == cell.execution_count for cell, output in results)
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert cells_with_figures(notebook) == drawing_cells(notebook)
    assert path.stat().st_size < LARGEST


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    text = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (path.parent / target).exists(), target
    for target in re.findall(r"from_pretrained\(\"(checkpoints/[^\"]+)\"\)", text):
        assert (path.parent / target / "model.safetensors").is_file(), target

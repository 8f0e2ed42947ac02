"""Run the notebooks in place and keep their outputs, figures as pictures a code host shows.

    python notebooks/execute.py [01_getting_started.ipynb ...]

A reader's own run shows interactive figures; what is committed has pictures: small, no script.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent

# Run before the first cell and not kept: pictures from one browser, sharp on dense screens.
PICTURES = """
import tempfile
import warnings

import kaleido
import plotly.io as pio

from hooked_ssm.plots import HtmlFigure

warnings.filterwarnings("ignore", message="IProgress not found|The kopts argument")

pio.renderers["png"].scale = 1.15
pio.renderers["png"].width = 800
pio.renderers.default = "png"
kaleido.start_sync_server(silence_warnings=True)


def picture_of_html(figure):
    with tempfile.TemporaryDirectory() as folder:
        return figure.save(f"{folder}/figure.png", width=620, scale=1.3).read_bytes()


formatters = get_ipython().display_formatter.formatters
formatters["image/png"].for_type(HtmlFigure, picture_of_html)
formatters["text/html"].for_type(HtmlFigure, lambda figure: None)
"""


def execute(path: Path, setup: str = "", timeout: int = 600) -> nbformat.NotebookNode:
    """Run a notebook from the top in a fresh kernel of this interpreter, and return it.

    Args:
        setup: Code to run in front of the first cell.
        timeout: Seconds that a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    first = nbformat.v4.new_code_cell(setup)
    notebook.cells.insert(0, first)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.cells.remove(first)
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.execution_count:
            cell.execution_count -= 1
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count
    # What differs from machine to machine is left out.
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main(names: list[str]) -> None:
    """Execute and rewrite the notebooks named, or all."""
    paths = [FOLDER / name for name in names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        notebook = execute(path, PICTURES)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])

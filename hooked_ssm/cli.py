"""The command line: `hooked-ssm demo | hooks`."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from hooked_ssm.errors import HookedSSMError

app = typer.Typer(
    help="Look inside sequence models of every kind.", no_args_is_help=True, add_completion=False
)
console = Console()


@app.callback()
def _setup() -> None:
    handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler], force=True)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for results.json, report.html and models.")],
    seed: Annotated[int, typer.Option(help="Of parameters and documents.")] = 0,
    architectures: Annotated[
        list[str] | None, typer.Option("--architecture", help="Only these (repeatable).")
    ] = None,
) -> None:
    """Train attention, Based, Mamba and BaseConv on recall; report how each does it."""
    from hooked_ssm.demo import RECIPES, run_demo  # torch is imported only where it is needed

    chosen = architectures or list(RECIPES)
    command = shlex.join(["hooked-ssm", "demo", "--out", str(out), "--seed", str(seed)])
    results = run_demo(out, architectures=chosen, seed=seed, command=command)
    table = Table("architecture", "accuracy", "@ Key", "@ Query", "@ Value", "mechanism")
    for result in results:
        row = result.to_row()
        shares = [f"{row['attribution'][name]:.3f}" for name in ("key", "query", "value")]
        when = f" ({row['timing']})" if row["timing"] else ""
        table.add_row(
            row["architecture"], f"{row['accuracy']:.3f}", *shares, row["mechanism"] + when
        )
    console.print(table)
    console.print(f"Report: {out / 'report.html'}   Results: {out / 'results.json'}")


@app.command()
def hooks(
    architecture: Annotated[str, typer.Argument(help="Such as mamba; see ModelConfig.")],
    layers: Annotated[int, typer.Option(help="How many layers to list.")] = 1,
) -> None:
    """List an architecture's hook points in execution order."""
    from hooked_ssm.reference import hook_table

    table = Table(
        "hook", "axes", "role", "an edit reaches", "weight", "meaning", title=architecture
    )
    for row in hook_table(architecture, layers):
        table.add_row(*row)
    console.print(table)


def main() -> None:
    """Run the command line; errors of the package are one line, without a traceback."""
    try:
        app()
    except HookedSSMError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

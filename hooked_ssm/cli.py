"""The command line: `hooked-ssm demo | sweep | report | hooks`."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hooked_ssm.errors import ConfigError, HookedSSMError

if TYPE_CHECKING:
    from hooked_ssm.sweeps import RunSpec, SweepOutcome

app = typer.Typer(
    help="Look inside sequence models of every kind.", no_args_is_help=True, add_completion=False
)
console = Console()
TABLE_WIDTH = 150  # columns of a terminal from which the table of hook points is easy to read


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

    rows = hook_table(architecture, layers)
    if console.width < TABLE_WIDTH:
        for name, axes, role, reach, weight, meaning in rows:
            console.print(name, style="bold", soft_wrap=True)  # to copy whole
            facts = [f"[{axes}]", role and f"role {role}", f"an edit reaches {reach}", weight]
            for line in (meaning, ", ".join(fact for fact in facts if fact)):
                console.print(Padding(Text(line), (0, 0, 0, 4)))
        return
    table = Table(title=architecture)
    for column in ("hook", "axes", "role", "an edit reaches", "weight", "meaning"):
        table.add_column(column, no_wrap=column == "hook")
    for row in rows:
        table.add_row(*row)
    console.print(table)


class ExecutorName(str, Enum):
    """Where a sweep's runs are executed."""

    local = "local"
    ray = "ray"


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A grid in YAML or JSON, as in experiments/.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs; complete ones are skipped. Needed but to list."),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="The file's small version.")] = False,
    executor: Annotated[
        ExecutorName, typer.Option(help="Processes on this machine, or Ray.")
    ] = ExecutorName.local,
    workers: Annotated[
        int | None,
        typer.Option(help="Runs at once; default: one per core, with --device cuda one per GPU."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Local: torch's threads in each run; default: 1.")
    ] = None,
    retries: Annotated[int, typer.Option(help="New starts of a run that was killed.")] = 2,
    device: Annotated[str | None, typer.Option(help="Such as cuda; default: cpu.")] = None,
    gpus: Annotated[
        float | None, typer.Option(help="Ray: what a run takes of a GPU; default: 0.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray: auto (default; a cluster if there is one), local, or host:port."),
    ] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="Module with tasks and mixers of your own (repeatable)."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and stop.")] = False,
) -> None:
    """Train and evaluate every run of a grid; start it again to go on where it stopped."""
    from hooked_ssm.sweeps import LocalExecutor, RayExecutor, RunFolder, read_sweep, run_sweep

    local = executor is ExecutorName.local
    _refuse({"--gpus": gpus, "--address": address} if local else {"--threads": threads}, local)
    modules = _imported(imports or [])
    specs = read_sweep(file, small=small)
    if dry_run:
        _list_runs(specs, out)
        return
    if out is None:
        raise ConfigError("a sweep needs a folder for its runs; give --out FOLDER")
    chosen = (
        LocalExecutor(workers, device, 1 if threads is None else threads, modules)
        if local
        else RayExecutor(workers, device, gpus or 0.0, address or "auto", modules)
    )
    try:
        outcome = run_sweep(specs, out, executor=chosen, retries=retries)
    except KeyboardInterrupt:
        complete = sum(RunFolder.of(out, spec).is_complete_as(spec) for spec in specs)
        console.print(
            f"Interrupted: {complete} of {len(specs)} runs complete, the others go on from their "
            "last checkpoint when the same command is given again."
        )
        raise typer.Exit(130) from None
    _show_outcome(outcome, len(specs), out, modules)
    if outcome.failures:
        raise typer.Exit(1)


def _refuse(options: dict[str, object], local: bool) -> None:
    """Refuse options that only the other executor has."""
    other = "ray" if local else "local"
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name}={value} needs --executor {other}; add that, or leave it out")


def _imported(modules: list[str]) -> list[str]:
    """Import modules, those of the current folder too, as `python -m` has it."""
    from hooked_ssm.sweeps.worker import import_modules

    if modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # workers take it over
    import_modules(modules)
    return modules


def _import_options(modules: list[str]) -> list[str]:
    return [word for module in modules for word in ("--import", module)]


def _list_runs(specs: list[RunSpec], out: Path | None) -> None:
    table = Table("run", "state", "what", title=f"{len(specs)} run{'s' * (len(specs) > 1)}")
    for spec in specs:
        table.add_row(spec.key, _state(spec, out), spec.label)
    console.print(table)


def _state(spec: RunSpec, out: Path | None) -> str:
    """Return how far a run is, in the report's words."""
    from hooked_ssm.sweeps import RunFolder

    run = None if out is None else RunFolder.of(out, spec)
    if run is None or not run.path.exists():
        return "missing"
    if run.is_complete_as(spec):
        return "complete"
    return "failed" if run.failure() else f"unfinished, at step {run.checkpoint_step()}"


def _show_outcome(outcome: SweepOutcome, total: int, out: Path, modules: list[str]) -> None:
    command = ["hooked-ssm", "report", str(out), *_import_options(modules), "--out", "report.html"]
    console.print(
        f"{len(outcome.complete)} of {total} runs complete ({outcome.skipped} were before). "
        f"Report: {shlex.join(command)}"
    )
    if outcome.failures:
        table = Table("run", "what", "why", title=f"{len(outcome.failures)} runs failed")
        for failure in outcome.failures:
            table.add_row(str(failure.folder), failure.spec.label, failure.reason)
        console.print(table)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="What `hooked-ssm sweep --out` wrote to.")],
    out: Annotated[Path, typer.Option(help="The page; .csv and .parquet go beside it.")],
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="Module with tasks of your own (repeatable)."),
    ] = None,
) -> None:
    """Write a sweep's tables and figures as one offline page, and its runs as CSV and Parquet."""
    from hooked_ssm.sweeps import write_report

    modules = _imported(imports or [])
    command = ["hooked-ssm", "report", str(folder), *_import_options(modules), "--out", str(out)]
    for path in write_report(folder, out, shlex.join(command)):
        console.print(str(path))


def main() -> None:
    """Run the command line; errors of the package and of files: one line, exit code 2."""
    try:
        app()
    except (HookedSSMError, OSError) as error:  # the latter is about a file of the user's
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

"""The demo and the command line, with recipes cut short: what they write, not what models learn."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hooked_ssm import HookedModel, cli, demo
from hooked_ssm.errors import ConfigError
from hooked_ssm.mixers import MIXERS
from hooked_ssm.reference import hook_table


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = {
        name: tuple(replace(phase, steps=2, batch_size=4) for phase in phases)
        for name, phases in demo.RECIPES.items()
    }
    monkeypatch.setattr(demo, "RECIPES", cut)


def test_demo_writes_results_report_and_models(short: None, tmp_path: Path) -> None:
    results = demo.run_demo(tmp_path, documents=8, d_model=16, progress=False)
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["architecture"] for row in rows] == ["attention", "based", "mamba", "base_conv"]
    for row in rows:
        assert set(row["attribution"]) == {"key", "query", "value"}
        assert row["mechanism"] == "unsolved"
        assert row["chance"] == 0.25
    assert rows[2]["steps"] == 4  # two phases of two steps
    page = (tmp_path / "report.html").read_text()
    assert all(f"Inside {row['architecture']}" in page for row in rows)
    assert "<script src=" not in page and '<link rel="stylesheet"' not in page
    again = HookedModel.from_pretrained(tmp_path / "models" / "mamba")
    want = results[2].model.state_dict()
    assert all(want[name].equal(value) for name, value in again.state_dict().items())


def test_history_counts_on_over_phases(short: None, tmp_path: Path) -> None:
    result = demo.train_and_evaluate("mamba", 0, 16, 4, progress=False)
    assert result.history["step"].is_monotonic_increasing
    assert result.history["step"].max() == 4


def test_unknown_architecture_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'mamba'"):
        demo.run_demo(tmp_path / "out", architectures=["mambo"])
    assert not (tmp_path / "out").exists()


def test_command_line_demo(short: None, tmp_path: Path) -> None:
    arguments = ["demo", "--out", str(tmp_path), "--architecture", "mamba"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "unsolved" in result.output
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("architecture", list(MIXERS))
def test_hook_table_of_every_architecture(architecture: str) -> None:
    table = hook_table(architecture)
    assert len({row[0] for row in table}) == len(table)
    assert all(all(isinstance(cell, str) for cell in row) for row in table)
    names = [row[0] for row in table]
    assert names[0] == "hook_embed" and names[-1] == "ln_final.hook_normalized"


@pytest.mark.parametrize("width", [250, 80, 40])
def test_command_line_hooks_at_any_width(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(cli, "console", Console(width=width))
    result = CliRunner().invoke(cli.app, ["hooks", "mamba"])
    assert result.exit_code == 0
    assert "blocks.0.mixer.hook_ssm_carry.{t}" in result.output  # whole, to copy
    assert "…" not in result.output
    words = " ".join(result.output.split())
    for row in hook_table("mamba", 1):
        assert all(word in words for word in " ".join(row).split())


def test_errors_are_one_line(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["hooked-ssm", "hooks", "mambo"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "unknown mixer 'mambo'" in capsys.readouterr().err.replace("\n", " ")


def test_the_hook_reference_is_up_to_date() -> None:
    """docs/hooks.md is what `python docs/make_hook_reference.py` writes."""
    script = Path(__file__).parents[1] / "docs" / "make_hook_reference.py"
    made = runpy.run_path(str(script))
    assert made["TARGET"].read_text() == made["page"]()

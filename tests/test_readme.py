"""The README's snippets run, in order, as a reader would type them into one notebook."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hooked_ssm import HookedModel, ModelConfig, tasks
from hooked_ssm.mixers import MIXERS
from tests.snippets import blocks, run_python

ROOT = Path(__file__).parents[1]


def test_snippets_run_in_order(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)  # a model is loaded from the repository
    readme = ROOT / "README.md"
    assert len(blocks(readme, "python")) == 5
    names = run_python(readme)
    assert "hook_embed" in capsys.readouterr().out
    assert not caplog.records  # such as that the corruption hardly changes the metric
    query = names["batch"].positions["query_item"].unique().item()
    assert names["swept"].recovery("mixer_out")[0, query] > 0.95  # looked up at once, at the query
    assert names["result"].mechanism == "unsolved"
    assert len(names["run"].history) >= 1


def test_every_architecture_and_task_is_listed() -> None:
    text = (ROOT / "README.md").read_text()
    everything = {name: getattr(tasks, name) for name in tasks.__all__}
    classes = {name for name, kind in everything.items() if _is_a_task(kind)}
    for heading, names in (
        ("Architectures:", MIXERS),
        ("Tasks (`hooked_ssm.tasks`):", classes),
    ):
        listed = text.partition(heading)[2].partition("\n\n")[0]
        assert set(re.findall(r"`(\w+)`", listed)) == set(names)


def _is_a_task(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, tasks.Task) and kind is not tasks.Task


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", (ROOT / "README.md").read_text(), flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_ci_runs_the_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_a_model_prints_its_parts_in_order() -> None:
    cfg = ModelConfig(architecture="mamba", n_layers=2, d_model=8, d_vocab=9, n_ctx=9)
    model = HookedModel(cfg)
    lines = repr(model).splitlines()
    order = [
        "embed",
        "blocks.0.ln1",
        "blocks.0.mixer",
        "blocks.1.ln1",
        "blocks.1.mixer",
        "ln_final",
    ]
    assert [line.split()[0] for line in lines[1:7]] == order
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in lines[-1]

"""The README's snippets run, in order, as a reader would type them into one notebook."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def test_snippets_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(SNIPPETS) == 5
    names: dict[str, object] = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), names)
    assert "hook_embed" in capsys.readouterr().out
    assert names["result"].mechanism == "unsolved"  # type: ignore[attr-defined]
    assert len(names["run"].history) >= 1  # type: ignore[attr-defined]


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", (ROOT / "README.md").read_text(), flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_ci_runs_the_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()

"""The project's own files agree with each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python >= 3.11

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# DESIGN section 2, lowest first: a module may import from its own row and the rows before it.
ROWS = (
    ("errors", "shapes", "files", "rules", "checks", "devices", "progress", "html_table"),
    ("hook_names",),
    ("hook_points",),
    ("layers", "ops"),
    ("mixers",),
    ("config",),
    (
        "block",
        "cache",
        "tokens",
        "inputs",
        "loss",
        "generation",
        "lens_weights",
        "initialisation",
        "reach",
        "sizes",
        "summary",
    ),
    ("root",),
    ("model",),
    ("reference", "loading", "tasks"),
    ("analysis", "training"),
    ("plots", "sweeps"),
    ("demo",),
    ("cli",),
)


def modules() -> list[Path]:
    return [*(ROOT / "hooked_ssm").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]


def row_of(name: str) -> int:
    return next(i for i, row in enumerate(ROWS) if name in row)


def part_of(path: Path) -> str:
    if path.is_relative_to(ROOT / "tasks"):
        return "tasks"
    return path.relative_to(ROOT / "hooked_ssm").parts[0].removesuffix(".py")


def test_every_package_is_installed() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in (ROOT / "hooked_ssm").rglob("__init__.py")
    }
    assert listed == found | {"hooked_ssm.tasks"}


def test_every_module_has_a_row() -> None:
    parts = {part_of(path) for path in modules()} - {"__init__"}
    assert parts <= {name for row in ROWS for name in row}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downwards(path: Path) -> None:
    """Imports at the top of a module; those inside functions are lazy on purpose."""
    part = part_of(path)
    if part == "__init__":
        return
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hooked_ssm."):
            other = (node.module or "").split(".")[1]
            assert row_of(other) <= row_of(part), f"{part} imports {node.module}, which is above it"


def test_no_pickle_no_prints_no_global_seeds() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in ("print", "eval", "exec", "pickle.load", "pickle.loads"), path
            assert called not in ("torch.manual_seed", "random.seed", "np.random.seed"), path
            if called == "torch.load":
                assert "weights_only=True" in ast.unparse(node), path

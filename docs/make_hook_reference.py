"""Writes docs/hooks.md from the vocabulary: python docs/make_hook_reference.py"""

from __future__ import annotations

from pathlib import Path

from hooked_ssm.mixers import MIXERS
from hooked_ssm.reference import hook_table

TARGET = Path(__file__).parent / "hooks.md"
HEAD = """# Hook points, architecture by architecture

Made by `python docs/make_hook_reference.py` from `hooked_ssm/hook_names.py` and the mixers; the
command line prints the same: `hooked-ssm hooks mamba`. In execution order, per layer. *Reach*:
which positions of its own layer an edit at position t acts on. *Heavy* ones are computed only when
somebody listens to that very name. `.{t}`: one hook point per position, made when asked for. Axes
are named; `batch` comes first, and the position axis is declared, never guessed.
"""
COLUMNS = ("hook", "axes", "role", "reach of an edit", "weight", "meaning")


def page() -> str:
    """Return the whole page."""
    sections = [HEAD]
    for architecture in MIXERS:
        rows = hook_table(architecture)
        lines = [f"## {architecture}", "", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
        lines += [_row([f"`{name}`", f"`{axes}`", *rest]) for name, axes, *rest in rows]
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    TARGET.write_text(page())

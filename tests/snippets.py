"""Code blocks of Markdown pages, run as a reader would type them: in order, into one notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

_FENCED = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", flags=re.M | re.S)


class Block(NamedTuple):
    """A fenced block: its language, what stands behind it, its text, and the line it starts at."""

    language: str
    options: str
    text: str
    line: int


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """Return a page's fenced blocks in order, of all languages if None."""
    text = page.read_text()
    found = [
        Block(m[1], m[2].strip(), m[3], text.count("\n", 0, m.start(3)))
        for m in _FENCED.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def run_python(page: Path) -> dict[str, Any]:
    """Run a page's Python blocks in one namespace, which is returned; errors point at the page."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
    return names

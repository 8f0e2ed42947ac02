"""The rows of a run's history, in memory and, line by line, on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from hooked_ssm.files import sync, write_text


class Row(TypedDict):
    """One row of the history.

    Attributes:
        step: Updates done.
        loss: Mean training loss of the updates since the row before.
        lr: Learning rate of the last of them.
        accuracy: On the evaluation set; None where the step was not evaluated.
        seconds: Spent so far, summed over resumed parts.
    """

    step: int
    loss: float
    lr: float
    accuracy: float | None
    seconds: float


class History:
    """Rows in order of steps; with a path, every row is appended to that file at once."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[Row] = []

    @property
    def last_step(self) -> int:
        """Step of the last row; 0 before the first."""
        return self.rows[-1]["step"] if self.rows else 0

    def append(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")

    def sync(self) -> None:
        """Have the disk hold every row; to be called before a checkpoint that counts on them."""
        if self.path is not None and self.path.exists():
            sync(self.path)

    def rewind(self, step: int) -> None:
        """Read the file again and drop, there too, what came after `step` or was half written."""
        if self.path is None or not self.path.exists():
            return
        self.rows = [row for row in _whole_rows(self.path) if row["step"] <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))


def _whole_rows(path: Path) -> Iterator[Row]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # a kill cut this line short: no checkpoint counts on it or on what follows

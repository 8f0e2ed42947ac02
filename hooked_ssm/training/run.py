"""The result of a training run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from hooked_ssm.errors import CheckpointError
from hooked_ssm.files import make_folder, read_json, write_json
from hooked_ssm.html_table import titled_table
from hooked_ssm.training.config import TrainConfig
from hooked_ssm.training.history import Row

COLUMNS = list(Row.__annotations__)


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """What came out of a training run; the model itself was trained in place.

    Attributes:
        config: The settings.
        accuracy: On the evaluation set after the last update: exact argmax over the vocabulary.
        chance: Accuracy of guessing among the candidates of a document, on the same task.
        steps: Updates done.
        seconds: Time spent, summed over resumed parts.
        interrupted: True if the run was stopped early; call `train` again to go on.
        rows: The history, row by row.
    """

    config: TrainConfig
    accuracy: float
    chance: float
    steps: int
    seconds: float
    interrupted: bool = False
    rows: list[Row] = field(default_factory=list, repr=False)

    @property
    def folder(self) -> Path | None:
        """Where the run is kept; None if it was not."""
        return None if self.config.folder is None else Path(self.config.folder)

    @property
    def history(self) -> pd.DataFrame:
        """The history as a table: step, loss, lr, accuracy (NaN where not evaluated), seconds."""
        table = pd.DataFrame(self.rows, columns=COLUMNS)
        return table.astype({name: "int64" if name == "step" else "float64" for name in COLUMNS})

    def save(self, folder: Path | str | None = None) -> Path:
        """Write result.json into a folder (the run's own by default), atomically.

        Raises:
            CheckpointError: The run has no folder of its own and none is given.
        """
        folder = folder or self.folder
        if folder is None:
            raise CheckpointError("this run has no folder; give one: run.save('runs/name')")
        path = Path(folder) / "result.json"
        make_folder(path.parent, "folder")
        write_json(path, {**asdict(self), "config": self.config.to_dict()})
        return path

    @classmethod
    def load(cls, folder: Path | str) -> TrainRun:
        """Read the result.json of a folder; `folder` of the result is where it was trained.

        Raises:
            CheckpointError: No result is there, or it does not fit.
        """
        path = Path(folder) / "result.json"
        values: dict[str, Any] = read_json(path)
        try:
            return cls(**{**values, "config": TrainConfig.from_dict(values["config"])})
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{path} is no result of a training run: {error}") from error

    def _repr_html_(self) -> str:
        facts = {
            "accuracy": f"{self.accuracy:.3f} (chance {self.chance:.3f})",
            "steps": f"{self.steps} of {self.config.steps}"
            + (" (interrupted)" if self.interrupted else ""),
            "seconds": f"{self.seconds:.1f}",
            "folder": str(self.folder),
        }
        return titled_table("TrainRun", pd.DataFrame.from_dict(facts, "index", columns=[""]))

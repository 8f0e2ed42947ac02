"""Sweeps whose runs take a moment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from hooked_ssm.sweeps import RunFolder, RunSpec, parse_sweep

SWEEP: dict[str, Any] = {
    "tasks": {"tiny": {"task": "associative_recall", "num_kv": 12, "num_pairs": 2}},
    "grid": {
        "architecture": ["attention", "mamba", "base_conv"],
        "d_model": 8,
        "n_layers": [1, 2],
        "lr": [1e-3, 1e-2],
        "seed": 0,
        "task": "tiny",
    },
    "train": {"steps": 2, "batch_size": 4, "eval_size": 8, "log_every": 1},
    "evaluate": {"documents": 8, "sites": ["resid_pre"]},
}


def tiny_sweep(grid: dict[str, Any] | None = None, **train: Any) -> list[RunSpec]:
    """Return the runs of SWEEP with some axes and training fields replaced."""
    changed = {"grid": {**SWEEP["grid"], **(grid or {})}, "train": {**SWEEP["train"], **train}}
    return parse_sweep({**SWEEP, **changed})


def one_run(**train: Any) -> RunSpec:
    grid = {"architecture": "mamba", "n_layers": 1, "lr": 1e-2}
    (spec,) = tiny_sweep(grid, **train)
    return spec


def result_of(folder: Path, spec: RunSpec) -> dict[str, Any]:
    """Return a run's result but for what no two attempts have in common."""
    result = RunFolder.of(folder, spec).result()
    return {name: value for name, value in result.items() if name != "seconds"}


def weights_of(folder: Path, spec: RunSpec) -> dict[str, bytes]:
    """Return the trained weights and the optimizer's state, bit by bit."""
    (checkpoint,) = RunFolder.of(folder, spec).training.glob("checkpoints/*")
    files = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    return {name: value.numpy().tobytes() for file in files for name, value in file.items()}


def history_of(folder: Path, spec: RunSpec) -> list[dict[str, Any]]:
    lines = (RunFolder.of(folder, spec).training / "history.jsonl").read_text().splitlines()
    return [{**json.loads(line), "seconds": 0} for line in lines]


def attempts(folder: Path, spec: RunSpec) -> int:
    """Return how often a run's training was started."""
    return RunFolder.of(folder, spec).log.read_text().count("training from step")


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Return as soon as the condition holds.

    Raises:
        TimeoutError: It does not hold in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("what the test waits for has not happened")
        time.sleep(0.005)

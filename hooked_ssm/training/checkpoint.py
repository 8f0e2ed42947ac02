"""Runs on disk: what a run is, and checkpoints to resume it from exactly.

    folder/config.json                the settings, the model's and the tasks': what the run *is*
    folder/history.jsonl              one row per line
    folder/checkpoints/step-00000500/ a model folder (`HookedModel.from_pretrained` reads it) with
                                      optimizer.safetensors and state.json beside it
    folder/result.json                the TrainRun, once the run has ended

A checkpoint folder appears under its name only when complete. Nothing is pickled.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from hooked_ssm.errors import CheckpointError
from hooked_ssm.files import (
    make_folder,
    new_folder,
    read_json,
    remove_folder,
    save_tensors,
    write_json,
)
from hooked_ssm.model import HookedModel
from hooked_ssm.training.config import RESULT_FREE, Keep
from hooked_ssm.training.optimizer import optimizer_names

FORMAT = 1


@dataclass(frozen=True)
class LoopState:
    """Where training stands after a whole step, weights and optimizer left out.

    Attributes:
        step: Updates done.
        seconds: Spent so far.
        stream: The state of the stream of training documents: all the randomness there is.
        pending_losses: Losses of the updates since the last row of the history.
    """

    step: int
    seconds: float
    stream: dict[str, Any]
    pending_losses: list[float]


def open_run(folder: Path, description: dict[str, Any]) -> None:
    """Write what the run is into its folder or, if it is there already, check that it is the same.

    Raises:
        CheckpointError: The folder holds another run; the message lists every differing field.
        ConfigError: It is, or lies in, a file.
    """
    make_folder(folder, "folder")
    path = folder / "config.json"
    description = json.loads(json.dumps({"format": FORMAT, **description}))
    if path.exists():
        differing = _differences(read_json(path), description)
        if differing:
            raise CheckpointError(
                f"{folder} holds a run with other settings: {'; '.join(differing)}. "
                "Use the saved settings to resume it, or another folder for a new run"
            )
    elif checkpoint_folders(folder):
        raise CheckpointError(f"{folder} has checkpoints but no config.json; use another folder")
    else:
        write_json(path, description)
    for leftover in (folder / "checkpoints").glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)


def checkpoint_folders(folder: Path | str) -> list[Path]:
    """Return the complete checkpoints of a run's folder, oldest first."""
    found = [
        p for p in (Path(folder) / "checkpoints").glob("step-*") if re.search(r"-\d+$", p.name)
    ]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def save_checkpoint(
    folder: Path, model: HookedModel, optimizer: Optimizer, state: LoopState, keep: Keep = "last"
) -> None:
    """Write the checkpoint of a step, then delete the older ones if only the last is kept.

    Does nothing if that step's checkpoint is there: training is exact, so it is the same.
    """
    path = folder / "checkpoints" / f"step-{state.step:08d}"
    if not path.exists():
        with new_folder(path) as unfinished:
            model.save_pretrained(unfinished)
            save_tensors(_optimizer_tensors(model, optimizer), unfinished / "optimizer.safetensors")
            write_json(unfinished / "state.json", {"format": FORMAT, **asdict(state)})
    if keep == "last":
        for older in checkpoint_folders(folder):
            if older != path:
                remove_folder(older)


def load_checkpoint(path: Path, model: HookedModel, optimizer: Optimizer) -> LoopState:
    """Put a checkpoint's weights and optimizer state in place, and return where training stood.

    Raises:
        CheckpointError: A file is missing or damaged, or does not fit the model.
    """
    values = read_json(path / "state.json")
    if values.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path / 'state.json'} is not of format {FORMAT}")
    try:
        state = LoopState(**values)
        weights = type(model).from_pretrained(path).state_dict()
        tensors = load_file(path / "optimizer.safetensors")
        model.load_state_dict(weights)
        _restore_optimizer(model, optimizer, tensors)
    except (OSError, SafetensorError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged or of another model: {error}. "
            "Delete that folder to resume from the one before, or from the start"
        ) from error
    return state


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    names, states = optimizer_names(model), optimizer.state_dict()["state"]
    return {
        f"{kind}.{names[number]}": tensor.contiguous()
        for number, state in states.items()
        for kind, tensor in state.items()
    }


def _restore_optimizer(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    numbers = {name: number for number, name in enumerate(optimizer_names(model))}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        state.setdefault(numbers[name], {})[kind] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _differences(saved: Any, now: Any, name: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted({*saved, *now})
            if not (name == "train" and key in RESULT_FREE)
            for line in _differences(saved.get(key), now.get(key), f"{name}.{key}".lstrip("."))
        ]
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        return [
            line
            for number, (old, new) in enumerate(zip(saved, now, strict=True))
            for line in _differences(old, new, f"{name}[{number}]")
        ]
    return [] if saved == now else [f"{name} is {saved!r} there, {now!r} here"]

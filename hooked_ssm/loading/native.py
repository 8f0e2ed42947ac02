"""Our own model folders: config.json and model.safetensors, complete at every moment.

The weights' file carries the config too, so that it is always consistent in itself; config.json is
there to be read by people and tools. Replacing a folder's model goes in three atomic steps: the
new config lands beside the old one (under the name `_PENDING`), the new weights replace the old,
the new config replaces the old. Killed before the second step it is the old model, after it the
new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import CheckpointError, ConfigError
from hooked_ssm.files import new_file, new_folder, read_json, save_tensors, sync, write_json
from hooked_ssm.loading.assemble import assemble
from hooked_ssm.loading.tables import find_layout
from hooked_ssm.model import HookedModel
from hooked_ssm.rules import shown

FORMAT = "hooked_ssm"
VERSION = 1
CONFIG, WEIGHTS, _PENDING = "config.json", "model.safetensors", ".config.json.new"


def save_pretrained(model: HookedModel, folder: str | Path) -> Path:
    """Write a model into a folder, of which a kill at any moment leaves the old or the new model.

    Other files in the folder are left alone. Saved are the config, the weights, and
    `model.token_names`; not the tokenizer, which has a `save_pretrained` of its own.

    Args:
        model: The model.
        folder: Where to; made if need be.

    Returns:
        The folder.

    Raises:
        FileError: It cannot be written there; nothing has changed.
        CheckpointError: The folder is a file, or the token names are no strings.
    """
    folder = Path(folder)
    names = _token_names(model.token_names)
    config = {
        "format": FORMAT,
        "version": VERSION,
        "model": model.cfg.to_dict(),
        "token_names": names,
    }
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    carried = {"format": "pt", FORMAT: json.dumps(config)}
    if not folder.exists():
        with new_folder(folder) as unfinished:
            unfinished.mkdir(parents=True)
            save_tensors(weights, unfinished / WEIGHTS, carried)
            write_json(unfinished / CONFIG, config)
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give a folder to save into")
    write_json(folder / _PENDING, config)
    try:
        with new_file(folder / WEIGHTS) as unfinished:
            save_tensors(weights, unfinished, carried)
    except BaseException:
        (folder / _PENDING).unlink(missing_ok=True)
        raise
    os.replace(folder / _PENDING, folder / CONFIG)
    sync(folder)
    return folder


def _token_names(names: Any) -> list[str] | None:
    """Names as a list of strings."""
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"token_names is {shown(names)}; allowed: None, or a list with a string per token"
        )
    return list(names)


def is_native(description: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of ours."""
    return description.get("format") == FORMAT


def load_native(
    folder: Path, device: torch.device | str | None, dtype: torch.dtype | None
) -> HookedModel:
    """Load a model that `save_pretrained` wrote.

    Raises:
        CheckpointError: A file is missing, damaged, of a later version, or contradicts another.
    """
    config, weights = _read(folder)
    if config.get("version") != VERSION:
        raise CheckpointError(
            f"{folder / CONFIG} has version {config.get('version')!r}, this hooked_ssm reads "
            f"{VERSION}; update hooked_ssm or save the model again"
        )
    try:
        cfg = ModelConfig.from_dict(config.get("model", {}))
        names = _token_names(config.get("token_names"))
    except (ConfigError, CheckpointError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG} describes no model: {error}") from error
    cfg = cfg.with_(
        device="cpu" if device is None else device, dtype=cfg.dtype if dtype is None else dtype
    )
    layout = find_layout("hooked_ssm", cfg, weights)
    try:
        model = assemble(weights, cfg, layout)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    model.token_names = names
    return model


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config that belongs to the weights, and the weights."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            carried = (file.metadata() or {}).get(FORMAT)
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; save the model again") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore or delete it") from error
    config = read_json(folder / CONFIG)
    if carried is None:
        return config, weights
    try:
        own = json.loads(carried)
    except ValueError as error:
        raise CheckpointError(
            f"the config inside {path} is no JSON ({error}); restore or delete it"
        ) from error
    if not isinstance(own, dict):
        raise CheckpointError(f"the config inside {path} holds no settings; restore or delete it")
    if config == own:
        return own, weights
    pending = folder / _PENDING
    if pending.exists() and read_json(pending) == own:
        return own, weights  # killed between replacing the weights and the config
    differing = _differences(config, own)
    raise CheckpointError(
        f"{folder / CONFIG} contradicts the config that {path.name} was saved with: "
        f"{'; '.join(differing)}. Undo the edit; to load the weights with other settings, use "
        "HookedModel.from_state_dict(safetensors.torch.load_file(...), cfg)"
    )


def _differences(config: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What one config says and the other does not, field by field."""
    found = []
    for name in sorted({*config, *own}):
        ours, theirs = own.get(name), config.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found += _differences(theirs, ours)
        elif ours != theirs:
            found.append(f"{name} is {theirs!r}, saved with {ours!r}")
    return found

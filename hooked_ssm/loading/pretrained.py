"""`from_pretrained`: our folders, Hugging Face folders, state-spaces folders, names on the hub."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hooked_ssm.checks import check_value
from hooked_ssm.config import Device, Dtype
from hooked_ssm.errors import CheckpointError
from hooked_ssm.files import read_json
from hooked_ssm.loading.assemble import assemble
from hooked_ssm.loading.foreign_config import config_from_hf, config_from_mamba_ssm, hf_config
from hooked_ssm.loading.native import is_native, load_native
from hooked_ssm.loading.tables import find_layout
from hooked_ssm.model import HookedModel

# In order of preference. An index lists the files that the weights are spread over.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def from_pretrained(
    folder_or_name: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> HookedModel:
    """Load a model, in eval mode, from a folder, or by its name from the Hugging Face hub.

    A folder is read without any network. It may be one that `save_pretrained` wrote, a Hugging
    Face one (config.json with model_type), or one of state-spaces/mamba's. No code in it is run.

    Args:
        folder_or_name: A folder, or what is not there as a folder and may be a name on the hub.
        device: Where to put the model; the CPU if None.
        dtype: Of the parameters; as they were saved if None.

    Raises:
        CheckpointError: There is no such folder and no such name, or what is there does not fit.
        ConfigError: device or dtype is none of torch's.
    """
    check_value("device", device, Device | None)
    check_value("dtype", dtype, Dtype | None)
    if not isinstance(folder_or_name, str | os.PathLike) or not os.fspath(folder_or_name):
        raise CheckpointError(
            f"from_pretrained({folder_or_name!r}): give a folder, or a model's name on the Hugging "
            "Face hub"
        )
    folder = Path(folder_or_name).expanduser()
    if not folder.is_dir():
        folder = _download(folder_or_name)
    description = read_json(folder / "config.json")
    if not isinstance(description, dict):
        raise CheckpointError(f"{folder / 'config.json'} holds no settings; restore it")
    if is_native(description):
        return load_native(folder, device, dtype)
    weights = read_weights(folder)
    try:
        return _foreign(description, weights, device, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _foreign(
    description: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> HookedModel:
    """Build the model that somebody else's config.json and weights are."""
    if "model_type" not in description and "n_layer" in description:
        embed = weights.get("backbone.embedding.weight")
        d_vocab = description.get("vocab_size") if embed is None else embed.shape[0]
        cfg, name = config_from_mamba_ssm(description, d_vocab), "mamba_ssm"
    else:
        cfg, name = config_from_hf(hf_config(description)), "hf"
    layout = find_layout(name, cfg, weights)
    stored = next((t.dtype for t in weights.values() if t.is_floating_point()), cfg.dtype)
    cfg = cfg.with_(
        device="cpu" if device is None else device, dtype=stored if dtype is None else dtype
    )
    return assemble(weights, cfg, layout)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder, from safetensors or .bin files, whole or in shards.

    Raises:
        CheckpointError: There are none, or a file is missing, damaged, or holds more than tensors.
    """
    name = next((name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if name is None:
        raise CheckpointError(f"{folder} holds no weights: none of {', '.join(WEIGHT_FILES)}")
    if not name.endswith(".json"):
        return _read_file(folder / name)
    index = read_json(folder / name)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{folder / name} holds no weight_map of files; restore it")
    shards = sorted(set(files.values()))
    weights: dict[str, Tensor] = {}
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{folder / name} names {shard!r}, which is outside the folder")
        weights |= _read_file(folder / shard)
    return weights


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # weights_only: nothing in the pickle is executed; mmap needs the newer, zipped format.
        mmap = zipfile.is_zipfile(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist, but the index names it") from error
    except (SafetensorError, RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch or save it again") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors; it was not executed. Save the "
            "weights as safetensors, with the program that made them"
        ) from error
    if not (isinstance(loaded, dict) and all(isinstance(t, Tensor) for t in loaded.values())):
        raise CheckpointError(f"{path} holds no mapping of names to tensors")
    return loaded


def _download(name: str | Path) -> Path:
    """Fetch a model from the Hugging Face hub (or its cache); return its folder."""
    text = os.fspath(name)
    if not _may_be_on_the_hub(text):
        raise CheckpointError(
            f"{text!r} is no folder. Give a folder that holds config.json and the weights, or a "
            "model's name on the Hugging Face hub, such as 'state-spaces/mamba-130m-hf'"
        )
    from huggingface_hub import snapshot_download  # slow to import; comes with transformers

    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    try:
        folder = Path(snapshot_download(text, allow_patterns=wanted, ignore_patterns="*/*"))
        if not any((folder / file).is_file() for file in WEIGHT_FILES):
            wanted += ["*.bin", "*.bin.index.json"]
            folder = Path(snapshot_download(text, allow_patterns=wanted, ignore_patterns="*/*"))
    except Exception as error:  # from the hub, the network or the disk: all mean the same here
        raise CheckpointError(
            f"{text!r} is no folder here, and could not be had from the Hugging Face hub "
            f"({type(error).__name__}: {error}). Give the path of a folder that holds config.json "
            "and the weights, or check the name, the network and your access on the hub"
        ) from error
    return folder


def _may_be_on_the_hub(text: str) -> bool:
    """Whether a string has the form "name" or "owner/name" and stands for nothing on this disk."""
    parts = text.split("/")
    named = all(part and not part.startswith((".", "~")) for part in parts)
    return len(parts) <= 2 and named and "\\" not in text and not os.path.exists(text)

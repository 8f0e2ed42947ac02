"""Files that are either there in full or not at all, whenever the process is killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hooked_ssm.errors import CheckpointError, ConfigError, FileError


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a hidden sibling to write; at the end it takes the name `path`, replacing any other.

    At every moment the old or the new file is there in full; after an exception, the old one.

    Raises:
        FileError: It cannot be written there.
    """
    if not path.name:
        raise FileError(f"cannot write {str(path)!r}: it is no file's name; give one")
    temporary = path.with_name(f".{path.name}.tmp")
    with _named(path):
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync(path.parent)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Have what the disk refuses say what was to be written, and why it cannot be."""
    try:
        yield
    except FileError:
        raise
    except (OSError, SafetensorError) as error:
        around = next((p for p in path.absolute().parents if p.exists()), path)
        reason = f"{around} is a file" if around.is_file() else error
        if path.is_dir() and isinstance(error, IsADirectoryError):
            reason = "it is a folder"
        raise FileError(
            f"cannot write {path}: {reason}; give a path in a folder that may be written to"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file so that at every moment its old or its new text is there in full."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that at every moment its old or its new bytes are there in full."""
    with new_file(path) as temporary:
        temporary.write_bytes(data)


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, as readable to others as its folder (the library makes it 0600)."""
    save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    path.chmod(path.parent.stat().st_mode & 0o666)


def write_json(path: Path, value: Any) -> None:
    """Write a value as strict JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        CheckpointError: The file is missing, cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON ({error}); restore or delete it") from error


def make_folder(path: Path, name: str) -> Path:
    """Make a folder, and those around it, if it is not there; return it.

    Args:
        name: What the caller calls it, for the message.

    Raises:
        ConfigError: It is, or lies in, a file, or nothing may be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{name}={str(path)!r} is, or lies in, a file; give a folder") from error
    except OSError as error:
        raise ConfigError(f"{name}={str(path)!r} cannot be made: {error.strerror}") from error
    return path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden sibling to fill; it takes the name `path`, which must be free, at the end.

    After an exception nothing is left behind; after a kill, at most the hidden sibling.

    Raises:
        FileError: It cannot be written there.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with _named(path):
        shutil.rmtree(temporary, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            for inside in [*temporary.rglob("*"), temporary]:
                sync(inside)
            os.rename(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder so that it is never seen under its name with a part of its files."""
    hidden = path.with_name(f".{path.name}.old")
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or to a folder's list of names."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder, and writes its entries itself
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

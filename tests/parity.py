"""Reads the reference fixtures (weights, inputs, outputs of independent implementations)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

FOLDER = Path(
    os.environ.get("HOOKED_SSM_PARITY", Path(__file__).parents[2] / "shared" / "parity")
).resolve()


def fixture_names(prefix: str) -> list:
    """Names of the fixtures with this prefix; one skipped parameter if the folder is absent."""
    names = sorted(path.stem for path in FOLDER.glob(f"{prefix}*.safetensors"))
    if names:
        return names
    reason = f"no parity fixtures {prefix}* in {FOLDER}; set HOOKED_SSM_PARITY"
    return [pytest.param(f"{prefix} (absent)", marks=pytest.mark.skip(reason=reason))]


@dataclass(frozen=True)
class Fixture:
    """One fixture file: `config`, `tolerance`, and its tensors by prefixed name."""

    name: str

    @cached_property
    def _read(self) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        with safe_open(FOLDER / f"{self.name}.safetensors", "pt") as file:
            return file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    @property
    def config(self) -> dict:
        return json.loads(self._read[0]["config"])

    @property
    def tolerance(self) -> dict:
        return json.loads(self._read[0]["tolerance"])

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._read[1]

    def group(self, prefix: str, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Tensors under a prefix such as `state.`, floating ones cast to `dtype`."""
        return {
            key.removeprefix(prefix): value.to(dtype)
            if dtype and value.is_floating_point()
            else value
            for key, value in self.tensors.items()
            if key.startswith(prefix)
        }

    def check(self, key: str, got: torch.Tensor) -> None:
        """Assert that `got` equals the tensor `key` at the tolerance the file states."""
        want = self.tensors[key]
        assert got.shape == want.shape, f"{self.name} {key}: got {got.shape}, want {want.shape}"
        atol, rtol = self._tolerance_of(key)
        torch.testing.assert_close(
            got.to(want.dtype), want, atol=atol, rtol=rtol, msg=lambda m: f"{self.name} {key}: {m}"
        )

    def _tolerance_of(self, key: str) -> tuple[float, float]:
        stated = self.tolerance.get(key)
        if stated is not None:
            return stated["atol"], stated["rtol"]
        size = max(self.tensors[key].abs().max().item(), 1e-30)
        relative = {"out64": 1e-9, "mid64": 1e-9, "grad64": 1e-8, "mid": 1e-5}[key.split(".")[0]]
        return relative * size, 0.0

"""Folders of other libraries, without any network, and names on the hub."""

from __future__ import annotations

import json
import pickle
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hooked_ssm import HookedModel
from hooked_ssm.errors import CheckpointError
from tests.loading.hf_models import hf_model
from tests.parity import Fixture, fixture_names

TOKENS = torch.arange(12)[None]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any attempt to open a connection fails."""

    def refuse(*_, **__):
        raise OSError("the network is blocked in this test")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def folder_of(path: Path, name: str) -> Path:
    """A Hugging Face folder with safetensors."""
    hf_model(name).save_pretrained(path)
    return path


def as_bin(folder: Path, zipped: bool = True) -> None:
    """Turn the folder's safetensors into the older pytorch_model.bin."""
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (folder / "model.safetensors").unlink()


def as_shards(folder: Path) -> None:
    """Spread the folder's safetensors over two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {key: names[i % 2] for i, key in enumerate(weights)}
    for name in names:
        save_file({k: v for k, v in weights.items() if where[k] == name}, folder / name)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FORMATS = {
    "safetensors": lambda folder: None,
    "bin": as_bin,
    "old bin": lambda folder: as_bin(folder, zipped=False),
    "shards": as_shards,
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["mamba", "gpt_neox-parallel"])
def test_a_local_hugging_face_folder(tmp_path, name, form):
    folder = folder_of(tmp_path / "hf", name)
    FORMATS[form](folder)
    in_memory = HookedModel.from_hf(hf_model(name))
    assert torch.equal(HookedModel.from_pretrained(folder)(TOKENS), in_memory(TOKENS))
    double = HookedModel.from_pretrained(str(folder), dtype=torch.float64)
    assert {p.dtype for p in double.parameters()} == {torch.float64}


@pytest.mark.parametrize("name", ["falcon_mamba", "gpt2", "llama-biases-tied"])
def test_other_families_from_a_folder(tmp_path, name):
    folder = folder_of(tmp_path / "hf", name)
    in_memory = HookedModel.from_hf(hf_model(name))
    assert torch.equal(HookedModel.from_pretrained(folder)(TOKENS), in_memory(TOKENS))


@pytest.mark.parametrize(
    "name", [*fixture_names("model_mamba_ssm_repo"), *fixture_names("model_mamba2_ssm_repo")]
)
def test_a_folder_of_state_spaces(tmp_path, name):
    fixture = Fixture(name)
    torch.save(fixture.group("state."), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(fixture.config))
    model = HookedModel.from_pretrained(tmp_path)
    with torch.no_grad():
        fixture.check("out.logits", model(fixture.tensors["in.ids"]))


def test_a_config_that_contradicts_the_weights(tmp_path):
    folder = folder_of(tmp_path / "hf", "mamba")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "state_size": 5, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError) as caught:
        HookedModel.from_pretrained(folder)
    said = str(caught.value)
    assert str(folder) in said and "n_layers=2 (the config: 3)" in said
    assert "A_log: (32, 6), but the config wants (32, 5)" in said
    assert "backbone.layers.2.mixer.A_log" in said


def test_an_unsupported_type_of_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'bert'; supported: mamba"):
        HookedModel.from_pretrained(tmp_path)


class Malicious:
    """Runs code when unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def test_code_in_a_bin_file_is_not_executed(tmp_path):
    folder = folder_of(tmp_path / "hf", "mamba")
    (folder / "model.safetensors").unlink()
    torch.save({"x": Malicious()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not executed"):
        HookedModel.from_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(CheckpointError, match="pytorch_model.bin is damaged"):
        HookedModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights_are_named(tmp_path, name):
    folder = folder_of(tmp_path / "hf", "mamba")
    if name.endswith(".bin"):
        as_bin(folder)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        HookedModel.from_pretrained(folder)


def test_a_folder_without_weights_or_config(tmp_path):
    with pytest.raises(CheckpointError, match="config.json does not exist"):
        HookedModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(CheckpointError, match="holds no weights"):
        HookedModel.from_pretrained(tmp_path)


def test_an_index_cannot_name_files_outside_the_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    index = {"weight_map": {"x": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside the folder"):
        HookedModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "~/missing/here", "a/b/c"])
def test_a_path_that_does_not_exist_never_asks_the_hub(path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    with pytest.raises(CheckpointError, match="is no folder. Give a folder.*hub") as caught:
        HookedModel.from_pretrained(path)
    assert path in str(caught.value)


def test_a_name_that_cannot_be_had_names_both_remedies(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        HookedModel.from_pretrained("nobody-at-all/nothing")
    said = str(caught.value)
    assert "'nobody-at-all/nothing' is no folder here" in said
    assert "path of a folder" in said and "check the name, the network" in said


def test_a_name_on_the_hub_is_fetched_and_read(tmp_path, monkeypatch):
    import huggingface_hub

    folder = folder_of(tmp_path / "snapshot", "mamba")
    as_bin(folder)
    asked = []

    def snapshot(name, allow_patterns, ignore_patterns):
        asked.append((name, "*.bin" in allow_patterns))
        if not asked[-1][1]:
            (folder / "pytorch_model.bin").rename(folder / "hidden")
        else:
            (folder / "hidden").rename(folder / "pytorch_model.bin")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    model = HookedModel.from_pretrained("somebody/mamba")
    assert asked == [("somebody/mamba", False), ("somebody/mamba", True)]
    assert torch.equal(model(TOKENS), HookedModel.from_hf(hf_model("mamba"))(TOKENS))

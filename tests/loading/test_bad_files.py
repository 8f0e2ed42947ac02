"""Files, state dicts and folders that do not fit are named; a failed save changes nothing."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import CheckpointError, ConfigError, FileError
from hooked_ssm.files import new_file, new_folder, write_json
from hooked_ssm.loading.foreign_config import config_from_mamba_ssm

pytestmark = pytest.mark.usefixtures("as_shipped")

CFG = ModelConfig(architecture="mamba", d_model=8, n_layers=1, d_vocab=11, n_ctx=16)


@pytest.fixture
def folder(tmp_path):
    return HookedModel(CFG).save_pretrained(tmp_path / "model")


def rewrite(folder, change) -> None:
    """Change a saved model's config, in both places that hold it."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", {"hooked_ssm": json.dumps(config)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("model"), "describes no model: .*lacks d_model"),
        (lambda c: c.update(model=[1]), "describes no model: .* got \\[1\\]"),
        (lambda c: c["model"].pop("d_vocab"), "lacks d_vocab"),
        (lambda c: c["model"].update(d_model="8"), "d_model='8'; allowed: an integer"),
        (lambda c: c["model"].update(dtype=3), "dtype=3; allowed: torch.float32"),
        (lambda c: c["model"].update(mixers="mamba"), "mixers='mamba'; allowed: a list"),
        (lambda c: c["model"].update(mixers=[{"mixer": "mine"}]), "'mine'.*register_mixer"),
        (lambda c: c.update(token_names="abc"), "token_names is 'abc'"),
        (lambda c: c.update(token_names=[1, 2]), "token_names is"),
        (lambda c: c.pop("version"), "has version None"),
    ],
)
def test_malformed_configs_of_ours_are_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message) as raised:
        HookedModel.from_pretrained(folder)
    assert ("register_mixer" in str(raised.value)) == ("mine" in message), "a hint where it helps"


@pytest.mark.parametrize("carried", ["{", "[1]", "3"])
def test_malformed_configs_inside_weights_are_named(folder, carried):
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", {"hooked_ssm": carried})
    with pytest.raises(CheckpointError, match="the config inside .* restore or delete it"):
        HookedModel.from_pretrained(folder)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{", ""])
def test_configs_that_are_no_settings_are_named(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        HookedModel.from_pretrained(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": 3}, {"weight_map": {"a": 1}}])
def test_malformed_indices_are_named(tmp_path, index):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="holds no weight_map of files"):
        HookedModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["", None, 3, ["gpt2"]])
def test_names_that_are_none_are_refused(name):
    with pytest.raises(CheckpointError, match=r"give a folder, or a model's name"):
        HookedModel.from_pretrained(name)


@pytest.mark.parametrize(
    "wanted",
    [
        {"dtype": "float32"},
        {"dtype": torch.int64},
        {"device": "bogus"},
        {"device": 0},
        {"device": ""},
        {"dtype": False},
    ],
)
def test_devices_and_dtypes_are_checked_before_anything_is_read(wanted):
    with pytest.raises(ConfigError, match=r"(dtype|device)=.*; allowed"):
        HookedModel.from_pretrained("no/such/folder", **wanted)


def test_devices_that_are_not_here_are_named():
    if torch.cuda.is_available():
        pytest.skip("every device of torch's may be here")
    with pytest.raises(ConfigError, match="device='cuda': nothing can be put there"):
        HookedModel(CFG.with_(device="cuda"))


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        ([1, 2], "maps names to tensors, got a list"),
        (None, "got a NoneType"),
        ({3: torch.zeros(2)}, "but 3 holds a Tensor"),
        ({"embed.weight": np.zeros((11, 8))}, "'embed.weight' holds a ndarray"),
        ({"state_dict": {}}, "'state_dict' holds a dict; if it holds the weights, pass that"),
    ],
)
def test_state_dicts_that_are_none_are_named(state_dict, message):
    with pytest.raises(CheckpointError, match=message):
        HookedModel.from_state_dict(state_dict, CFG)


@pytest.mark.parametrize("layout", ["zoo", 3, None])
def test_layouts_and_configs_that_are_none_are_named(layout):
    weights = HookedModel(CFG).state_dict()
    with pytest.raises(CheckpointError, match="unknown layout"):
        HookedModel.from_state_dict(weights, CFG, layout=layout)
    with pytest.raises(ConfigError, match="cfg=.*allowed: a ModelConfig"):
        HookedModel.from_state_dict(weights, {"d_model": 8})


@pytest.mark.parametrize(
    "changes",
    [
        {"d_model": "8"},
        {"n_layer": "2"},
        {"n_layer": 0},
        {"n_layer": None},
        {"ssm_cfg": [1]},
        {"ssm_cfg": {"layer": "Mamba2", "headdim": 0}},
        {"ssm_cfg": {"d_state": -1}},
        {"norm_epsilon": "x"},
        {"vocab_size": None},
    ],
)
def test_malformed_foreign_configs_are_at_fault_themselves(changes):
    description = {"d_model": 8, "n_layer": 1, "vocab_size": 11, **changes}
    with pytest.raises(CheckpointError, match="no model of mamba_ssm") as raised:
        config_from_mamba_ssm(description, description["vocab_size"])
    assert "register_mixer" not in str(raised.value)


@pytest.mark.parametrize("changes", [{"num_attention_heads": 0}, {"hidden_size": "x"}])
def test_malformed_hugging_face_configs_are_at_fault_themselves(tmp_path, changes):
    description = {"model_type": "gpt_neox", "hidden_size": 8, "num_hidden_layers": 1, **changes}
    (tmp_path / "config.json").write_text(json.dumps(description))
    save_file({"gpt_neox.embed_in.weight": torch.zeros(11, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="gpt_neox"):
        HookedModel.from_pretrained(tmp_path)


def listing(root) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


def test_a_save_below_a_file_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("kept")
    for below in (tmp_path / "file" / "model", tmp_path / "file" / "a" / "b"):
        with pytest.raises(FileError, match=r"cannot write .*file is a file; give a path in"):
            HookedModel(CFG).save_pretrained(below)
        for write in (new_file, new_folder):
            with pytest.raises(FileError, match="is a file"), write(below) as unfinished:
                unfinished.write_text("never")
        with pytest.raises(FileError, match="is a file"):
            write_json(below, {})
    with pytest.raises(CheckpointError, match="is a file; give a folder"):
        HookedModel(CFG).save_pretrained(tmp_path / "file")
    assert listing(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_a_file_is_not_written_over_a_folder_nor_where_none_is(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="cannot write .*folder: it is a folder"):
        write_json(tmp_path / "folder", {})
    with pytest.raises(FileError, match="cannot write .*x.json"):
        write_json(tmp_path / "missing" / "x.json", {})
    assert listing(tmp_path) == ["folder"]


def test_a_failed_save_leaves_the_old_model(folder, monkeypatch):
    before = {name: (folder / name).read_bytes() for name in listing(folder)}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match="No space left on device"):
        HookedModel(CFG.with_(seed=1)).save_pretrained(folder)
    monkeypatch.undo()
    assert {name: (folder / name).read_bytes() for name in listing(folder)} == before
    HookedModel.from_pretrained(folder)


def test_token_names_that_are_no_strings_are_not_saved(tmp_path):
    model = HookedModel(CFG)
    model.token_names = [1, 2]
    with pytest.raises(CheckpointError, match="allowed: None, or a list with a string per token"):
        model.save_pretrained(tmp_path / "model")
    assert listing(tmp_path) == []

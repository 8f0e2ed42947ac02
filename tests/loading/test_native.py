"""Our own folders: exact round trips, and a complete model at every moment."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.errors import CheckpointError
from hooked_ssm.loading import native
from hooked_ssm.mixers import MIXERS

LAYERS = {
    **{name: {"architecture": name, "n_heads": 2, "n_layers": 2} for name in MIXERS},
    "rotary": {"architecture": "attention", "positions": "rotary", "n_layers": 1},
    "mixed": {"mixers": ["based", {"mixer": "mamba", "d_conv": 0}, "attention"], "init": "uniform"},
    "gated": {
        "architecture": "attention",
        "n_layers": 1,
        "gated_mlp": True,
        "mlp_bias": False,
        "parallel_attn_mlp": True,
        "tie_embeddings": False,
    },
}


def build(name: str = "mamba", seed: int = 0, **changes) -> HookedModel:
    sizes = {"d_model": 16, "d_vocab": 13, "n_ctx": 32}
    return HookedModel(ModelConfig(**{**sizes, **LAYERS[name], "seed": seed, **changes}))


def same(a: HookedModel, b: HookedModel) -> bool:
    """Whether two models are one, to the last bit."""
    left, right = a.state_dict(), b.state_dict()
    return (
        a.cfg == b.cfg
        and list(left) == list(right)
        and all(left[k].dtype == right[k].dtype and torch.equal(left[k], right[k]) for k in left)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_round_trip_to_the_last_bit(tmp_path, name, dtype):
    model = build(name, dtype=dtype)
    assert model.save_pretrained(tmp_path / "model") == tmp_path / "model"
    assert sorted(os.listdir(tmp_path / "model")) == ["config.json", "model.safetensors"]
    loaded = HookedModel.from_pretrained(tmp_path / "model")
    assert same(model, loaded)
    tokens = torch.arange(11)[None]
    assert torch.equal(model(tokens), loaded(tokens))
    assert os.listdir(tmp_path) == ["model"]


def test_dtype_may_be_changed_on_the_way(tmp_path):
    build(dtype=torch.float64).save_pretrained(tmp_path / "m")
    loaded = HookedModel.from_pretrained(tmp_path / "m", dtype=torch.float32, device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert loaded.cfg.dtype == torch.float32


def test_what_is_loaded_is_ready_for_analysis(tmp_path):
    model = build()
    assert model.training  # a fresh one is ready for training
    model.save_pretrained(tmp_path / "m")
    loaded = HookedModel.from_pretrained(tmp_path / "m")
    named = HookedModel.from_state_dict(model.state_dict(), model.cfg)
    assert not any(part.training for part in (*loaded.modules(), *named.modules()))


def test_token_names_are_kept(tmp_path):
    model = build()
    model.token_names = [f"t{i}" for i in range(13)]
    loaded = HookedModel.from_pretrained(model.save_pretrained(tmp_path / "m"))
    assert loaded.to_tokens("t3 t5").tolist() == [[3, 5]]


def test_marks_on_parameters_survive(tmp_path):
    loaded = HookedModel.from_pretrained(build().save_pretrained(tmp_path / "m"))
    marked = {n for n, p in loaded.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert "blocks.0.mixer.A_log" in marked and "blocks.0.mixer.in_proj.weight" not in marked
    assert all(p.requires_grad for p in loaded.parameters())


def test_saving_anew_replaces_the_model_and_leaves_other_files(tmp_path):
    folder = build(seed=1).save_pretrained(tmp_path / "m")
    (folder / "notes.txt").write_text("mine")
    new = build("attention", seed=2)
    new.save_pretrained(folder)
    assert same(HookedModel.from_pretrained(folder), new)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "notes.txt"]


class Killed(BaseException):
    """Stands for the end of the process: nobody cleans up after it."""


def kill_at(monkeypatch, call: int) -> list[str]:
    """End the process at the n-th call that can change what is on disk under a lasting name."""
    calls: list[str] = []

    def guarded(owner, name):
        original = getattr(owner, name)

        def run(*args, **kwargs):
            if len(calls) == call:
                raise Killed
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    for owner, name in ((os, "replace"), (os, "rename"), (os, "fsync"), (native, "save_tensors")):
        guarded(owner, name)
    # A killed process runs no clean-up either.
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    return calls


@pytest.mark.parametrize("there", [False, True])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_model(tmp_path, there):
    old, new = build(seed=1), build("attention", seed=2)
    left = []
    for moment in range(100):
        folder = tmp_path / str(moment) / "m"
        folder.parent.mkdir()
        if there:
            old.save_pretrained(folder)
            (folder / "notes.txt").write_text("mine")
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, moment)
            try:
                new.save_pretrained(folder)
                finished = True
            except Killed:
                finished = False
        if there or folder.exists():
            found = HookedModel.from_pretrained(folder)
            left.append("new" if same(found, new) else "old" if same(found, old) else "broken")
        else:
            left.append("nothing")
        # Whatever was left behind does not stand in the way of the next attempt.
        new.save_pretrained(folder)
        assert same(HookedModel.from_pretrained(folder), new)
        if finished:
            break
    before = "old" if there else "nothing"
    assert left == sorted(left, key=["nothing", "old", "new"].index)
    assert set(left) == {before, "new"}
    assert finished and len(left) > 5


def test_an_exception_while_saving_leaves_the_old_model(tmp_path, monkeypatch):
    old = build(seed=1)
    folder = old.save_pretrained(tmp_path / "m")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(native, "save_tensors", full)
    with pytest.raises(OSError, match="no space"):
        build(seed=2).save_pretrained(folder)
    with pytest.raises(OSError, match="no space"):
        build(seed=2).save_pretrained(tmp_path / "other")
    assert same(HookedModel.from_pretrained(folder), old)
    assert os.listdir(tmp_path) == ["m"]


def edit(folder, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_an_edited_config_is_refused_with_what_differs(tmp_path):
    folder = build().save_pretrained(tmp_path / "m")
    edit(folder, lambda c: c["model"].update(n_ctx=99, norm_eps=1e-3))
    with pytest.raises(CheckpointError) as caught:
        HookedModel.from_pretrained(folder)
    assert "n_ctx is 99, saved with 32; norm_eps is 0.001, saved with 1e-05" in str(caught.value)


def strip_the_carried_config(folder) -> None:
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")


def test_a_config_that_contradicts_the_weights_is_refused(tmp_path):
    folder = build().save_pretrained(tmp_path / "m")
    strip_the_carried_config(folder)
    HookedModel.from_pretrained(folder)
    edit(folder, lambda c: c["model"].update(d_model=24))
    with pytest.raises(CheckpointError, match=r"d_model=16 \(the config: 24\)") as caught:
        HookedModel.from_pretrained(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["model"].update(colour="red"), "config field 'colour'"),
        (lambda c: c["model"]["mixers"][0].update(mixer="mine"), "register_mixer"),
        (lambda c: c.pop("model"), "describes no model"),
        (lambda c: c.update(version=9), "version 9"),
        (lambda c: c.update(format="other"), "model_type=None"),
    ],
)
def test_a_config_that_is_no_config_is_refused(tmp_path, change, said):
    folder = build().save_pretrained(tmp_path / "m")
    strip_the_carried_config(folder)
    edit(folder, change)
    with pytest.raises(CheckpointError, match=said):
        HookedModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_and_damaged_files_are_named(tmp_path, name):
    folder = build().save_pretrained(tmp_path / "m")
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=name):
        HookedModel.from_pretrained(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        HookedModel.from_pretrained(folder)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "m").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        build().save_pretrained(tmp_path / "m")
    with pytest.raises(CheckpointError, match="is no folder"):
        HookedModel.from_pretrained(tmp_path / "m")

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hooked_ssm import files
from hooked_ssm.errors import CheckpointError
from hooked_ssm.model import HookedModel
from hooked_ssm.tasks import AssociativeRecall
from hooked_ssm.training import TrainRun, checkpoint, checkpoint_folders, train
from tests.training.tiny import assert_same_run, tiny_config, tiny_model, tiny_run


class Killed(Exception):
    """Stands for the end of the process."""


def kill_at(monkeypatch, count: int, owner, name: str) -> None:
    """Have the `count`-th call of `owner.name` raise instead."""
    calls = 0
    original = getattr(owner, name)

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def zeroed_model() -> HookedModel:
    """A model whose own weights a resumed run must not use."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


MOMENTS = {
    "before the first update": (torch.optim.AdamW, "step", 1),
    "in the first updates": (torch.optim.AdamW, "step", 4),
    "just before a checkpoint": (torch.optim.AdamW, "step", 10),
    "just after a checkpoint": (torch.optim.AdamW, "step", 11),
    "in the last update": (torch.optim.AdamW, "step", 20),
    "weights written, optimizer not": (checkpoint, "save_tensors", 3),
    "weights of the first checkpoint written": (checkpoint, "save_tensors", 1),
    "files written, half of them synced": (files, "sync", 19),
    "complete but for its name": (os, "rename", 4),
    "deleting the older one": (checkpoint, "remove_folder", 2),
    "writing the result": (TrainRun, "save", 1),
}


CASES = [(moment, "stream") for moment in MOMENTS] + [("just after a checkpoint", "fixed")]


@pytest.mark.parametrize(("moment", "data"), CASES)
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path, monkeypatch, moment, data):
    fixed = {"data": "fixed", "train_set_size": 20} if data == "fixed" else {}
    config = tiny_config(folder=str(tmp_path), **fixed)
    owner, name, count = MOMENTS[moment]
    with monkeypatch.context() as patch:
        kill_at(patch, count, owner, name)
        with pytest.raises(Killed):
            tiny_run(config)
    for path in checkpoint_folders(tmp_path):
        assert {"model.safetensors", "optimizer.safetensors", "state.json"} <= set(names_in(path))
    assert not [path for path in (tmp_path / "checkpoints").glob(".*.tmp")]
    resumed = tiny_run(config, zeroed_model() if checkpoint_folders(tmp_path) else None)
    undisturbed = tiny_run(tiny_config(**fixed))
    assert_same_run(resumed, undisturbed)
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == resumed[0].rows
    assert names_in(tmp_path / "checkpoints") == ["step-00000020"]


KILLED_CHILD = """
import os, signal, sys, torch
from hooked_ssm.training import checkpoint
from tests.training.tiny import tiny_config, tiny_run
torch.set_num_threads(int(sys.argv[2]))
save, written = checkpoint.save_tensors, []
def save_and_die(tensors, path):
    save(tensors, path)
    written.append(path)
    if len(written) == 3:  # steps 0 and 5 are there; step 10 is half written
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save_tensors = save_and_die
tiny_run(tiny_config(folder=sys.argv[1]))
"""


def test_a_process_killed_in_the_middle_of_saving_resumes_exactly(tmp_path):
    threads = str(torch.get_num_threads())
    child = subprocess.run(
        [sys.executable, "-c", KILLED_CHILD, str(tmp_path), threads],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert names_in(tmp_path / "checkpoints") == [".step-00000010.tmp", "step-00000005"]
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-00000005"]
    resumed = tiny_run(tiny_config(folder=str(tmp_path)))
    assert_same_run(resumed, tiny_run(tiny_config()))
    assert names_in(tmp_path / "checkpoints") == ["step-00000020"]


def test_a_finished_run_is_loaded_not_repeated(tmp_path, monkeypatch):
    config = tiny_config(folder=str(tmp_path))
    first = tiny_run(config)
    kill_at(monkeypatch, 1, torch.optim.AdamW, "step")
    second = tiny_run(config, zeroed_model())
    assert_same_run(second, first)
    assert second[0].rows == first[0].rows
    assert TrainRun.load(tmp_path) == second[0]


def test_seconds_add_up_over_the_parts(tmp_path, monkeypatch):
    config = tiny_config(folder=str(tmp_path))
    with monkeypatch.context() as patch:
        kill_at(patch, 11, torch.optim.AdamW, "step")
        with pytest.raises(Killed):
            tiny_run(config)
    before = json.loads((checkpoint_folders(tmp_path)[-1] / "state.json").read_text())["seconds"]
    run, _ = tiny_run(config)
    assert run.seconds > before > 0
    assert run.history["seconds"].is_monotonic_increasing


def test_all_checkpoints_are_kept_and_are_model_folders(tmp_path):
    run, model = tiny_run(tiny_config(folder=str(tmp_path), keep_checkpoints="all"))
    found = checkpoint_folders(run.folder)
    assert [path.name for path in found] == [f"step-{step:08d}" for step in (0, 5, 10, 15, 20)]
    first, last = HookedModel.from_pretrained(found[0]), HookedModel.from_pretrained(found[-1])
    tokens = torch.tensor([[1, 3, 4, 2, 3]])
    with torch.no_grad():
        assert torch.equal(first(tokens), tiny_model()(tokens))
        assert torch.equal(last(tokens), model(tokens))


def test_another_run_in_the_folder_is_refused_field_by_field(tmp_path):
    tiny_run(tiny_config(folder=str(tmp_path)))
    with pytest.raises(CheckpointError) as caught:
        tiny_run(tiny_config(folder=str(tmp_path), lr=2e-2, loss="all"), tiny_model(seed=1))
    message = str(caught.value)
    assert "train.lr is 0.01 there, 0.02 here" in message
    assert "train.loss is 'answer' there, 'all' here" in message
    assert "model.seed" in message
    assert "train.steps" not in message and "another folder" in message
    with pytest.raises(CheckpointError, match="task.num_pairs is 2 there, 1 here"):
        train(
            tiny_model(),
            AssociativeRecall(num_kv=12, num_pairs=1),
            tiny_config(folder=str(tmp_path)),
            progress=False,
        )


def test_settings_that_change_no_result_may_differ(tmp_path):
    run, _ = tiny_run(tiny_config(folder=str(tmp_path)))
    changed = tiny_config(
        folder=str(tmp_path), checkpoint_every=7, keep_checkpoints="all", device="cpu"
    )
    assert tiny_run(changed)[0].rows == run.rows


def test_a_damaged_checkpoint_is_named(tmp_path):
    config = tiny_config(folder=str(tmp_path))
    tiny_run(config)
    path = checkpoint_folders(tmp_path)[-1]
    optimizer = path / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step-00000020 is damaged"):
        tiny_run(config)
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="state.json does not exist"):
        tiny_run(config)


def test_checkpoints_without_their_config_are_refused(tmp_path):
    config = tiny_config(folder=str(tmp_path))
    tiny_run(config)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no config.json"):
        tiny_run(config)


def test_a_line_cut_short_is_dropped_from_the_history(tmp_path):
    config = tiny_config(folder=str(tmp_path))
    run, _ = tiny_run(config)
    path = tmp_path / "history.jsonl"
    path.write_text(path.read_text() + '{"step": 21, "lo')
    assert tiny_run(config)[0].rows == run.rows
    assert path.read_text().endswith("}\n")


def test_nothing_on_disk_is_pickled(tmp_path):
    tiny_run(tiny_config(folder=str(tmp_path)))
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors"}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "value.json"
    files.write_json(path, {"value": 1})
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        files.write_json(path, {"value": 2})
    assert files.read_json(path) == {"value": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(path, {"value": float("nan")})
    assert files.read_json(path) == {"value": 1}


def test_a_folder_that_fails_to_fill_leaves_nothing(tmp_path):
    with pytest.raises(Killed), files.new_folder(tmp_path / "new") as unfinished:
        unfinished.mkdir()
        (unfinished / "half").write_text("x")
        raise Killed
    assert names_in(tmp_path) == []

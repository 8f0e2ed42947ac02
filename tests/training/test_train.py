from __future__ import annotations

import math
import os
import signal
import threading

import pandas as pd
import pytest
import torch

from hooked_ssm.errors import CheckpointError, ConfigError
from hooked_ssm.tasks import AssociativeRecall
from hooked_ssm.training import DivergedError, TrainRun, learning_rate, train
from tests.training.tiny import TASK, assert_same_run, tiny_config, tiny_model, tiny_run


def test_history_has_a_row_wherever_one_is_due():
    config = tiny_config()
    run, model = tiny_run(config)
    history = run.history
    assert list(history.columns) == ["step", "loss", "lr", "accuracy", "seconds"]
    assert history["step"].tolist() == [3, 6, 7, 9, 12, 14, 15, 18, 20]
    assert history["step"][history["accuracy"].notna()].tolist() == [7, 14, 20]
    assert history["lr"].tolist() == [learning_rate(s - 1, config) for s in history["step"]]
    assert history["seconds"].is_monotonic_increasing
    assert run.accuracy == history["accuracy"].iloc[-1]
    assert (run.steps, run.interrupted, run.folder) == (20, False, None)
    assert run.chance == TASK.chance
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_row_holds_the_mean_loss_since_the_row_before():
    every = tiny_run(tiny_config(log_every=1))[0].history["loss"]
    some = tiny_run(tiny_config(log_every=3))[0].history
    assert some["loss"][0] == pytest.approx(every[0:3].mean(), rel=1e-12)
    assert some["loss"][2] == pytest.approx(every[6], rel=1e-12)  # step 7 alone, an evaluation
    assert some["loss"][3] == pytest.approx(every[7:9].mean(), rel=1e-12)


def test_training_learns():
    run, _ = tiny_run(tiny_config(steps=150, warmup=0.0, schedule="constant", loss="all"))
    assert run.history["loss"].iloc[-1] < 0.7 * run.history["loss"].iloc[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 4},
        {"loss": "all"},
        {"data": "fixed", "train_set_size": 8},
        {"clip_norm": 0.01, "lr": 2e-2},
        {"weight_decay": 0.0},
        {"schedule": "constant"},
    ],
)
def test_settings_take_effect(changes):
    _, plain = tiny_run(tiny_config())
    _, changed = tiny_run(tiny_config(**changes))
    pairs = zip(plain.parameters(), changed.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_a_run_repeats_bit_by_bit_and_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    first = tiny_run(tiny_config())
    torch.manual_seed(2)
    model = tiny_model()
    before = torch.random.get_rng_state()
    second = tiny_run(tiny_config(), model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_same_run(second, first)


def test_gradients_left_by_the_caller_do_not_count():
    model = tiny_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert_same_run(tiny_run(tiny_config(), model), tiny_run(tiny_config()))


def test_evaluation_does_not_change_training():
    _, often = tiny_run(tiny_config(eval_every=1))
    _, once = tiny_run(tiny_config(eval_every=1000))
    pairs = zip(often.parameters(), once.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_evaluation_uses_the_documents_that_ask_once():
    asked = []

    class Spy(AssociativeRecall):
        def sample(self, n, split="train", *, generator):
            asked.append((self.num_queries, split))
            return super().sample(n, split, generator=generator)

    task = Spy(num_kv=12, num_pairs=2, num_queries=2)
    model = tiny_model()
    run = train(model, task, tiny_config(steps=1, eval_split="test"), progress=False)
    assert sorted(set(asked)) == [(1, "test"), (2, "train")]
    assert run.chance == task.single_query().chance
    other = AssociativeRecall(num_kv=12, num_pairs=1)
    run = train(model, task, tiny_config(steps=1), eval_task=other, progress=False)
    assert run.chance == other.chance


def test_autocast_keeps_parameters_float32_and_the_loss_finite():
    run, model = tiny_run(tiny_config(steps=50, autocast="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert run.history["loss"].map(math.isfinite).all()
    plain, _ = tiny_run(tiny_config(steps=50))
    assert run.history["loss"].tolist() != plain.history["loss"].tolist()
    assert run.history["loss"].tolist() == pytest.approx(plain.history["loss"].tolist(), rel=0.1)


def test_a_small_vocabulary_is_refused():
    task = AssociativeRecall(num_kv=14, num_pairs=2)
    with pytest.raises(ConfigError, match="build the model with d_vocab=17"):
        train(tiny_model(), task, tiny_config(), progress=False)


class Bomb(AssociativeRecall):
    """Calls `boom` when asked for batch number `at`, and for every later one."""

    name = "bomb"

    def sample(self, n, split="train", *, generator):
        self.__dict__["drawn"] = self.__dict__.get("drawn", 0) + (split == "train")
        if split == "train" and self.__dict__["drawn"] == self.__dict__["at"]:
            self.__dict__["boom"]()
        return super().sample(n, split, generator=generator)


def bomb(at: int, boom) -> Bomb:
    task = Bomb(num_kv=12, num_pairs=2)
    task.__dict__.update(at=at, boom=boom)
    return task


def spoil(model) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)


def test_a_nan_loss_is_reported_with_its_step_and_a_remedy(tmp_path):
    model = tiny_model()
    config = tiny_config(folder=str(tmp_path), log_every=4, eval_every=100)
    with pytest.raises(DivergedError, match="loss of step 11 is nan.*step-00000010.*clip_norm"):
        train(model, bomb(11, lambda: spoil(model)), config, progress=False)
    assert not model.training


def test_weights_spoilt_by_the_last_update_are_not_saved(tmp_path):
    model = tiny_model()
    config = tiny_config(folder=str(tmp_path), steps=4, lr=1e38)
    with pytest.raises(DivergedError, match="weights after step|loss of step"):
        train(model, TASK, config, progress=False)
    assert not (tmp_path / "result.json").exists()


def sigint() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("as_in_a_terminal")
@pytest.mark.parametrize("boom", [sigint, raise_interrupt])
def test_an_interrupt_keeps_what_was_done_and_can_be_resumed(tmp_path, boom):
    model = tiny_model()
    config = tiny_config(folder=str(tmp_path))
    run = train(model, bomb(12, boom), config, progress=False)
    done = 12 if boom is sigint else 11  # a signal waits for the end of the step
    assert (run.interrupted, run.steps) == (True, done)
    assert 0 <= run.accuracy <= 1
    assert not model.training
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    assert TrainRun.load(tmp_path).interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = train(model, bomb(0, boom), config, progress=False)
    assert not resumed.interrupted
    assert_same_run((resumed, model), tiny_run(tiny_config()))


@pytest.mark.usefixtures("as_in_a_terminal")
def test_a_second_interrupt_does_not_wait():
    ticks = []

    def twice() -> None:
        sigint()
        ticks.append("after the first")
        sigint()
        ticks.append("after the second")

    run = train(tiny_model(), bomb(3, twice), tiny_config(), progress=False)
    assert ticks == ["after the first"]
    assert (run.interrupted, run.steps) == (True, 2)


def test_training_works_outside_the_main_thread():
    runs = []
    thread = threading.Thread(target=lambda: runs.append(tiny_run(tiny_config())))
    thread.start()
    thread.join()
    assert_same_run(runs[0], tiny_run(tiny_config()))


def test_progress_bar_shows_loss_and_accuracy(capsys):
    train(tiny_model(), TASK, tiny_config(), progress=True)
    shown = capsys.readouterr().err
    assert "20/20" in shown and "loss=" in shown and "accuracy=" in shown
    tiny_run(tiny_config())
    assert capsys.readouterr() == ("", "")


def test_result_saves_loads_and_shows(tmp_path):
    run, _ = tiny_run(tiny_config())
    with pytest.raises(CheckpointError, match="has no folder"):
        run.save()
    path = run.save(tmp_path / "new")
    assert path.name == "result.json"
    loaded = TrainRun.load(tmp_path / "new")
    assert loaded == run
    pd.testing.assert_frame_equal(loaded.history, run.history)
    assert f"{run.accuracy:.3f}" in run._repr_html_() and "20 of 20" in run._repr_html_()


def test_a_missing_or_foreign_result_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="result.json does not exist"):
        TrainRun.load(tmp_path)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no result of a training run"):
        TrainRun.load(tmp_path)
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(CheckpointError, match="is no JSON"):
        TrainRun.load(tmp_path)

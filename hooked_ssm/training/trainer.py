"""The training loop: one function, for every model and every task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError, DivergedError
from hooked_ssm.model import HookedModel
from hooked_ssm.progress import tqdm
from hooked_ssm.tasks import FixedSet, Stream, Task, TaskBatch
from hooked_ssm.training.checkpoint import (
    LoopState,
    checkpoint_folders,
    load_checkpoint,
    open_run,
    save_checkpoint,
)
from hooked_ssm.training.config import TrainConfig, derived_seed
from hooked_ssm.training.history import History
from hooked_ssm.training.interrupt import deferred_interrupt
from hooked_ssm.training.loss import answer_accuracy, training_loss
from hooked_ssm.training.optimizer import build_optimizer, learning_rate
from hooked_ssm.training.run import TrainRun


@checked
def train(
    model: HookedModel,
    task: Task,
    config: TrainConfig,
    *,
    eval_task: Task | None = None,
    progress: bool = True,
) -> TrainRun:
    """Train a model on a task, in place, and return how it went. The model is left in eval mode.

    With `config.folder` the run is kept on disk. The same call resumes it after a kill, and the
    resumed run equals an undisturbed one bit by bit, history included (seconds aside; on CUDA as
    far as its kernels are deterministic). A run that had ended is loaded, not repeated. Ctrl-C
    ends the current step, writes a checkpoint and returns the run so far. The global random state
    is neither read nor changed.

    Args:
        model: Hooks attached to it act during training.
        eval_task: What to evaluate on; None: `task.single_query()`, the documents that ask once.
        progress: Show a progress bar.

    Raises:
        ConfigError: The model's vocabulary is smaller than the task's, or nothing is trainable.
        CheckpointError: The folder holds another run, or a damaged one.
        DivergedError: The loss or the weights became infinite or NaN.
    """
    loop = _Loop(model, task, config, eval_task or task.single_query())
    try:
        return loop.run(progress)
    finally:
        loop.optimizer.zero_grad()
        model.eval()


class _Loop:
    """A run in progress. Its state changes in `_update` alone, by one whole step at a time."""

    def __init__(
        self, model: HookedModel, task: Task, config: TrainConfig, eval_task: Task
    ) -> None:
        _check_vocabulary(model, task, eval_task)
        self.model = model if config.device is None else model.to(config.device)
        self.config, self.task, self.eval_task = config, task, eval_task
        self.device = next(model.parameters()).device
        self.optimizer = build_optimizer(model, config)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.stream = training_stream(task, config)
        self.documents = _evaluation_set(eval_task, config)
        self.folder = None if config.folder is None else Path(config.folder)
        self.history = History(self.folder and self.folder / "history.jsonl")
        self.step = 0
        self.pending_losses: list[Tensor] = []
        self.stream_state = self.stream.state_dict()
        self.seconds_before, self.started = 0.0, time.perf_counter()
        self.updating = False

    def run(self, progress: bool) -> TrainRun:
        if self.folder is not None:
            self._resume(self.folder)
        with deferred_interrupt() as interrupted, self._bar(progress) as show:
            try:
                self._work(interrupted, show)
            except KeyboardInterrupt:  # raised by code that the model or the task runs
                if self.updating:
                    raise  # these weights belong to no step; the last checkpoint stands
            return self._finish()

    def _work(self, interrupted: Callable[[], bool], show: Callable[[], None]) -> None:
        config = self.config
        self.model.train()
        while True:
            if self.step > self.history.last_step and self._row_is_due():
                self._add_row()
            if self.step % config.checkpoint_every == 0 or self.step == config.steps:
                self._checkpoint()
            show()
            if self.step == config.steps or interrupted():
                return
            self._update()

    def _update(self) -> None:
        """Do one step: draw documents, compute gradients, change the weights."""
        config = self.config
        batch = self.stream.next(config.batch_size).trim().to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.autocast is not None):
            loss = training_loss(self.model, batch, config.loss)
        self.optimizer.zero_grad()
        loss.backward()
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, config)
        self.updating = True
        self.optimizer.step()
        self.pending_losses.append(loss.detach())
        self.stream_state = self.stream.state_dict()
        self.step += 1
        self.updating = False

    def _row_is_due(self) -> bool:
        return self.step % self.config.log_every == 0 or self._evaluation_is_due()

    def _evaluation_is_due(self) -> bool:
        return self.step % self.config.eval_every == 0 or self.step == self.config.steps

    def _add_row(self) -> None:
        losses = self._read_losses()
        accuracy = self._accuracy() if self._evaluation_is_due() else None
        self.history.append(
            {
                "step": self.step,
                "loss": sum(losses) / len(losses),
                "lr": learning_rate(self.step - 1, self.config),
                "accuracy": accuracy,
                "seconds": self._seconds(),
            }
        )
        self.pending_losses = []

    def _read_losses(self) -> list[float]:
        """Return the losses since the last row: the only place where the device is waited for.

        Raises:
            DivergedError: One of them is not finite.
        """
        if not self.pending_losses:
            return []
        losses = torch.stack(self.pending_losses)
        finite = losses.isfinite()
        if not bool(finite.all()):
            first = self.step - len(losses) + 1 + int(finite.int().argmin())
            raise self._diverged(f"the loss of step {first} is {losses[~finite][0].item()}")
        return losses.tolist()

    def _require_finite_weights(self) -> None:
        # The losses so far can be finite while the last update has spoilt the weights
        norms = torch.stack([p.detach().abs().sum(dtype=torch.float64) for p in self.parameters])
        if not bool(norms.isfinite().all()):
            raise self._diverged(f"the weights after step {self.step} are not finite")

    def _diverged(self, what: str) -> DivergedError:
        config = self.config
        saved = checkpoint_folders(self.folder) if self.folder else []
        kept = f"The last checkpoint, {saved[-1]}, is sound. " if saved else ""
        return DivergedError(
            f"{what}. {kept}Lower lr (now {config.lr:g}), set clip_norm (now {config.clip_norm}) "
            f"to 1.0, or raise warmup (now {config.warmup:g}), in a new folder"
        )

    def _accuracy(self) -> float:
        return answer_accuracy(
            self.model,
            self.documents,
            position=self.eval_task.answer_position,
            batch_size=self.config.batch_size,
        )

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def _checkpoint(self) -> None:
        self._require_finite_weights()
        if self.folder is None:
            return
        self.history.sync()
        state = LoopState(self.step, self._seconds(), self.stream_state, self._read_losses())
        save_checkpoint(
            self.folder, self.model, self.optimizer, state, self.config.keep_checkpoints
        )

    def _resume(self, folder: Path) -> None:
        open_run(
            folder,
            {
                "train": self.config.to_dict(),
                "model": self.model.cfg.to_dict(),
                "task": self.task.to_json(),
                "eval_task": self.eval_task.to_json(),
            },
        )
        saved = checkpoint_folders(folder)
        if saved:
            state = load_checkpoint(saved[-1], self.model, self.optimizer)
            self.step, self.seconds_before = state.step, state.seconds
            self.stream.load_state_dict(state.stream)
            self.stream_state = state.stream
            self.pending_losses = [
                torch.tensor(loss, device=self.device) for loss in state.pending_losses
            ]
        self.history.rewind(self.step)

    def _finish(self) -> TrainRun:
        done = self.step == self.config.steps
        if not done:
            self._checkpoint()
        last = self.history.rows[-1]["accuracy"] if done else None
        run = TrainRun(
            config=self.config,
            accuracy=self._accuracy() if last is None else last,
            chance=self.eval_task.chance,
            steps=self.step,
            seconds=self._seconds(),
            interrupted=not done,
            rows=self.history.rows,
        )
        if self.folder is not None:
            run.save()
        return run

    @contextmanager
    def _bar(self, progress: bool) -> Iterator[Callable[[], None]]:
        """Yield a function that updates the bar, which is redrawn at most 5 times a second."""
        with tqdm(
            total=self.config.steps, initial=self.step, disable=not progress, mininterval=0.2
        ) as bar:
            yield lambda: self._show(bar)

    def _show(self, bar: tqdm) -> None:
        if bar.disable:
            return
        if self.history.rows and self.history.last_step == self.step:
            accuracies = [r["accuracy"] for r in self.history.rows if r["accuracy"] is not None]
            shown = {"loss": f"{self.history.rows[-1]['loss']:.3f}"}
            shown |= {"accuracy": f"{accuracies[-1]:.3f}"} if accuracies else {}
            bar.set_postfix(shown, refresh=False)
        bar.update(self.step - bar.n)


def training_stream(task: Task, config: TrainConfig) -> Stream | FixedSet:
    """Return the documents that a run trains on, from the first one."""
    if config.train_set_size is None:
        return Stream(task, derived_seed(config.seed, "training stream"))
    return FixedSet(task, config.train_set_size, derived_seed(config.seed, "training set"))


def _evaluation_set(task: Task, config: TrainConfig) -> TaskBatch:
    generator = torch.Generator().manual_seed(derived_seed(config.seed, "evaluation set"))
    return task.sample(config.eval_size, config.eval_split, generator=generator)


def _check_vocabulary(model: HookedModel, *tasks: Task) -> None:
    needed = max(task.d_vocab for task in tasks)
    if model.cfg.d_vocab < needed:
        raise ConfigError(
            f"the model's vocabulary has {model.cfg.d_vocab} tokens, but the task needs {needed}; "
            f"build the model with d_vocab={needed}"
        )

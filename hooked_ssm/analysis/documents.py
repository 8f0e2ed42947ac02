"""What scores are measured on: documents, where answers are read in them, and how well."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_ssm.analysis.detection import detection_pattern
from hooked_ssm.checks import Count, checked
from hooked_ssm.errors import TaskError
from hooked_ssm.model import HookedModel
from hooked_ssm.tasks import InductionSequences, Task, TaskBatch
from hooked_ssm.tasks.base import IGNORE_INDEX, SPECIAL_TOKENS, Split

LONGEST_PERIOD = 16

Given = Task | TaskBatch | Int[Tensor, "batch pos"] | None
"""What describes documents; see `as_documents`."""


class Documents(NamedTuple):
    """Documents, and what must be predicted where.

    Attributes:
        tokens: [batch, pos]
        answers: The token to predict at each position, IGNORE_INDEX where none is asked.
        mask: False at padding; None if every token is real. [batch, pos]
    """

    tokens: Int[Tensor, "batch pos"]
    answers: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None

    @property
    def asked(self) -> Bool[Tensor, "batch pos"]:
        """Where an answer is read."""
        return self.answers != IGNORE_INDEX


class Behaviour(NamedTuple):
    """Means over each document's answers; NaN for documents without any."""

    probability: Float[Tensor, " batch"]
    accuracy: Float[Tensor, " batch"]


def evaluation_batch(
    model: HookedModel,
    task: Task,
    batch: TaskBatch | None,
    n: int,
    split: Split,
    generator: torch.Generator,
) -> TaskBatch:
    """Return the documents to evaluate on, given or drawn, on the model's device.

    Raises:
        TaskError: The batch is empty, or lacks a position that the task names; or the model's
            vocabulary lacks tokens of the task.
    """
    check_vocabulary(model, task)
    if batch is None:
        batch = task.sample(n, split, generator=generator)
    missing = [name for name in task.position_names if name not in batch.positions]
    if not len(batch) or missing:
        raise TaskError(
            f"batch has {len(batch)} documents with positions {', '.join(batch.positions)}; "
            f"allowed: at least one document with all of {', '.join(task.position_names)}, such as "
            "task.sample(n, generator=generator)"
        )
    return batch.trim().to(model.embed.weight.device)


def check_vocabulary(model: HookedModel, task: Task) -> None:
    """Refuse a task whose documents hold tokens that the model does not know.

    Raises:
        TaskError: The task's d_vocab is larger than the model's.
    """
    if task.d_vocab > model.cfg.d_vocab:
        raise TaskError(
            f"the task needs d_vocab={task.d_vocab}, but the model's is {model.cfg.d_vocab}; pass "
            "the task that the model was trained on, or build the model with "
            f"d_vocab={task.d_vocab}"
        )


@checked
def as_documents(
    model: HookedModel,
    given: Given,
    n: Count,
    generator: torch.Generator,
) -> Documents:
    """Return documents on the model's device, from whatever describes them.

    Args:
        given: A task (n documents of split "test" are drawn), a batch of one, tokens [batch, pos],
            or None: `InductionSequences` over the model's vocabulary. Tokens alone ask for in-
            context copies: an answer is read wherever a token came before and is followed by what
            followed it last time.
    """
    if given is None:
        given = induction_task(model)
    if isinstance(given, Task):
        check_vocabulary(model, given)
        given = given.sample(n, "test", generator=generator)
    device = model.embed.weight.device
    if isinstance(given, TaskBatch):
        if not len(given):
            raise TaskError("documents is a batch without documents; pass at least one")
        batch = given.trim().to(device)
        mask = None if bool(batch.mask.all()) else batch.mask
        return Documents(batch.tokens, batch.labels, mask)
    tokens = given.to(device)
    return Documents(tokens, copies(tokens), None)


def induction_task(model: HookedModel) -> InductionSequences:
    """Return the repeated random sequences that fit the model's vocabulary and context.

    Raises:
        TaskError: The vocabulary or the context is too small for any.
    """
    num_tokens = model.cfg.d_vocab - len(SPECIAL_TOKENS)
    period = min(LONGEST_PERIOD, num_tokens, (model.cfg.n_ctx - 1) // 2)
    if period < 2:
        raise TaskError(
            f"d_vocab={model.cfg.d_vocab} and n_ctx={model.cfg.n_ctx} leave no room for repeated "
            "sequences; pass documents of your own"
        )
    return InductionSequences(num_tokens=num_tokens, period=period)


def copies(tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Return, at each token that came before, its next token if that is what followed last time.

    IGNORE_INDEX elsewhere.
    """
    after = detection_pattern(tokens, "induction")
    length = tokens.shape[1]
    index = torch.arange(length, device=tokens.device)
    latest = torch.where(after, index, -1).amax(-1)
    followed = tokens.gather(1, latest.clamp(min=0))
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
    return torch.where((latest >= 0) & (followed == following), following, IGNORE_INDEX)


def behaviour(logits: Float[Tensor, "asked d_vocab"], documents: Documents) -> Behaviour:
    """Read probability and accuracy of the answers off the logits at `documents.asked`."""
    asked = documents.asked
    answer = documents.answers[asked]
    log = torch.log_softmax(logits.double(), dim=-1)
    probability = log.gather(-1, answer[:, None])[:, 0].exp()
    right = (logits.argmax(-1) == answer).double()
    document = asked.nonzero()[:, 0]
    counts = asked.sum(1).double()

    def mean(x: Tensor) -> Tensor:
        return x.new_zeros(len(asked)).index_add(0, document, x) / counts

    return Behaviour(mean(probability), mean(right))


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Mean over documents and its standard error, without those that have no number."""
    x = x[~x.isnan()].double()
    if len(x) == 0:
        return float("nan"), float("nan")
    error = float(x.std() / len(x) ** 0.5) if len(x) > 1 else float("nan")
    return float(x.mean()), error

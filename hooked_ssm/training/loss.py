"""What is trained on and what is counted: the two losses, and exact accuracy on the answer."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from hooked_ssm.errors import ConfigError
from hooked_ssm.tasks import IGNORE_INDEX, TaskBatch
from hooked_ssm.training.config import Loss


def training_loss(model: nn.Module, batch: TaskBatch, loss: Loss) -> Float[Tensor, ""]:
    """Return the mean cross-entropy over the labelled positions, in float32.

    loss = mean over {(i, t): labels[i, t] != -100} of -log softmax(logits[i, t])[labels[i, t]]

    "answer" takes the batch's own labels, "all" every next token. Logits are computed at the
    labelled positions only, which saves most of the unembedding for large vocabularies.

    Raises:
        ConfigError: No position of the batch has a label.
    """
    labels = batch.labels if loss == "answer" else batch.all_labels()
    labelled = labels != IGNORE_INDEX
    targets = labels[labelled]
    if targets.numel() == 0:
        raise ConfigError(f"loss={loss!r} finds no label in a batch of {len(batch)} documents")
    logits = model(batch.tokens, logit_positions=labelled)
    return functional.cross_entropy(logits.float(), targets)


@torch.no_grad()
def answer_accuracy(
    model: nn.Module, documents: TaskBatch, *, position: str = "query_item", batch_size: int = 256
) -> float:
    """Return the fraction of documents whose answer is the argmax over the whole vocabulary.

    The model is run in eval mode, outside autocast, and put back into the mode it was in.

    Args:
        documents: On any device; moved to the model's batch by batch.
        position: Name of the position where the answer is predicted.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=device)
    try:
        for start in range(0, len(documents), batch_size):
            batch = documents[start : start + batch_size].trim().to(device)
            where = batch.positions[position].unsqueeze(1)
            logits = model(batch.tokens, logit_positions=where)
            correct += (logits[:, 0].argmax(dim=-1) == batch.answer).sum()
    finally:
        model.train(was_training)
    return int(correct) / len(documents)

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hooked_ssm.errors import ConfigError
from hooked_ssm.tasks import IGNORE_INDEX, TaskBatch
from hooked_ssm.training import answer_accuracy, training_loss

TOKENS = torch.tensor([[1, 3, 4, 2], [1, 4, 0, 0]])
LOGITS = torch.arange(40.0).reshape(2, 4, 5).sin() * 3


class Table(nn.Module):
    """Returns LOGITS (or others) whatever the tokens are; remembers where it was asked."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.clone())

    def forward(self, tokens, logit_positions):
        self.asked = logit_positions
        self.mode = self.training
        if logit_positions.dtype == torch.bool:
            return self.logits[logit_positions]
        rows = torch.arange(len(tokens)).unsqueeze(1)
        return self.logits[rows, logit_positions]


def batch(labels: list[list[int]]) -> TaskBatch:
    return TaskBatch(
        tokens=TOKENS,
        labels=torch.tensor(labels),
        answer=torch.tensor([2, 4]),
        positions={"query_item": torch.tensor([2, 0])},
        lengths=torch.tensor([4, 2]),
    )


ANSWERS = batch([[-100, -100, 2, -100], [4, -100, -100, -100]])


def surprise(document: int, pos: int, token: int) -> float:
    scores = LOGITS[document, pos].tolist()
    return math.log(sum(math.exp(score) for score in scores)) - scores[token]


def test_answer_loss_by_hand():
    model = Table(LOGITS)
    loss = training_loss(model, ANSWERS, "answer")
    assert loss.item() == pytest.approx((surprise(0, 2, 2) + surprise(1, 0, 4)) / 2, rel=1e-5)
    assert model.asked.tolist() == [[False, False, True, False], [True, False, False, False]]


def test_all_loss_by_hand():
    loss = training_loss(Table(LOGITS), ANSWERS, "all")
    # document 0 predicts 3, 4, 2; document 1 predicts 4 and nothing inside its padding
    want = [surprise(0, 0, 3), surprise(0, 1, 4), surprise(0, 2, 2), surprise(1, 0, 4)]
    assert loss.item() == pytest.approx(sum(want) / 4, rel=1e-5)


def test_gradients_reach_only_labelled_positions():
    model = Table(LOGITS)
    training_loss(model, ANSWERS, "answer").backward()
    touched = model.logits.grad.abs().sum(-1) > 0
    assert touched.tolist() == [[False, False, True, False], [True, False, False, False]]


def test_no_label_at_all_is_refused():
    with pytest.raises(ConfigError, match="finds no label"):
        training_loss(Table(LOGITS), batch([[IGNORE_INDEX] * 4] * 2), "answer")


def test_accuracy_is_argmax_over_the_whole_vocabulary():
    logits = torch.zeros(2, 4, 5)
    logits[0, 2, 2] = 1.0  # right: document 0 answers 2 at position 2
    logits[1, 0, 4] = 1.0  # 4 would be right at position 0 ...
    logits[1, 0, 1] = 1.5  # ... but a token that is no candidate scores higher
    model = Table(logits).train()
    assert answer_accuracy(model, ANSWERS) == 0.5
    assert answer_accuracy(model, ANSWERS, batch_size=1) == 0.5
    assert model.training and not model.mode, "evaluated in eval mode, then put back"

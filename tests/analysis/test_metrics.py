"""Metrics against their formulas, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm.analysis import metrics
from hooked_ssm.errors import ConfigError, ShapeError

LOGITS = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 0.0]], dtype=torch.float64)
ANSWERS = torch.tensor([2, 0])


def test_logit_difference_with_one_and_several_wrong_answers() -> None:
    one = metrics.logit_difference(ANSWERS, torch.tensor([0, 2]))
    assert one(LOGITS).tolist() == [3.0, 2.0]
    several = metrics.logit_difference(ANSWERS, torch.tensor([[0, 1], [1, 2]]))
    assert several(LOGITS).tolist() == [2.5, 1.0]


def test_probability_and_its_logarithm() -> None:
    odds = LOGITS.exp() / LOGITS.exp().sum(-1, keepdim=True)
    want = torch.stack([odds[0, 2], odds[1, 0]])
    torch.testing.assert_close(metrics.probability(ANSWERS)(LOGITS), want)
    torch.testing.assert_close(metrics.log_probability(ANSWERS)(LOGITS), want.log())


def test_kl_is_zero_on_the_reference_and_hand_worked_elsewhere() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)
    metric = metrics.kl(reference.log())
    torch.testing.assert_close(metric(reference.log()), torch.zeros(2, dtype=torch.float64))
    got = metric(torch.tensor([[0.25, 0.75], [0.9, 0.1]], dtype=torch.float64).log())
    want = 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log()
    torch.testing.assert_close(got, torch.tensor([want, 0.0], dtype=torch.float64))


def test_rank_and_accuracy() -> None:
    assert metrics.rank(torch.tensor([1, 0]))(LOGITS).tolist() == [1.0, 0.0]
    assert metrics.accuracy(torch.tensor([1, 0]))(LOGITS).tolist() == [0.0, 1.0]


def test_recovery_takes_means_first() -> None:
    patched = torch.tensor([[1.0, 3.0], [0.0, 0.0]])
    got = metrics.normalised_recovery(patched, torch.tensor([0.0, 0.0]), torch.tensor([4.0, 0.0]))
    assert got.tolist() == [1.0, 0.0]


def test_user_functions_and_names() -> None:
    def spread(logits: torch.Tensor) -> torch.Tensor:
        return logits.max(-1).values - logits.min(-1).values

    named = metrics.named_metrics(spread, 2)
    assert list(named) == ["spread"]
    assert metrics.measure(named, LOGITS).tolist() == [[3.0, 2.0]]
    both = metrics.named_metrics({"a": spread, "b": metrics.rank(ANSWERS)}, 2)
    assert metrics.measure(both, LOGITS).shape == (2, 2)


@pytest.mark.usefixtures("as_shipped")
def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="built for 2 documents, but 3 are run"):
        metrics.named_metrics(metrics.rank(ANSWERS), 3)
    with pytest.raises(ShapeError, match=r"takes logits \[2, d_vocab\], got \[1, 3\]"):
        metrics.rank(ANSWERS)(LOGITS[:1])
    with pytest.raises(ShapeError, match="one number for each of the 2 documents"):
        metrics.measure({"mean": torch.mean}, LOGITS)
    with pytest.raises(ConfigError, match="a mapping from names"):
        metrics.named_metrics({}, 2)
    with pytest.raises(ShapeError, match="wrong is .* but it is 2 in answers"):
        metrics.logit_difference(ANSWERS, torch.tensor([0]))

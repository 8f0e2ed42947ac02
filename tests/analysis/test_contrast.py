"""A share of no difference is said to be one: by a warning, and by the means in the title."""

from __future__ import annotations

import math

import pytest
import torch

from hooked_ssm import analysis
from hooked_ssm.analysis.contrast import is_weak, warn_of_weak_contrast
from tests.analysis.test_patching import difference, pair
from tests.models import tiny

MODEL = tiny("attention-2heads").eval()
CLEAN, CORRUPTED = pair()
ANALYSES = [
    analysis.activation_patching,
    analysis.attribution_patching,
    analysis.path_patching,
]


def test_weak_is_below_two_standard_errors_of_the_paired_difference():
    documents = torch.tensor([0.0, 1.0, 5.0, 9.0])  # which differ much more than the runs do
    step = torch.tensor([1.0, 1.2, 0.8, 1.0])
    noise = torch.tensor([1.0, -1.2, 0.8, -1.0])
    assert not is_weak(documents, documents + step)
    assert is_weak(documents, documents + noise)
    error = torch.tensor([0.0, 2.0]).std() / 2**0.5  # 1: the mean, 1, is below two of it
    assert error == 1 and is_weak(torch.zeros(2), torch.tensor([0.0, 2.0]))
    both = is_weak(torch.stack([documents] * 2), torch.stack([documents + step, documents]))
    assert both.tolist() == [False, True]


def test_one_document_has_no_error_but_may_not_differ_at_all():
    assert is_weak(torch.ones(1), torch.ones(1))
    assert not is_weak(torch.ones(1), torch.full((1,), 1.01))


def test_the_warning_names_metric_means_and_remedies(caplog):
    base = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    source = torch.tensor([[1.5, 1.5, 3.0], [1.0, 1.1, 0.9]])
    warn_of_weak_contrast(["rank", "kl"], base, source, "denoise")
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelname == "WARNING" and "kl" not in text
    for words in ("'rank'", "2 clean and 2 corrupted", "Train", "another corruption", "`effect`"):
        assert words in text
    caplog.clear()
    warn_of_weak_contrast(["rank"], torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 3.0]]), "noise")
    assert "0 clean and 1 corrupted" in caplog.text


@pytest.mark.parametrize("analyse", ANALYSES)
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_identical_documents_are_warned_of_once(analyse, direction, caplog):
    result = analyse(MODEL, CLEAN, CLEAN, difference(), direction=direction)
    assert len(caplog.records) == 1 and "'logit_difference'" in caplog.text
    assert all(math.isnan(share) for share in result.frame["recovery"])


@pytest.mark.parametrize("analyse", ANALYSES)
def test_no_warning_and_both_means_in_the_title_where_runs_differ(analyse, caplog):
    one = (CLEAN[:1], CORRUPTED[:1])
    result = analyse(MODEL, *one, lambda logits: logits[:, 1])
    assert not caplog.records
    base, source = result.base.mean().item(), result.source.mean().item()
    means = f"(corrupted {base:.3g}, clean {source:.3g})"
    if analyse is analysis.attribution_patching:  # counts from the corrupted run
        means = f"(total effect {source:.3g})"
    assert result.heatmap().layout.title.text.endswith(means)
    noised = analyse(MODEL, *one, lambda logits: logits[:, 1], direction="noise")
    if analyse is not analysis.attribution_patching:
        assert "(clean " in noised.heatmap().layout.title.text

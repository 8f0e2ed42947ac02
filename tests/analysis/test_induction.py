"""Detection scores on hand-made patterns and on models, and their causal counterparts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformer_lens import head_detector

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis.detection import (
    KINDS,
    chance_scores,
    detection_pattern,
    pattern_scores,
    resampled,
)
from hooked_ssm.analysis.documents import copies
from hooked_ssm.analysis.in_context import in_context_learning_score, loss_per_position
from hooked_ssm.analysis.induction import (
    detection_scores,
    duplicate_token_scores,
    induction_scores,
    previous_token_scores,
)
from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.mixers import MIXERS
from hooked_ssm.tasks import AssociativeRecall, InductionSequences
from tests.analysis.hand_made import induction_model

PERIOD = 5


def repeated(bos: bool, gap: int = 0, n: int = 4) -> torch.Tensor:
    task = InductionSequences(num_tokens=30, period=PERIOD, gap=gap, bos=bos)
    return task.sample(n, generator=torch.Generator().manual_seed(0)).tokens


def tiny(architecture: str, n_heads: int = 1, d_vocab: int = 33) -> HookedModel:
    cfg = ModelConfig(
        architecture=architecture, d_model=16, n_layers=2, d_vocab=d_vocab, n_ctx=24,
        n_heads=n_heads, init="uniform",
    )  # fmt: skip
    return HookedModel(cfg)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", [True, False])
def test_detection_patterns_are_transformer_lens(kind: str, bos: bool) -> None:
    tokens = torch.cat([repeated(bos), torch.full((4, 1), 7), torch.full((4, 1), 7)], dim=1)
    make = getattr(head_detector, f"get_{kind}_head_detection_pattern")
    want = torch.stack([make(row[None]) for row in tokens])
    assert torch.equal(detection_pattern(tokens, kind).float(), want)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("bos", [True, False])
def test_perfect_previous_token_and_uniform_patterns(bos: bool, gap: int) -> None:
    """cases.jsonl: induction-score-offsets."""
    tokens = repeated(bos, gap)
    length = tokens.shape[1]
    induction = detection_pattern(tokens, "induction")
    first = torch.zeros_like(induction)
    first[:, :, 0] = True  # where nothing is to be found, all weight rests on the first token
    perfect = torch.where(induction.any(-1, keepdim=True), induction, first).double()[:, None]
    previous = torch.zeros(4, 1, length, length, dtype=torch.double)
    previous[..., 0, 0] = 1
    previous[:, 0] += detection_pattern(tokens, "previous_token")

    score = pattern_scores(perfect, induction)
    torch.testing.assert_close(score, torch.ones(4, 1, dtype=torch.double))
    assert pattern_scores(previous, induction).abs().max() == 0
    targets = detection_pattern(tokens, "previous_token")
    assert pattern_scores(previous, targets).min() == 1

    queries = range(length - PERIOD, length)  # the second copy: one target each
    analytic = sum(1 / (q + 1) for q in queries) / PERIOD
    uniform = torch.ones(4, 1, length, length, dtype=torch.double).tril()
    uniform = uniform / uniform.sum(-1, keepdim=True)
    assert pattern_scores(uniform, induction)[0, 0].item() == pytest.approx(analytic)
    assert chance_scores(induction)[0].item() == pytest.approx(analytic)


def test_signed_matrices() -> None:
    """All weight on the targets, but negative: -1. Half of it elsewhere with the other sign: 1/2"""
    tokens = repeated(True)
    targets = detection_pattern(tokens, "induction")
    matrix = -3.0 * targets[:, None].double()
    assert pattern_scores(matrix, targets).unique().tolist() == [-1.0]
    mixed = targets.double() - targets.roll(-1, dims=2).double()
    assert pattern_scores(mixed[:, None], targets)[0, 0].item() == pytest.approx(0.5)


def test_excluded_cells_do_not_count() -> None:
    targets = torch.zeros(1, 3, 3, dtype=torch.bool)
    targets[0, 2, 1] = True
    matrix = torch.tensor([[[[1.0, 0, 0], [0.5, 0.5, 0], [0.5, 0.2, 0.3]]]])
    score = pattern_scores(matrix, targets)
    assert score.item() == pytest.approx(0.2)
    assert pattern_scores(matrix, targets, exclude_bos=True).item() == pytest.approx(0.4)
    no_self = pattern_scores(matrix, targets, exclude_current_token=True)
    assert no_self.item() == pytest.approx(0.2 / 0.7)
    assert pattern_scores(matrix, targets, queries="all").item() == pytest.approx(0.2 / 3)
    wrong = 0.5 + 0.8 + 0.3
    assert pattern_scores(matrix, targets, measure="abs").item() == pytest.approx(1 - wrong)


def test_pooled_units_count_as_much_as_they_move() -> None:
    targets = torch.zeros(1, 2, 2, dtype=torch.bool)
    targets[0, 1, 0] = True
    matrix = torch.tensor([[[[0.0, 0], [-9, 0]], [[0, 0], [0, 1.0]]]])
    assert pattern_scores(matrix, targets).tolist() == [[-1.0, 0.0]]
    assert pattern_scores(matrix, targets, pool=True).item() == pytest.approx(0.9)


@pytest.mark.parametrize("measure", ["mul", "abs"])
@pytest.mark.parametrize("exclude_bos", [False, True])
@pytest.mark.parametrize("exclude_current_token", [False, True])
def test_equals_detect_head(measure: str, exclude_bos: bool, exclude_current_token: bool) -> None:
    model, tokens = tiny("attention", n_heads=2).double(), repeated(True)
    excluded = {"exclude_bos": exclude_bos, "exclude_current_token": exclude_current_token}
    for kind in KINDS:
        scores = detection_scores(
            model, kind, tokens, queries="all", measure=measure, **excluded
        ).frame
        heads = scores[scores["unit"] == "head"].pivot(
            index="layer", columns="index", values="score"
        )
        want = [
            head_detector.detect_head(
                model, row[None], f"{kind}_head", error_measure=measure, **excluded
            )
            for row in tokens
        ]
        want = torch.stack(want).mean(0).numpy()
        atol = 1e-5 if measure == "mul" else 1e-3  # detect_head rounds "abs" to 3 decimals
        np.testing.assert_allclose(heads.to_numpy(), want, atol=atol)


def test_resampled_offsets_are_as_many_and_other_ones() -> None:
    tokens = repeated(True)
    targets = detection_pattern(tokens, "induction")
    other = resampled(targets, torch.Generator().manual_seed(0))
    assert not (other & targets).any()
    assert torch.equal(other.sum(-1), targets.sum(-1))
    assert not other.triu().any()
    previous = detection_pattern(tokens, "previous_token")
    drawn = resampled(previous, torch.Generator())
    assert drawn.sum(-1).tolist() == [[0, 0, *[1] * (tokens.shape[1] - 2)]] * 4


def test_copies_are_asked_where_something_can_be_copied() -> None:
    tokens = torch.tensor([[1, 5, 6, 7, 5, 6, 8, 7]])
    assert copies(tokens).tolist() == [[-100, -100, -100, -100, 6, -100, -100, -100]]


class TestHandMadeInductionModel:
    """Two attention layers with hand-made patterns: previous token, then induction."""

    @pytest.fixture
    def model(self) -> HookedModel:
        return induction_model()

    def documents(self) -> torch.Tensor:
        task = InductionSequences(num_tokens=9, period=6)
        return task.sample(16, generator=torch.Generator().manual_seed(1)).tokens

    def test_both_scores_find_both_heads(self, model: HookedModel) -> None:
        previous = previous_token_scores(model, self.documents(), causal=True, layers=[0, 1])
        induction = induction_scores(model, self.documents(), causal=True)
        assert previous.accuracy == induction.accuracy == 1
        first, second = (previous.best(layer, "head") for layer in (0, 1))
        assert first["score"] > 0.99 and second["score"] < 0.3
        assert first["drop"] > 0.5 and abs(second["drop"]) < 0.2
        found = induction.best(1, "head")
        assert induction.best()["layer"] == 1
        assert found["score"] > 0.9 and found["drop"] > 0.5
        assert found["accuracy_drop"] > 0.5

    def test_the_resampled_control_loses_nothing(self, model: HookedModel) -> None:
        """At the head's own layer; elsewhere other offsets may hold what that layer needs."""
        for scores, layer in ((previous_token_scores, 0), (induction_scores, 1)):
            found = scores(model, self.documents(), causal=True).best(layer, "head")
            assert found["drop"] > 0.5
            assert abs(found["control_drop"]) < 0.02

    def test_loss_falls_where_copying_begins(self, model: HookedModel) -> None:
        curve = loss_per_position(model, self.documents())
        late, early = slice(7, 12), slice(1, 6)
        score, error = in_context_learning_score(model, self.documents(), early=early, late=late)
        assert score < -1 and error > 0
        want = curve.losses[:, late].mean(1) - curve.losses[:, early].mean(1)
        assert score == pytest.approx(want.mean().item())
        assert len(curve.frame) == self.documents().shape[1] - 1
        assert curve.frame["loss"][9] < 0.5 < curve.frame["loss"][3]
        assert len(curve.plot().data) == 3


@pytest.mark.parametrize("architecture", MIXERS)
def test_runs_on_every_mixer(architecture: str) -> None:
    scores = induction_scores(tiny(architecture), repeated(True), causal=True, controls=1, groups=2)
    frame = scores.frame
    ablated = frame[frame["unit"] != "channel"]
    assert frame["score"].between(-1, 1).all()
    assert ablated["drop"].notna().all()
    assert set(frame["layer"]) == {0, 1}
    assert math.isfinite(scores.probability)


def test_scores_of_task_documents_count_only_what_is_real() -> None:
    task = AssociativeRecall(num_kv=30, num_pairs=3)
    scores = duplicate_token_scores(tiny("based"), task, n=8)
    assert scores.frame["score"].notna().all()
    assert "Duplicate-token" in scores._repr_html_()
    assert len(scores.plot().data) == 2


def test_loss_beside_padding_is_left_out() -> None:
    model, tokens = tiny("mamba"), repeated(True)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 8:] = False
    losses = loss_per_position(model, tokens, attention_mask=mask).losses
    assert losses[0, 7:].isnan().all() and losses[0, :7].isfinite().all()
    torch.testing.assert_close(losses[1:], loss_per_position(model, tokens).losses[1:])
    with pytest.raises(ShapeError, match=r"selects no position: .* 0..9"):
        in_context_learning_score(model, tokens)


def test_refuses_what_makes_no_sense(as_shipped: None) -> None:
    tokens = repeated(True)
    targets = detection_pattern(tokens, "induction")
    with pytest.raises(ConfigError, match="unknown kind 'inducton'; did you mean"):
        detection_pattern(tokens, "inducton")
    with pytest.raises(ShapeError, match="query_pos is 11; but it is 3 in matrix"):
        pattern_scores(torch.ones(4, 1, 3, 3), targets)
    with pytest.raises(ConfigError, match="queries='every'; allowed: 'with_target', 'all'"):
        pattern_scores(torch.ones(4, 1, 11, 11), targets, queries="every")
    with pytest.raises(ShapeError, match="queries is bool .* batch is 2; but it is 4"):
        pattern_scores(torch.ones(4, 1, 11, 11), targets, queries=torch.ones(2, 2).bool())

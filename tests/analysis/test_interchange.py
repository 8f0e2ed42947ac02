"""The mechanistic evaluation: its arithmetic, its verdict, and models whose mechanism is known."""

from __future__ import annotations

import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis import mechanistic_evaluation, verdict
from hooked_ssm.errors import ConfigError, HookNameError, TaskError
from hooked_ssm.tasks import AssociativeRecall

TASK = AssociativeRecall(num_kv=16, num_pairs=3)


def tiny(architecture: str = "mamba") -> HookedModel:
    cfg = ModelConfig(
        architecture=architecture, d_model=16, n_layers=2, d_vocab=TASK.d_vocab, n_ctx=16,
        init="uniform",
    )  # fmt: skip
    return HookedModel(cfg)


@pytest.mark.parametrize(
    ("accuracy", "attribution", "expected"),
    [
        (1.0, {"key": 0.0, "query": 0.02, "value": 0.98}, ("induction", None)),
        (1.0, {"key": 0.9, "query": 0.05, "value": 0.0}, ("direct retrieval", "late")),
        (0.9, {"key": 0.1, "query": 0.8, "value": 0.05}, ("direct retrieval", "early")),
        (1.0, {"key": 0.4, "query": 0.1, "value": 0.5}, ("mixed", None)),
        (0.3, {"key": 0.0, "query": 0.0, "value": 1.0}, ("unsolved", None)),
    ],
)
def test_verdict(
    accuracy: float, attribution: dict[str, float], expected: tuple[str, str | None]
) -> None:
    assert verdict(accuracy, 0.25, attribution) == expected


def test_attribution_is_the_ratio_of_means_over_documents() -> None:
    frame = mechanistic_evaluation(tiny(), TASK, 16).frame
    want = (frame["restored"] - frame["corrupted"]) / (frame["original"] - frame["corrupted"])
    assert frame["attribution"].to_numpy() == pytest.approx(want.to_numpy(), rel=1e-6)


def test_restoring_the_whole_input_restores_everything() -> None:
    """At layer 0's input the corrupted token is the only difference, so its position has it all."""
    frame = mechanistic_evaluation(tiny(), TASK, 16).frame
    rows = frame[(frame["layer"] == 0) & (frame["site"] == "resid_pre")]
    for row in rows.itertuples():
        expected = 1.0 if row.restore == row.corrupt else 0.0
        assert row.attribution == pytest.approx(expected, abs=1e-4)


def test_both_directions_agree_where_one_position_holds_everything() -> None:
    frame = mechanistic_evaluation(tiny(), TASK, 8, directions=["restore", "corrupt"]).frame
    rows = frame[(frame["layer"] == 0) & (frame["site"] == "resid_pre")]
    rows = rows[rows["restore"] == rows["corrupt"]]
    assert set(rows["direction"]) == {"restore", "corrupt"}
    assert rows["attribution"].to_numpy() == pytest.approx(1.0, abs=1e-4)


def test_shares_of_documents_add_up() -> None:
    frame = mechanistic_evaluation(tiny("attention"), TASK, 16).frame
    per_site = frame.groupby(["corrupt", "site", "layer"])["best_position"].sum()
    assert per_site.to_numpy() == pytest.approx(1.0)
    assert (frame["kl"] >= -1e-6).all()


@pytest.mark.parametrize("architecture", ["attention", "based", "mamba", "base_conv"])
def test_inner_sites_by_role(architecture: str) -> None:
    words = {"attention": ["pattern", "value"], "base_conv": ["conv", "pattern"]}
    words = words.get(architecture, ["write", "carry", "state", "pattern"])
    result = mechanistic_evaluation(tiny(architecture), TASK, 4, sites=words)
    assert set(result.frame["site"]) == set(words)
    assert result.mechanism == "unsolved"
    assert set(result.attribution) == {"key", "query", "value"}


def test_repeatable_and_without_side_effects() -> None:
    model = tiny().train()
    state = torch.random.get_rng_state()
    first = mechanistic_evaluation(model, TASK, 8)
    second = mechanistic_evaluation(model, TASK, 8)
    assert first.frame.equals(second.frame)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(hook.has_hooks() for hook in model.hook_points())


def test_html_shows_the_verdict() -> None:
    assert "unsolved" in mechanistic_evaluation(tiny(), TASK, 4)._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"positions": ["query"]}, TaskError, "unknown position 'query'; did you mean"),
        ({"directions": ["back"]}, TaskError, "unknown direction"),
        ({"corruptions": ["target_item_orig"]}, TaskError, "must hold 'query_item_orig'"),
        ({"sites": ["stat"]}, HookNameError, "stat"),
        ({"positions": "query_item"}, ConfigError, "Put it in a list"),
    ],
)
def test_bad_arguments(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mechanistic_evaluation(tiny(), TASK, 4, **arguments)

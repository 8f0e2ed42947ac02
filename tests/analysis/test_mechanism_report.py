"""The report: models whose mechanism is known, every architecture untrained, every task."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.analysis.inside import inside_sites, locate, places, restore_inside, window_of
from hooked_ssm.analysis.mechanism_report import between, mechanism_report
from hooked_ssm.errors import ConfigError
from hooked_ssm.mixers import MIXERS
from hooked_ssm.tasks import (
    AssociativeRecall,
    AssociativeTreecall,
    MultiQueryAssociativeRecall,
    Task,
)
from tests.analysis.hand_made import convolution_model, induction_model

TASK = AssociativeRecall(num_kv=8, num_pairs=3)


def tiny(architecture: str, task: Task = TASK) -> HookedModel:
    cfg = ModelConfig(
        architecture=architecture, d_model=8, n_layers=2, d_vocab=task.d_vocab,
        n_ctx=task.max_length, init="uniform",
    )  # fmt: skip
    return HookedModel(cfg)


def test_attention_that_moves_the_key_on_makes_the_association_in_its_mixing() -> None:
    report = mechanism_report(induction_model(), TASK, 32)
    assert (report.mechanism, report.association, report.layer) == ("induction", "token mixing", 0)
    association = report.scores["association"].best(0, "head")
    retrieval = report.scores["retrieval"].best(1, "head")
    assert association["score"] > 0.95 and retrieval["score"] > 0.95
    assert retrieval["drop"] > 0.5 and abs(retrieval["control_drop"]) < 0.1
    assert report.evidence[-1].startswith("Retrieval: layer 1, head 0, has 1.00 of its mixing")


def test_a_convolution_that_moves_the_key_on_is_found_to_do_so() -> None:
    report = mechanism_report(convolution_model(), TASK, 32)
    assert (report.mechanism, report.association, report.layer) == ("induction", "convolution", 0)
    table = report.inside[report.inside["layer"] == 0].pivot(
        index="site", columns="restore", values="attribution"
    )
    assert table.loc["mixer_in", "key"] == pytest.approx(1, abs=0.05)
    assert table.loc["mixer_in", "value"] == pytest.approx(0, abs=0.05)
    assert table.loc["conv", "value"] == pytest.approx(1, abs=0.05)
    assert table.loc["conv", "key"] == pytest.approx(0, abs=0.05)
    assert "restoring what leaves it" in " ".join(report.evidence)


@pytest.mark.parametrize("architecture", MIXERS)
def test_untrained_models_are_unsolved(architecture: str) -> None:
    model = tiny(architecture).train()
    report = mechanism_report(model, TASK, 12, controls=1)
    assert (report.mechanism, report.association, report.layer) == ("unsolved", "unsolved", None)
    assert "unsolved" in report.evidence[-1] and len(report.evidence) == 2
    assert model.training
    assert set(report.frame["part"]) == {"block", "inside"}
    assert set(report.inside["site"]) >= {"mixer_in", "mixed"}
    assert set(report.scores) == {"association", "lookup", "retrieval"}
    json.dumps(report.to_row())


@pytest.mark.parametrize(
    "task",
    [
        MultiQueryAssociativeRecall(num_kv=12, num_pairs=3),
        AssociativeTreecall(num_nonterminals=4, num_terminals=6, max_length=40),
        AssociativeTreecall(
            num_nonterminals=4, num_terminals=6, max_length=40,
            query_types=("parent", "sibling"),
        ),
    ],
    ids=["mqar", "atr", "atr-two-queries"],
)  # fmt: skip
@pytest.mark.parametrize("architecture", ["attention", "mamba"])
def test_runs_on_every_task(architecture: str, task: Task) -> None:
    report = mechanism_report(tiny(architecture, task), task, 10, controls=1)
    assert report.mechanism == "unsolved"
    assert report.inside["attribution"].notna().all()


def test_report_shows_itself() -> None:
    report = mechanism_report(convolution_model(), TASK, 8, controls=1)
    html = report._repr_html_()
    assert "<b>induction; convolution of layer 0</b>" in html
    assert html.count("<li>") == len(report.evidence)
    for figure in ("inside", "sites", "retrieval"):
        assert len(report.plot(figure).data) > 0


def test_refuses_a_figure_it_lacks(as_shipped: None) -> None:
    report = mechanism_report(convolution_model(), TASK, 4, controls=1)
    with pytest.raises(ConfigError, match="unknown figure 'insides'; did you mean 'inside'"):
        report.plot("insides")


def table(rows: dict[str, list[float]]) -> pd.DataFrame:
    """A frame of attributions at key, value, value+1, window, query."""
    labels = ["key", "value", "value+1", "window", "query"]
    return pd.DataFrame(
        [
            {"site": site, "restore": label, "attribution": value}
            for site, values in rows.items()
            for label, value in zip(labels, values, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # the rough probe of Mamba: 0.98 at the token after the value
        ({"conv_in": [1, 0, 0, 0, 0], "conv": [0, 0, 0.98, 1, 0]}, "convolution"),
        ({"conv_in": [1, 0, 0, 0, 0], "conv": [0.1, 0.4, 0.4, 0.9, 0]}, "convolution"),
        ({"conv_in": [1, 0, 0, 0, 0], "conv": [0.9, 0, 0, 0.1, 0]}, "token mixing"),
        ({"conv_in": [1, 0, 0, 0, 0], "conv": [0.5, 0.3, 0, 0.5, 0]}, "not located"),
        ({"mixer_in": [1, 0, 0, 0, 0]}, "token mixing"),
        ({"mixer_in": [0.4, 0.4, 0, 0, 0]}, "not located"),
    ],
)
def test_locate(rows: dict[str, list[float]], expected: str) -> None:
    located = locate(table({**rows, "mixed": [0, 0, 0, 0, 1]}))
    assert located.association == expected
    assert located.evidence.endswith(".")
    assert (located.place is None) == (expected != "convolution")


def test_places_of_a_document() -> None:
    batch = TASK.sample(8, generator=torch.Generator().manual_seed(0))
    read_at = batch.positions["query_item"]
    found = places(batch, 4, read_at)
    assert list(found) == ["key", "key+3", "value", "value+1", "divider", "query", "window"]
    key = batch.positions["query_item_orig"]
    assert torch.equal(found["value"], key + 1) and torch.equal(found["value+1"], key + 2)
    assert found["window"].shape == (8, 3) and found["window"].max() <= read_at.max()
    assert "window" not in places(batch, 1, read_at)


def test_sites_and_window_of_a_mixer() -> None:
    mamba, attention = tiny("mamba"), tiny("attention")
    assert [s.word for s in inside_sites(mamba, 1)] == [
        "mixer_in", "conv_in", "conv", "key", "value", "query", "gate", "write", "carry", "mixed",
    ]  # fmt: skip
    assert (window_of(mamba, 1), window_of(attention, 1)) == (4, 1)
    assert window_of(tiny("h3"), 1) == 4
    assert window_of(tiny("base_conv"), 0) == 3
    assert window_of(tiny("base_conv"), 1) == 4


def test_relations_only_look_back() -> None:
    at = TASK.sample(4, generator=torch.Generator().manual_seed(0)).positions
    key, value = at["query_item_orig"], at["target_item_orig"]
    there, back = between(value, key, 16), between(key, value, 16)
    assert there.sum((1, 2)).tolist() == [1] * 4
    assert there[0, value[0], key[0]]
    assert back.sum() == 0


def test_what_reads_the_place_of_a_convolution_is_scored_too() -> None:
    """A convolution whose taps reach two back ties key and value at the token after the value."""
    model = convolution_model(reach=2)
    report = mechanism_report(model, TASK, 32)
    assert report.association == "convolution"
    assert report.inside.set_index(["layer", "site", "restore"]).loc[
        (0, "conv", "value+1"), "attribution"
    ] == pytest.approx(1, abs=0.05)
    read = report.scores["retrieval from value+1"].best(1, "head")
    assert read["score"] > 0.95 and read["drop"] > 0.5
    assert report.evidence[-1].startswith("Retrieval from value+1: layer 1, head 0, has 1.00")


def test_documents_taken_in_parts_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("mamba").eval()
    batch = TASK.sample(7, generator=torch.Generator().manual_seed(0))
    corrupted = TASK.corrupt(
        batch, "query_item_orig", generator=torch.Generator().manual_seed(1)
    ).tokens
    read_at = batch.positions["query_item"]
    whole = restore_inside(model, batch, corrupted, 1, read_at)
    monkeypatch.setattr("hooked_ssm.analysis.inside.TOKENS_AT_ONCE", 3 * batch.tokens.shape[1])
    parts = restore_inside(model, batch, corrupted, 1, read_at)
    assert parts["restored"].to_numpy() == pytest.approx(whole["restored"].to_numpy(), abs=1e-6)
    assert (parts["hook"] == whole["hook"]).all()

"""The table, the choice of learning rates, the figures and the page, from made-up results."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from hooked_ssm import plots
from hooked_ssm.errors import CheckpointError, ConfigError, ShapeError
from hooked_ssm.plots import (
    accuracy_by_variant,
    accuracy_by_width,
    attribution_boxes,
    dev_against_test,
    theme,
)
from hooked_ssm.sweeps import (
    RunFolder,
    best_over_lr,
    parse_sweep,
    results_table,
    sweep_page,
    write_report,
)
from hooked_ssm.sweeps.table import CELL
from tests.plots.pages import Page
from tests.sweeps.tiny import SWEEP

CONTENT = {
    **SWEEP,
    "variants": {"conv 0": {"model": {"options": {"d_conv": 0}}}},
    "grid": [
        {
            **SWEEP["grid"],
            "architecture": ["attention", "mamba"],
            "d_model": [8, 16],
            "n_layers": 2,
            "seed": [0, 1],
        },
        {**SWEEP["grid"], "architecture": "mamba", "n_layers": 2, "variant": "conv 0"},
    ],
}


RESULT = {
    "accuracy": 0.5,
    "dev_accuracy": 0.5,
    "chance": 0.5,
    "attribution": {"key": 0.0, "query": 0.0, "value": 1.0},
    "attribution_error": {"key": 0.01, "query": None, "value": 0.01},
    "mechanism": "induction",
    "timing": None,
    "loss": 1.0,
    "steps": 2,
    "seconds": 0.5,
    "split": "test",
    "dev_split": "dev",
}


def accuracy_of(spec) -> float:
    """Make up an accuracy: a larger width, and lr 0.01 but for attention, is better."""
    good_lr = 1e-3 if spec.model["architecture"] == "attention" else 1e-2
    return 0.4 + 0.02 * spec.model["d_model"] - 0.2 * (spec.train["lr"] != good_lr)


@pytest.fixture
def folder(tmp_path):
    """A folder of made-up results, in which one run failed and one was not started."""
    specs = parse_sweep(CONTENT)
    for i, spec in enumerate(specs[:-1]):
        run = RunFolder.of(tmp_path, spec)
        run.path.mkdir()
        run.begin(spec)
        if i == 0:
            run.fail(ValueError("the loss of step 3 is nan </script>"))
            continue
        accuracy = accuracy_of(spec) + 0.1 * spec.model["seed"]
        induction = float(spec.model["architecture"] == "attention")
        result = {
            **RESULT,
            "accuracy": accuracy,
            "dev_accuracy": accuracy + 0.01,
            "attribution": {"key": 1 - induction, "query": 0.0, "value": induction},
            "mechanism": "induction" if induction else "direct retrieval",
            "timing": None if induction else "late",
        }
        run.finish(result, pd.DataFrame({"site": ["resid_pre"]}))
    return tmp_path


def test_the_table_has_a_row_per_run_and_says_what_is_missing(folder):
    table = results_table(folder)
    assert len(table) == 17
    assert table["state"].value_counts().to_dict() == {"complete": 16, "failed": 1}
    failed = table[table["state"] == "failed"].iloc[0]
    assert failed["reason"] == "ValueError: the loss of step 3 is nan </script>"
    assert pd.isna(failed["accuracy"])
    mamba = table[(table["architecture"] == "mamba") & (table["state"] == "complete")]
    assert set(mamba["attribution_key"]) == {1.0} and set(mamba["timing"]) == {"late"}
    assert mamba["attribution_error_query"].isna().all()
    with pytest.raises(CheckpointError, match="holds no runs"):
        results_table(folder / "nothing")


def test_the_best_learning_rate_of_a_cell_has_the_highest_mean_on_dev():
    cell = {"task": "t", "variant": "", "n_layers": 2, "d_model": 8, "state": "complete"}
    rows = [
        {"architecture": "a", "lr": 0.1, "seed": 0, "dev_accuracy": 1.0, "accuracy": 0.1},
        {"architecture": "a", "lr": 0.1, "seed": 1, "dev_accuracy": 0.0, "accuracy": 0.2},
        {"architecture": "a", "lr": 0.2, "seed": 0, "dev_accuracy": 0.6, "accuracy": 0.3},
        {"architecture": "a", "lr": 0.2, "seed": 1, "dev_accuracy": 0.6, "accuracy": 0.4},
        {"architecture": "b", "lr": 0.2, "seed": 0, "dev_accuracy": 0.5, "accuracy": 0.5},
        {"architecture": "b", "lr": 0.1, "seed": 0, "dev_accuracy": 0.5, "accuracy": 0.6},
    ]
    best = best_over_lr(pd.DataFrame([{**cell, **row} for row in rows]))
    assert best["accuracy"].tolist() == [0.3, 0.4, 0.6]


def test_a_learning_rate_with_failed_seeds_does_not_beat_a_whole_one(folder):
    table = results_table(folder)
    best = best_over_lr(table)
    cell = (best["architecture"] == "mamba") & (best["d_model"] == 8) & (best["variant"] == "")
    assert best[cell]["lr"].tolist() == [1e-2, 1e-2]
    failed = best[cell]["run"].iloc[0]
    table.loc[table["run"] == failed, "state"] = "failed"
    best = best_over_lr(table)
    cell = (best["architecture"] == "mamba") & (best["d_model"] == 8) & (best["variant"] == "")
    assert best[cell]["lr"].tolist() == [1e-3, 1e-3]


def test_the_table_says_how_many_runs_a_cell_has_where_they_differ(folder):
    table = results_table(folder)
    plain = table[table["variant"] == ""]
    assert "runs at d=8" not in " ".join(Page(sweep_page(plain)).text)
    lost = (plain["architecture"] == "mamba") & (plain["d_model"] == 8) & (plain["seed"] == 1)
    page = sweep_page(plain[~lost])
    rows = re.findall(r"<tr>(?:(?!</tr>).)*</tr>", page)
    head = next(i for i, row in enumerate(rows) if "runs at d=8" in row)
    cells = [re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row) for row in rows[head : head + 3]]
    assert cells[0][-2:] == ["runs at d=8", "runs at d=16"]
    assert {row[0]: row[-2:] for row in cells[1:]} == {"attention": ["2", "2"], "mamba": ["1", "2"]}


def test_runs_of_other_content_are_no_seeds(folder, tmp_path):
    (spec, *_) = parse_sweep({**CONTENT, "train": {**SWEEP["train"], "steps": 3}})
    run = RunFolder.of(folder, spec)
    run.path.mkdir()
    run.begin(spec)
    table = results_table(folder)
    assert len(table) == 18  # the table itself lists them
    two = table[(table["lr"] == 1e-3) & (table["seed"] == 0) & (table["d_model"] == 8)]
    two = two[two["architecture"] == "attention"]
    assert spec.key in set(two["run"]) and len(two) == 2
    message = "2 runs are all task tiny, architecture attention, n_layers 2.*" + ", ".join(
        two["run"]
    )
    out = tmp_path / "out" / "report.html"
    for refused in (
        lambda: best_over_lr(table),
        lambda: sweep_page(table),
        lambda: write_report(folder, out),
    ):
        with pytest.raises(ConfigError, match=f"{message}.*separate folders"):
            refused()
    assert not out.parent.exists()
    # what a caller tells apart is apart
    named = table.assign(steps=(table["run"] == spec.key).astype(int))
    assert len(best_over_lr(named, by=[*CELL, "steps"])) == len(best_over_lr(table.drop(two.index)))


def test_accuracy_by_width_has_a_point_per_width_and_a_bar_over_seeds(folder):
    best = best_over_lr(results_table(folder))
    fig = accuracy_by_width(best[best["variant"] == ""])
    mamba = next(trace for trace in fig.data if trace.name == "mamba")
    assert list(mamba.x) == [8, 16]
    assert list(mamba.y) == pytest.approx([0.61, 0.77])
    assert list(mamba.error_y.array) == pytest.approx([0.05, 0.05])
    assert mamba.line.color == theme.ARCHITECTURE_COLOURS["mamba"]
    assert "chance 50.0%" in [a.text for a in fig.layout.annotations]
    layers = accuracy_by_width(pd.concat([best, best.assign(n_layers=1)]))
    assert {"mamba, 1 layer", "mamba, 2 layers"} <= {trace.name for trace in layers.data}


def test_variants_boxes_and_dev_against_test(folder):
    best = best_over_lr(results_table(folder))
    mamba = accuracy_by_variant(best[best["architecture"] == "mamba"])
    assert [trace.name for trace in mamba.data] == ["d_model 8", "d_model 16"]
    assert list(mamba.data[0].x) == ["as is", "conv 0"]
    boxes = attribution_boxes(best)
    assert [box.name for box in boxes.data] == ["@ Key", "@ Query", "@ Value"]
    assert boxes.layout.yaxis.range == (-0.5, 1.5)
    scatter = dev_against_test(best)
    assert all((t.x - t.y).max() == pytest.approx(0.01) for t in scatter.data)


@pytest.mark.parametrize(
    "draw", [accuracy_by_width, accuracy_by_variant, attribution_boxes, dev_against_test]
)
def test_figures_name_what_is_missing(folder, draw):
    table = results_table(folder)
    with pytest.raises(ShapeError, match="no rows"):
        draw(table[:0])
    with pytest.raises(ConfigError, match="has no column 'accuracy'|'attribution_key'"):
        draw(table.drop(columns=["accuracy", "attribution_key"]))


def test_the_report_is_one_offline_page_with_its_table_beside_it(folder, tmp_path):
    out = tmp_path / "out" / "report.html"
    page_file, csv, parquet = write_report(folder, out, command="hooked-ssm report")
    page = Page(page_file.read_text())
    assert page.external() == []
    text = " ".join(page.text)
    asked = parse_sweep(CONTENT)[0].build_task().describe()
    for words in ("17 runs: 16 complete, 1 failed", "Task tiny", asked, "nan </script>", "d=16"):
        assert words in text
    assert page_file.read_text().count("Plotly.newPlot(") >= 5
    table = results_table(folder)
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), table)
    assert len(pd.read_csv(csv)) == len(table)
    with pytest.raises(ConfigError, match=r"ends in \.html"):
        write_report(folder, tmp_path / "report")


def test_a_single_width_is_a_table_and_single_runs_are_bars(folder):
    table = results_table(folder)
    one = table[(table["d_model"] == 8) & (table["seed"] == 1) & (table["variant"] == "")]
    assert kinds_drawn(one) == ["scatter", "bar", "scatter"]  # mechanisms, attributions, dev
    assert kinds_drawn(table)[0] == "scatter" and "box" in kinds_drawn(table)


@pytest.mark.parametrize("change", [{"train": {"steps": 3}}, {"evaluate": {"documents": 9}}])
def test_runs_of_other_settings_are_no_seeds(folder, change):
    content = {**CONTENT, **{part: {**SWEEP[part], **new} for part, new in change.items()}}
    grid = {**CONTENT["grid"][0], "architecture": "attention", "d_model": 8, "lr": 1e-3}
    (spec,) = parse_sweep({**content, "grid": {**grid, "seed": 2}})
    run = RunFolder.of(folder, spec)
    run.path.mkdir()
    run.begin(spec)
    assert len(sweep_page(results_table(folder)))  # a run that is not complete is averaged nowhere
    run.finish(RESULT, pd.DataFrame({"site": ["resid_pre"]}))
    with pytest.raises(
        ConfigError, match=f"{spec.key}.*differ in more than learning rate and seed"
    ):
        best_over_lr(results_table(folder))


def test_two_tasks_of_one_name_are_not_described_as_one(folder):
    tasks = {"tiny": {**SWEEP["tasks"]["tiny"], "num_pairs": 3}}
    grid = {**CONTENT["grid"][0], "architecture": "base_conv", "d_model": 8}
    (spec, *_) = parse_sweep({**CONTENT, "tasks": tasks, "grid": grid})
    run = RunFolder.of(folder, spec)
    run.path.mkdir()
    run.begin(spec)
    with pytest.raises(
        ConfigError, match="both call their task 'tiny'.*num_pairs.*separate folders"
    ):
        write_report(folder, folder / "report.html")


def test_an_architecture_that_stands_under_a_variant_only_is_on_the_page(folder):
    table = results_table(folder)
    only = table[(table["architecture"] == "attention") | (table["variant"] == "conv 0")]
    assert "mamba: variants" in " ".join(Page(sweep_page(only)).scripts)


def test_variants_of_several_depths_are_lines_of_their_own_in_the_order_of_their_numbers():
    rows = [
        {
            "variant": name,
            "n_layers": layers,
            "d_model": 8,
            "accuracy": 0.1 * layers,
            "chance": 0,
        }
        for name in ("conv 10", "conv 2", "")
        for layers in (1, 2)
    ]
    fig = accuracy_by_variant(pd.DataFrame(rows))
    assert [trace.name for trace in fig.data] == ["d_model 8, 1 layer", "d_model 8, 2 layers"]
    assert set(fig.data[0].y) == {0.1} and set(fig.data[1].y) == {0.2}
    assert list(fig.layout.xaxis.categoryarray) == ["as is", "conv 2", "conv 10"]


def test_the_page_says_on_which_documents_it_chose_and_judged(folder):
    table = results_table(folder).assign(split="dev", dev_split="train")
    page = Page(sweep_page(table))
    text = " ".join(" ".join(page.text).split())
    assert "that is best on train documents" in text and "are those on dev documents" in text
    assert "Train against dev, every run" in " ".join(page.scripts)


def test_mechanisms_of_variants_stand_apart(folder, monkeypatch):
    seen = {}
    for name in ("mechanism_scatter", "attribution_boxes"):
        draw = getattr(plots, name)
        monkeypatch.setattr(
            plots, name, lambda rows, name=name, draw=draw: seen.setdefault(name, draw(rows))
        )
    sweep_page(results_table(folder))
    labels = {"attention", "mamba", "mamba, conv 0"}
    assert {t.name for t in seen["mechanism_scatter"].data if t.x[0] is not None} >= labels
    assert {x for box in seen["attribution_boxes"].data for x in box.x} == labels


def kinds_drawn(table) -> list[str]:
    """Return the kind of the first trace of each figure on the page."""
    scripts = " ".join(Page(sweep_page(table)).scripts)
    figures = re.findall(r"Plotly\.newPlot\(\s*\"[\w-]+\",\s*(\[.*?\}\]),", scripts)
    return [re.search(r'"type":\s*"(\w+)"', figure)[1] for figure in figures]


def test_a_page_of_a_sweep_that_has_just_started(folder):
    table = results_table(folder)
    page = Page(sweep_page(table[table["state"] == "failed"]))
    text = " ".join(page.text)
    assert "1 run: 1 failed." in text and "Attribution" not in text

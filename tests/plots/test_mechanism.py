"""The mechanism figures, from rows of results.json and from tidy frames."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest

from hooked_ssm.errors import ConfigError, HookedSSMError, ShapeError
from hooked_ssm.plots import attribution_bars, mechanism_scatter, site_restoration, theme


def _row(architecture, key, query, value, mechanism, accuracy=1.0):
    return {
        "architecture": architecture,
        "accuracy": accuracy,
        "attribution": {"key": key, "query": query, "value": value},
        "mechanism": mechanism,
    }


ROWS = [
    _row("attention", 0.0, 0.01, 1.0, "induction"),
    _row("mamba", 0.9, 0.04, 0.0, "direct retrieval"),
    _row("mamba", 0.8, 0.1, 0.02, "direct retrieval"),
    _row("base_conv", 0.1, -0.4, 2.2, "unsolved", accuracy=0.1),
]


def test_scatter_places_each_run():
    fig = mechanism_scatter(ROWS)
    by_name = {t.name: t for t in fig.data}
    assert list(by_name) == ["attention", "mamba", "base_conv", "solved", "unsolved"]
    assert list(by_name["mamba"].x) == [0.04, 0.1]
    assert list(by_name["mamba"].y) == [0.0, 0.02]
    assert by_name["mamba"].marker.color == theme.ARCHITECTURE_COLOURS["mamba"]
    assert by_name["mamba"].marker.symbol == ("circle", "circle")
    assert by_name["base_conv"].marker.symbol == ("x",)
    assert fig.layout.xaxis.title.text == "attribution @ Query"
    assert fig.layout.yaxis.title.text == "attribution @ Value"
    texts = [a.text for a in fig.layout.annotations]
    assert texts[:3] == ["induction", "direct retrieval, late", "direct retrieval, early"]
    induction = fig.layout.annotations[0]
    assert induction.x < 0.5 < induction.y


def test_runs_outside_are_drawn_at_the_edge_and_said():
    fig = mechanism_scatter(ROWS)
    low, high = fig.layout.yaxis.range
    trace = next(t for t in fig.data if t.name == "base_conv")
    assert low < trace.y[0] < high and low < trace.x[0] < high
    assert "@ Value 2.200" in trace.customdata[0]
    assert "1 of 4 runs lies outside" in fig.layout.annotations[-1].text


def test_scatter_sums_key_and_query_and_draws_errors():
    error = {"key": 0.03, "query": 0.04, "value": 0.1}
    fig = mechanism_scatter([{**ROWS[1], "attribution_error": error}], x="key+query")
    assert fig.data[0].x[0] == pytest.approx(0.94)
    assert fig.data[0].error_x.array[0] == pytest.approx(0.05)
    assert fig.data[0].error_y.array[0] == pytest.approx(0.1)
    assert fig.layout.xaxis.title.text == "attribution @ Key + @ Query"
    assert [a.text for a in fig.layout.annotations] == ["induction", "direct retrieval"]


def test_solved_falls_back_on_accuracy():
    row = {k: v for k, v in ROWS[0].items() if k != "mechanism"}
    assert mechanism_scatter([row]).data[0].marker.symbol == ("circle",)
    assert mechanism_scatter([{**row, "accuracy": 0.2}]).data[0].marker.symbol == ("x",)


def test_attributions_that_were_not_measured_are_left_out():
    fig = mechanism_scatter([_row("h3", None, None, None, "unsolved")])
    assert np.isnan(fig.data[0].x[0])
    assert "1 of 1 runs without attributions" in [a.text for a in fig.layout.annotations]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        none = attribution_bars([_row("h3", None, None, None, "unsolved")])
    assert {bar.text for bar in none.data} == {("–",)}
    bars = attribution_bars([ROWS[0], _row("h3", None, 0.5, 0.5, "mixed")])
    assert bars.data[0].text == ("0.00", "–")
    seeds = attribution_bars([ROWS[0], _row("attention", None, 0.5, 0.5, "mixed")])
    assert seeds.data[0].y[0] == 0.0


def test_bars_are_means_with_spread_and_mark_the_unsolved():
    fig = attribution_bars(ROWS)
    assert [bar.name for bar in fig.data] == ["@ Key", "@ Query", "@ Value"]
    key = fig.data[0]
    assert key.x == ("attention", "mamba", "base_conv<br>(unsolved)")
    assert np.allclose(key.y, [0.0, 0.85, 0.1])
    assert np.allclose(key.error_y.array, [0, 0.05, 0])
    assert key.marker.pattern.shape == ("", "", "/")
    assert fig.layout.barmode == "group"


def test_long_bars_are_cut_and_keep_their_numbers():
    fig = attribution_bars([ROWS[0], _row("h3", 3.1, 0.2, -2.0, "unsolved")])
    assert [bar.y[1] for bar in fig.data] == [1.4, 0.2, -0.4]
    assert [bar.text[1] for bar in fig.data] == ["3.10", "0.20", "-2.00"]
    assert [bar.customdata[1] for bar in fig.data] == [3.1, 0.2, -2.0]
    low, high = fig.layout.yaxis.range
    assert low < -0.4 and high > 1.4
    assert "longer bars of unsolved runs are cut" in [a.text for a in fig.layout.annotations]
    assert not attribution_bars([ROWS[0]]).layout.annotations


@pytest.mark.parametrize("plot", [mechanism_scatter, attribution_bars])
def test_rows_must_be_whole(plot):
    with pytest.raises(ShapeError, match="rows is empty"):
        plot([])
    with pytest.raises(ConfigError, match="row 0 has no 'attribution'"):
        plot([{"architecture": "mamba", "accuracy": 1.0}])
    with pytest.raises(ConfigError, match="row 0 has no 'value'"):
        plot([{**ROWS[0], "attribution": {"key": 0, "query": 0}}])


def test_scatter_refuses_another_axis(as_shipped):
    with pytest.raises(ConfigError, match="unknown x 'key'; did you mean 'query'"):
        mechanism_scatter(ROWS, x="key")


def _frame() -> pd.DataFrame:
    rows = itertools.product(
        ["sufficiency", "necessity"],
        ["query_item_orig", "target_item_orig"],
        [1, 0],
        ["block_in", "mixer_out"],
        ["query_item_orig", "divider", "query_item"],
    )
    names = ["direction", "corrupt", "layer", "site", "restore"]
    frame = pd.DataFrame(list(rows), columns=names)
    numbers = np.arange(len(frame)) / len(frame)
    return frame.assign(attribution=numbers, original=0.9, corrupted=0.1, restored=0.5)


def test_sites_by_positions():
    fig = site_restoration(_frame(), "target_item_orig", direction="necessity")
    trace = fig.data[0]
    assert trace.y == ("L0 block_in", "L0 mixer_out", "L1 block_in", "L1 mixer_out")
    assert trace.x == ("query_item_orig", "divider", "query_item")
    wanted = _frame().query(
        "corrupt == 'target_item_orig' and direction == 'necessity' and layer == 0"
        " and site == 'mixer_out' and restore == 'divider'"
    )
    assert trace.z[1][1] == wanted["attribution"].item()
    assert (trace.zmin, trace.zmid, trace.zmax) == (-1, 0, 1)
    assert trace.customdata[0][0] == "original 0.900, corrupted 0.100, restored 0.500"
    assert fig.layout.title.text == "Corrupted: target_item_orig; necessity"


def test_sites_default_to_the_first_and_average_runs():
    frame = _frame()
    twice = pd.concat([frame, frame.assign(attribution=frame["attribution"] + 1)])
    fig = site_restoration(twice, sites=["mixer_out"])
    once = site_restoration(frame, "query_item_orig", sites=["mixer_out"])
    assert fig.layout.title.text == "Corrupted: query_item_orig; sufficiency"
    assert np.allclose(fig.data[0].z, np.asarray(once.data[0].z) + 0.5)
    assert fig.data[0].y == ("L0 mixer_out", "L1 mixer_out")


@pytest.mark.parametrize(
    ("direction", "title", "done"),
    [
        ("restore", "Corrupted: query_item_orig; one activation restored", "restored"),
        ("corrupt", "Original; one activation corrupted: query_item_orig", "corrupted"),
    ],
)
def test_sites_say_what_was_done(direction, title, done):
    fig = site_restoration(_frame().assign(direction=direction))
    assert fig.layout.title.text == title
    assert fig.layout.xaxis.title.text == f"{done} position"


def test_sites_missing_cells_are_gaps():
    frame = _frame()
    kept = frame[~((frame["layer"] == 0) & (frame["restore"] == "divider"))]
    z = np.asarray(site_restoration(kept, "query_item_orig").data[0].z)
    assert np.isnan(z[:2]).sum() == 2 and not np.isnan(z[2:]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"corrupt": "target_item"}, "did you mean 'target_item_orig'"),
        ({"direction": "both"}, "Allowed: sufficiency, necessity"),
        ({"sites": ["mixer"]}, "unknown site 'mixer'"),
    ],
)
def test_sites_name_what_is_allowed(arguments, message):
    with pytest.raises(ConfigError, match=message):
        site_restoration(_frame(), **arguments)


def test_sites_need_their_columns():
    with pytest.raises(HookedSSMError, match="no column site and layer"):
        site_restoration(_frame().drop(columns=["site", "layer"]))

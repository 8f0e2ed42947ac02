"""Heatmaps: values, scale, labels and hover texts."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from hooked_ssm.errors import ConfigError, ShapeError
from hooked_ssm.plots import heatmap, theme
from hooked_ssm.plots.heatmap import LONGEST_BAR, MAX_CELLS_WITH_TEXT, side_by_side
from hooked_ssm.plots.labels import escape, visible


def test_values_scale_titles_and_labels():
    values = torch.tensor([[1.0, -3.0], [0.5, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    fig = heatmap(
        values, rows=["a", "b"], cols=["<bos>", "$x$"], title="T <s>", x_title="col", y_title="row"
    )
    assert isinstance(fig, go.Figure)
    trace = fig.data[0]
    assert np.array_equal(trace.z, [[1.0, -3.0], [0.5, 2.0]])
    assert (trace.zmin, trace.zmid, trace.zmax) == (-3.0, 0, 3.0)
    assert trace.colorscale[0][1] == theme.DIVERGING[0][1]
    assert trace.x == ("&lt;bos&gt;", "&#36;x&#36;")
    assert trace.y == ("a", "b")
    assert fig.layout.title.text == "T &lt;s&gt;"
    assert (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text) == ("col", "row")
    assert fig.layout.yaxis.autorange == "reversed"
    assert fig.layout.xaxis.type == fig.layout.yaxis.type == "category"
    for part in ("row: %{y}", "col: %{x}", "value: %{z"):
        assert part in trace.hovertemplate


def test_sequential_scale_and_given_range():
    trace = heatmap([[0.0, 0.5]], zero_centred=False, range=(0, 1)).data[0]
    assert (trace.zmin, trace.zmax, trace.zmid) == (0, 1, None)
    assert trace.colorscale[-1][1] == theme.SEQUENTIAL[-1][1]
    trace = heatmap([[0.0, 0.5]], range=(-0.5, 2)).data[0]
    assert (trace.zmin, trace.zmax, trace.zmid) == (-2, 2, 0)
    with pytest.raises(ConfigError, match="low < high"):
        heatmap([[0.0]], range=(1, 1))


@pytest.mark.parametrize("zero_centred", [True, False])
@pytest.mark.parametrize("cell", [np.nan, np.inf, 0.0])
def test_missing_cells_are_gaps_and_leave_the_scale_alone(zero_centred, cell):
    fig = heatmap([[cell, cell]], zero_centred=zero_centred)
    assert np.isfinite([fig.data[0].zmin, fig.data[0].zmax]).all()
    assert fig.data[0].zmin < fig.data[0].zmax
    mixed = heatmap([[cell, 2.0]], zero_centred=zero_centred)
    assert mixed.data[0].zmax == 2.0
    assert mixed.layout.plot_bgcolor == theme.GAP
    assert mixed.layout.template.data.heatmap[0].hoverongaps is False


def test_repeated_labels_stay_apart():
    assert heatmap([[1.0, 2.0, 3.0]], cols=["a", "b", "a"]).data[0].x == ("a (0)", "b (1)", "a (2)")


def test_big_heatmaps_carry_nothing_per_cell_but_the_value():
    side = int(MAX_CELLS_WITH_TEXT**0.5)
    assert heatmap(np.ones((side, side))).data[0].texttemplate == "%{z:.2f}"
    assert heatmap(np.ones((side, side)), text=False).data[0].texttemplate is None
    big = heatmap(np.random.default_rng(0).normal(size=(300, 400)).astype(np.float32), text=True)
    trace = big.data[0]
    assert trace.texttemplate is None and trace.customdata is None and trace.text is None
    assert (trace.xgap, trace.ygap) == (0, 0)
    # float32 in base64, a few characters of it escaped; as text a cell takes some 20
    assert len(big.to_json()) < 8 * 300 * 400


def test_hover_texts_are_escaped_and_checked():
    trace = heatmap([[1.0, 2.0]], hover=[["<a>", "b"]]).data[0]
    assert trace.customdata.tolist() == [["&lt;a&gt;", "b"]]
    assert "%{customdata}" in trace.hovertemplate
    with pytest.raises(ShapeError, match=r"hover has shape \[1, 1\]"):
        heatmap([[1.0, 2.0]], hover=[["a"]])


def test_labels_must_fit():
    with pytest.raises(ShapeError, match="rows has 1 entries, but the values have 2"):
        heatmap([[1.0], [2.0]], rows=["a"])
    with pytest.raises(ShapeError, match="one string"):
        heatmap([[1.0, 2.0]], cols="ab")


def test_white_space_shows_and_long_tokens_are_cut():
    assert [visible(t) for t in (" the", "\n", "", "a\tb")] == ["·the", "\\n", "''", "a\\tb"]
    cut = visible("x" * 30 + "end")
    assert len(cut) == 24 and cut.endswith("end") and "…" in cut
    assert escape("</script>") == "&lt;/script&gt;"


def test_every_label_shows_where_there_is_room():
    few = heatmap(np.ones((3, 17)), cols=[f"token {i}" for i in range(17)])
    assert few.layout.xaxis.dtick == few.layout.yaxis.dtick == 1
    many = heatmap(np.ones((200, 300)))
    assert many.layout.xaxis.dtick is many.layout.yaxis.dtick is None


def test_a_colour_bar_is_no_taller_than_is_of_use():
    assert heatmap(np.ones((3, 3))).data[0].colorbar.lenmode is None
    tall = heatmap(np.ones((40, 3)), value_name="<v>").data[0].colorbar
    assert (tall.lenmode, tall.len, tall.title.text) == ("pixels", LONGEST_BAR, "&lt;v&gt;")


@pytest.mark.parametrize(
    ("n", "cols", "title", "wanted"),
    [(10, 7, "mamba", 5), (4, 17, "carry", 2), (3, 13, "", 3), (10, 7, "gated_delta_net: head", 4)],
)
def test_small_multiples_fill_their_rows_and_leave_titles_their_room(n, cols, title, wanted):
    assert side_by_side([title] * n, cols) == wanted

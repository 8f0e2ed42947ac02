"""Figures refuse what they cannot draw by name: tables, histories, edges of another type."""

from __future__ import annotations

import pandas as pd
import pytest

from hooked_ssm import plots
from hooked_ssm.errors import HookedSSMError
from hooked_ssm.plots.circuit import circuit_graph

pytestmark = pytest.mark.usefixtures("as_shipped")

FRAME = pd.DataFrame({"step": [1], "accuracy": [0.5]})
FIGURE = plots.heatmap([[1.0]])


@pytest.mark.parametrize(
    ("draw", "value", "name"),
    [
        *((draw, value, "histories") for draw in (plots.accuracy_curve, plots.loss_curve)
          for value in (FRAME, [FRAME], {"a": 3}, None)),
        *((draw, value, "frame") for draw in (
            plots.score_bars, plots.site_restoration, plots.accuracy_by_width,
            plots.accuracy_by_variant, plots.attribution_boxes, plots.dev_against_test)
          for value in ({"a": 1}, [1], None, "runs")),
        *((draw, value, "rows") for draw in (plots.mechanism_scatter, plots.attribution_bars)
          for value in (FRAME, {"a": 1}, ["a"], 3)),
        *((plots.loss_by_position, value, "curves") for value in (FRAME, {"a": 1})),
        *((circuit_graph, value, "edges") for value in ("ab", [("a", "b")], [("a", "b", "c")], 3)),
    ],
)  # fmt: skip
def test_wrong_types(draw, value, name):
    with pytest.raises(HookedSSMError, match=rf"{draw.__name__}: {name}="):
        draw(value)


@pytest.mark.parametrize(
    ("draw", "given", "wrong"),
    [
        (plots.accuracy_curve, {"histories": {"a": FRAME}}, {"chance": "0.5"}),
        (plots.accuracy_curve, {"histories": {"a": FRAME}}, {"title": 3}),
        (plots.mechanism_scatter, {"rows": [{}]}, {"x": "value"}),
        (plots.save, {"figure": FIGURE, "path": "a.html"}, {"figure": "a"}),
        (plots.save, {"figure": FIGURE, "path": "a.html"}, {"path": 3}),
        (plots.save, {"figure": FIGURE, "path": "a.html"}, {"width": "wide"}),
        (plots.report_page, {"title": "a", "sections": []}, {"sections": "text"}),
        (plots.report_page, {"title": "a", "sections": []}, {"title": None}),
    ],
)
def test_wrong_options(draw, given, wrong):
    with pytest.raises(HookedSSMError, match=next(iter(wrong))):
        draw(**{**given, **wrong})

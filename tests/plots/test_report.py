"""The report page: one file, nothing loaded, everything escaped."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

import pandas as pd
import pytest
from plotly.offline import get_plotlyjs

from hooked_ssm.errors import ConfigError
from hooked_ssm.plots import Section, accuracy_curve, heatmap, report_page
from hooked_ssm.plots.report import table_html
from tests.plots.pages import Page

NASTY = "</script><script>alert(1)</script>"
FRAME = pd.DataFrame(
    {"token": [NASTY, "b"], "accuracy": [0.123456, float("nan")], "steps": [1500, 20]}
)


def _page(items: Sequence[object]) -> str:
    return report_page(
        f"Report {NASTY}",
        [Section(f"Part {NASTY}", items), ("", ["Last."])],
        command=f"hooked-ssm demo {NASTY}",
        versions={"torch": "2.13"},
        time=datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc),
    )


def test_plotly_is_embedded_once_and_nothing_is_loaded():
    history = pd.DataFrame({"step": [0, 1], "accuracy": [0.0, 1.0]})
    figures = [heatmap([[1.0, 2.0]], cols=[NASTY, "b"]), accuracy_curve({NASTY: history})]
    source = _page([*figures, FRAME, f"Text {NASTY}"])
    page = Page(source)
    assert source.count(get_plotlyjs()) == 1
    assert source.count("Plotly.newPlot(") == get_plotlyjs().count("Plotly.newPlot(") + 2
    assert page.external() == []
    assert "default-src 'none'" in source


def test_without_figures_there_is_no_script():
    assert Page(_page(["Text.", FRAME])).tags.count("script") == 0


def test_what_the_caller_says_is_escaped():
    page = Page(_page([f"Text {NASTY}", FRAME, heatmap([[1.0]], title=NASTY, cols=[NASTY])]))
    assert not any("alert(1)" in s and "Plotly" not in s for s in page.scripts)
    # title, header, command, heading, text, table: all as text
    assert sum(t.count(NASTY) for t in page.text) >= 5


def test_header_table_and_text():
    source = _page(["One `code`.\n\nTwo.", FRAME])
    text = " ".join(Page(source).text)
    assert "torch 2.13" in text and "2026-01-02 03:04 UTC" in text
    assert "<p>One <code>code</code>.</p>\n<p>Two.</p>" in source
    assert '<td class="number">0.123</td>' in source
    assert '<td class="number">–</td>' in source and '<td class="number">1500</td>' in source


def test_defaults_say_command_versions_and_time():
    text = " ".join(Page(report_page("R", [])).text)
    assert "torch" in text and "python" in text and str(datetime.now().year) in text


def test_other_items_are_refused(as_shipped):
    with pytest.raises(ConfigError, match="cannot put a int in a report"):
        _page([3])


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        ([0.9999, -0.0009792, -2.127], ["1.000", "-0.001", "-2.127"]),
        ([39.2, 144.32, 0.5], ["39.2", "144.3", "0.5"]),
        ([0.0003, 0.01, 3e-5], ["0.0003", "0.01", "3e-05"]),  # learning rates, as they were set
        ([-0.00012345, 0.25], ["0.000", "0.250"]),
        ([float("nan"), 1.0], ["–", "1.000"]),
        ([50016, 2], ["50016", "2"]),
    ],
)
def test_a_columns_numbers_have_one_format(column, shown):
    page = Page(table_html(pd.DataFrame({"x": column})))
    assert [text.strip() for text in page.text if text.strip()] == ["x", *shown]

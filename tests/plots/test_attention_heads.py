"""circuitsvis' heads: offline, script once, tokens safe, a clear error without the package."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest
import torch

from hooked_ssm.errors import ConfigError, HookedSSMError, ShapeError
from hooked_ssm.plots import MissingDependencyError, attention_heads, html, pattern, report_page
from hooked_ssm.plots.attention_heads import circuitsvis_script
from tests.plots.pages import Page

TOKENS = ["<bos>", "</script>", "<!--"]


def _weights(*shape: int) -> torch.Tensor:
    weights = torch.rand(*shape, generator=torch.Generator().manual_seed(0))
    return weights.bfloat16().requires_grad_()


def _props(figure) -> dict:
    return json.loads(re.search(r"AttentionHeads, (\{.*\})\);", figure.body).group(1))


def test_props_hold_the_pattern_and_the_tokens():
    weights = _weights(2, 3, 3)
    figure = attention_heads(weights, TOKENS, names=["0.0", "0.1"])
    props = _props(figure)
    assert torch.allclose(torch.tensor(props["attention"]), weights.detach().float(), atol=1e-4)
    assert props["tokens"] == TOKENS
    assert props["attentionHeadNames"] == ["0.0", "0.1"]
    assert props["maxValue"] == -props["minValue"] == pytest.approx(float(weights.detach().max()))


def test_tokens_cannot_break_out_of_the_script():
    body = attention_heads(_weights(3, 3), TOKENS).body
    assert body.count("</script>") == body.count("<script>") == 1
    assert "<!--" not in body


def test_the_bundled_script_is_fit_for_a_page():
    script = circuitsvis_script()
    assert "</script" not in script and "sourceMappingURL" not in script
    assert script.endswith("window.CircuitsVis = CircuitsVis; }")


def test_a_page_embeds_the_script_once():
    figures = [attention_heads(_weights(2, 3, 3), TOKENS) for _ in range(3)]
    page = Page(report_page("Heads", [("", figures)]))
    assert sum("var CircuitsVis=" in s for s in page.scripts) == 1
    assert sum("CircuitsVis.render(" in s for s in page.scripts) >= 3
    assert page.external() == []
    assert len({re.search('id="([^"]+)"', f.body).group(1) for f in figures}) == 3


def test_save_writes_a_page(tmp_path):
    path = attention_heads(_weights(3, 3), TOKENS).save(tmp_path / "heads.html")
    page = Page(path.read_text())
    assert page.external() == [] and sum("var CircuitsVis=" in s for s in page.scripts) == 1
    with pytest.raises(ConfigError, match="not as .svg"):
        attention_heads(_weights(3, 3), TOKENS).save(tmp_path / "heads.svg")


def test_a_notebook_embeds_the_script_once_and_again_when_that_cell_runs_again(monkeypatch):
    monkeypatch.setattr(html, "_embedded_by", {})
    figure = attention_heads(_weights(3, 3), TOKENS)

    def shown_in(cell: str | None) -> bool:
        monkeypatch.setattr(html, "_running_cell", lambda: cell)
        return "var CircuitsVis=" in figure._repr_html_()

    assert shown_in("first")
    assert not shown_in("second")
    assert shown_in("first")
    assert shown_in(None)  # no notebook: nothing is known about the page


def test_only_the_first_heads_and_a_note():
    figure = attention_heads(_weights(5, 3, 3), TOKENS, most=2)
    assert len(_props(figure)["attention"]) == 2
    assert "The first 2 of 5 heads" in figure.body
    assert "(the first 2 of 5), 3 positions" in repr(figure)


def test_256_positions_are_quick_and_their_size_is_said():
    start = time.perf_counter()
    figure = attention_heads(_weights(256, 256), [f"t{i}" for i in range(256)])
    drawn = pattern(_weights(256, 256), [f"t{i}" for i in range(256)])
    assert len(figure._repr_html_()) < 3e6 and len(drawn.to_json()) < 1e6
    assert time.perf_counter() - start < 2
    assert re.search(r"0\.\d MB", repr(figure))


def test_signed_and_missing_weights():
    props = _props(attention_heads([[-2.0, 0.0], [float("nan"), 1.0]], ["a", "b"]))
    assert props["attention"] == [[[-2.0, 0.0], [0.0, 1.0]]]
    assert (props["minValue"], props["maxValue"]) == (-2.0, 2.0)


def test_without_circuitsvis_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "circuitsvis", None)
    with pytest.raises(MissingDependencyError, match=r"hooked-ssm\[notebooks\]") as raised:
        attention_heads(_weights(3, 3), TOKENS)
    assert isinstance(raised.value, ImportError) and isinstance(raised.value, HookedSSMError)
    assert len(pattern(_weights(3, 3), TOKENS).data) == 1  # the fallback it names


def test_errors():
    with pytest.raises(ShapeError, match="tokens has 2 entries"):
        attention_heads(_weights(3, 3), ["a", "b"])
    with pytest.raises(ShapeError, match=r"\[head query_pos key_pos\]"):
        attention_heads(_weights(1, 1, 3, 3), TOKENS)
    with pytest.raises(ConfigError, match="at least 1"):
        attention_heads(_weights(3, 3), TOKENS, most=0)

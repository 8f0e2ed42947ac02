"""A report in a real browser with no network: figures are drawn, tokens show as they are."""

from __future__ import annotations

import torch

from hooked_ssm.plots import attention_heads, pattern, report_page
from tests.browser import body_of, needs_browser

TOKENS = ["<bos>", "</script>", "<!--"]


@needs_browser
def test_report_draws_with_no_network(tmp_path):
    weights = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0)).tril()
    items = [pattern(weights, TOKENS), attention_heads(weights, TOKENS)]
    path = tmp_path / "report.html"
    path.write_text(report_page("Report", [("Patterns", items)]))
    body = body_of(path.as_uri(), tmp_path / "profile")
    assert body.count('class="main-svg"') >= 1
    for token in ("&lt;bos&gt; (0)", "&lt;/script&gt; (1)", "&lt;!-- (2)"):
        assert f">{token}</text>" in body
    assert body.count("<canvas") == 3  # two small heads and the large one
    assert "is not in this page yet" not in body

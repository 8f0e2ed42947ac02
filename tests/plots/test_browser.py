"""A report in a real browser with no network: figures are drawn, tokens show as they are."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from hooked_ssm.plots import attention_heads, pattern, report_page

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
TOKENS = ["<bos>", "</script>", "<!--"]


@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_report_draws_with_no_network(tmp_path):
    weights = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(0)).tril()
    items = [pattern(weights, TOKENS), attention_heads(weights, TOKENS)]
    path = tmp_path / "report.html"
    path.write_text(report_page("Report", [("Patterns", items)]))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=4000",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    body = done.stdout[done.stdout.rindex("</head>") :]
    assert body.count('class="main-svg"') >= 1
    for token in ("&lt;bos&gt; (0)", "&lt;/script&gt; (1)", "&lt;!-- (2)"):
        assert f">{token}</text>" in body
    assert body.count("<canvas") == 3  # two small heads and the large one
    assert "is not in this page yet" not in body

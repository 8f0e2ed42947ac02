"""A picture of a page, taken by a headless Chrome; for figures that are HTML."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from hooked_ssm.errors import MissingDependencyError

TIMEOUT = 60  # seconds
TIME = 3_000  # milliseconds that the page's own clock may run
MEASURE = """<script>setTimeout(() => document.documentElement.setAttribute("data-height",
Math.ceil(document.querySelector("main").getBoundingClientRect().height)), 2500)</script>"""


def screenshot(page: str, *, width: int, scale: Number, background: str | None) -> bytes:
    """Return a PNG of a page as high as its <main>; `scale` pixels per pixel of the page.

    Raises:
        MissingDependencyError: No Chrome or Chromium is found.
    """
    chrome = find_chrome()
    style = "main { max-width: none; margin: 0; padding: 0; } main > * { margin: 0 !important; }"
    style += f"body, :root {{ background: {background or 'transparent'}; }}"
    page = page.replace("</head>", f"<style>{style}</style></head>")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "page.html"), Path(folder, "page.png")
        options = [
            chrome,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-background-networking",
            "--default-background-color=00000000",
            f"--user-data-dir={folder}/profile",
            f"--virtual-time-budget={TIME}",
            f"--force-device-scale-factor={scale}",
        ]
        source.write_text(page.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
        shown = _run([*options, f"--window-size={width},800", "--dump-dom", source.as_uri()])
        found = re.search(r'data-height="(\d+)"', shown)
        height = int(found[1]) if found else 800
        source.write_text(page, encoding="utf-8")
        size = f"--window-size={width},{height}"
        _run([*options, size, f"--screenshot={target}", source.as_uri()])
        return target.read_bytes()


def find_chrome() -> str:
    """Return the path of Chrome or Chromium.

    Raises:
        MissingDependencyError: There is none, or no kaleido to find it.
    """
    try:
        from choreographer.browsers.chromium import Chromium
    except ImportError as error:
        raise MissingDependencyError(
            "a picture needs kaleido; install it with: pip install 'hooked-ssm[notebooks]', or "
            "save as .html"
        ) from error
    path = Chromium.find_browser(skip_local=False)
    if path is None:
        raise MissingDependencyError(
            "a picture needs Chrome or Chromium, which is not found; install it (apt-get install "
            "chromium, or: plotly_get_chrome), or save as .html"
        )
    return str(path)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    return done.stdout

"""The README's picture from the demo's results: python docs/make_images.py demo-out/results.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hooked_ssm import plots

rows = json.loads(Path(sys.argv[1]).read_text())
figure = plots.mechanism_scatter(rows, title="How four small models recall (make demo)")
plots.save(figure, Path(__file__).parent / "images" / "demo.png", background="white")

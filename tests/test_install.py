"""A plain install on a laptop: nothing optional is imported (cases.jsonl, import-cpu-only)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]

FORBIDDING = """
import sys

ABSENT = ("triton", "circuitsvis", "mamba_ssm", "causal_conv1d", "fla", "ray")

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r} (made absent)", name=name)

sys.meta_path.insert(0, Absent())
import torch
torch.set_num_threads(1)
"""


def run_python(code: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter where optional packages cannot be imported."""
    script = FORBIDDING + textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=600,
        check=False,
    )


def test_everything_runs_without_optional_packages():
    done = run_python(
        """
        from hooked_ssm import HookedModel, ModelConfig

        print("EXTRA", sorted({"plotly", "typer"} & set(sys.modules)))
        from hooked_ssm.errors import KernelUnavailableError
        from hooked_ssm.mixers import MIXERS
        from hooked_ssm.ops.dispatch import use_impl

        ids = torch.arange(12).view(2, 6) % 7
        for name in MIXERS:
            cfg = ModelConfig(architecture=name, n_layers=2, d_model=16, d_vocab=7, n_ctx=8)
            model = HookedModel(cfg)
            model(ids, return_type="loss").backward()
            logits, cache = model.run_with_cache(ids)
            hook = ("blocks.1.hook_resid_pre", lambda value, hook: 0 * value)
            patched = model.run_with_hooks(ids, fwd_hooks=[hook])
            assert logits.isfinite().all() and not torch.equal(patched, logits), name
            assert len(cache) > 5, name
        try:
            with use_impl("triton"):
                HookedModel(
                    ModelConfig(architecture="mamba", n_layers=1, d_model=8, d_vocab=7, n_ctx=8)
                )(ids)
        except KernelUnavailableError as error:
            print("MESSAGE", error)
        print("LOADED", sorted(set(ABSENT) & {m.split(".")[0] for m in sys.modules}))
        """
    )
    assert done.returncode == 0, done.stderr[-3000:]
    message = next(s for s in done.stdout.splitlines() if s.startswith("MESSAGE "))
    assert "triton" in message.lower() and "impl='auto'" in message
    assert len(message) < 300, "one sentence and its remedy"
    assert "LOADED []" in done.stdout
    assert "EXTRA []" in done.stdout, "plots and the command line load when they are used"


def test_a_plot_without_circuitsvis_names_what_to_install_or_falls_back():
    done = run_python(
        """
        from hooked_ssm import plots
        figure = plots.heatmap(torch.eye(3), rows=["a", "b", "c"], cols=["d", "e", "f"])
        print("FIGURE", type(figure).__name__)
        """
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FIGURE Figure" in done.stdout

"""Progress bars: in a notebook without ipywidgets they are text, and nobody is warned of it."""

from __future__ import annotations

import subprocess
import sys

NOTEBOOK = """
import sys, types, warnings
sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: None)
sys.modules["ipywidgets"] = None
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    import hooked_ssm
    from hooked_ssm.progress import tqdm
    warnings.warn("IProgress not found elsewhere")
said = [str(w.message) for w in found if "IProgress" in str(w.message)]
assert said == ["IProgress not found elsewhere"], said
assert list(tqdm(range(3), disable=True)) == [0, 1, 2]
"""


def test_no_warning_where_widgets_are_missing():
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

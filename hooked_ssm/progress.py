"""The progress bar of every long call: tqdm's, as a widget in notebooks that can show one."""

from __future__ import annotations

import warnings

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm.auto warns, and draws its bar as text, which will do.
    warnings.filterwarnings("ignore", "IProgress not found", TqdmWarning)
    from tqdm.auto import tqdm

__all__ = ["tqdm"]

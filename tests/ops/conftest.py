"""Triton's interpreter at twice its speed, for every test of the ops."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.conftest import CUDA


@pytest.fixture(autouse=True)
def language_patched_once_a_launch(monkeypatch):
    """Keep the interpreter from patching Triton's language anew at each call inside a kernel.

    Every call of a jitted function (`tl.sum` is one) does so, and the patches are undone at the
    end of the launch only; the first one of a launch is enough.
    """
    if CUDA or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[Any] = set()

    def patch_once(fn: Any) -> Any:
        if fn in patched:
            return interpreter._LangPatchScope()
        patched.add(fn)
        return patch(fn)

    def run_from_clean(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_from_clean)

"""How far the memory of this process rises while something runs, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

PROCESS = Path("/proc/self")


def peak_mib(run: Callable[[], object]) -> float:
    """MiB of resident memory above what there was before, at the highest; nan but on Linux.

    What `run` needed once only (threads, caches) counts too: run it before.
    """
    reset = PROCESS / "clear_refs"
    if not reset.exists():
        return float("nan")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is kept would be used unseen
    reset.write_text("5")  # the high-water mark starts anew
    before = _kib("VmRSS")
    result = run()
    highest = _kib("VmHWM")
    del result
    return (highest - before) / 1024


def _kib(name: str) -> int:
    lines = dict(line.split(":", 1) for line in (PROCESS / "status").read_text().splitlines())
    return int(lines[name].split()[0])

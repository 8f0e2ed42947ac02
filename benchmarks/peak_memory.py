"""The memory of this process: how far it rises while something runs, and whether it is kept."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

PROCESS = Path("/proc/self")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""glibc's names for mallopt."""


def keep_freed_memory() -> None:
    """Have glibc keep freed memory of up to 32 MiB a piece (the most it can) for what comes next.

    By itself it gives the memory back or not, depending on what was freed before, and a tensor of
    6 MiB costs between 0 and 6 ms to touch anew. Larger ones always come from the system.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)


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

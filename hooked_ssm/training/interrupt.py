"""Ctrl-C (or a notebook's stop button) waits for the end of the current training step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether an interrupt came; a second one raises at once.

    Stopping in the middle of an update would leave weights that belong to no step. A handler
    somebody else installed is left alone, and threads other than the main one get no signals.
    """
    came = False

    def note(signal_number: int, frame: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""Starting background threads, and waiting for several of them within one time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class NoThreadError(RuntimeError):
    """The system refuses another thread."""


def start(thread: threading.Thread) -> None:
    """Start a thread, or raise NoThreadError."""
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError(str(error)) from error


def each_within(timeout_s: float, *waits: Callable[[float], object]) -> list[object]:
    """Call all of these within one time limit; each receives the seconds that are left."""
    deadline = time.monotonic() + timeout_s
    return [wait(max(0.0, deadline - time.monotonic())) for wait in waits]

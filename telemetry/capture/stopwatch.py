"""Stopwatch: the CPU time that the training thread spends on telemetry."""

from __future__ import annotations

import threading
import time


class Stopwatch:
    """Adds up the CPU time of one thread inside of ``with`` blocks, which may be nested.

    Attributes:
        is_on: Whether blocks that begin are timed.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._thread, self._nesting = threading.get_ident(), 0
        self._begin_s = self._inside_s = 0.0

    def __enter__(self) -> None:
        if not self.is_on or threading.get_ident() != self._thread:
            return
        if self._nesting == 0:
            self._begin_s = time.thread_time()
        self._nesting += 1

    def __exit__(self, *exception: object) -> None:
        if self._nesting == 0 or threading.get_ident() != self._thread:
            return
        self._nesting -= 1
        if self._nesting == 0:
            self._inside_s += time.thread_time() - self._begin_s

    def take(self) -> float:
        """Return the seconds since the last call; from now on the caller's thread is timed."""
        if threading.get_ident() != self._thread:
            self._thread, self._nesting = threading.get_ident(), 0
        elif self._nesting:
            now = time.thread_time()
            self._inside_s += now - self._begin_s
            self._begin_s = now
        taken_s, self._inside_s = self._inside_s, 0.0
        return taken_s

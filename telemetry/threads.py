"""Background threads: starting them, waiting for several at once, and forks meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import TypeVar

Class = TypeVar("Class", bound=type)


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


def without_locks(decorated: Class) -> Class:
    """Class whose cached properties have no lock: all instances share it in Python 3.10 and 3.11.

    If a process is forked while a thread holds it, the new process would wait for it forever.
    """
    for member in vars(decorated).values():
        if isinstance(member, cached_property):
            member.lock = nullcontext()  # type: ignore[attr-defined]
    return decorated

"""Which loggers of this process write to which directory, and whether anyone else does."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("telemetry")


class DirectoryClaim:
    """Held by a logger as long as it writes to a directory.

    A model's new claim on a directory takes the place of its former one, whose logger is closed.
    That others claim the directory, here or in another process, is reported; not where they use the
    same writer. It takes a lock on the directory itself: no file is left behind, and the system
    lifts it when the process ends in whatever way. Where there are no such locks, as on Windows, in
    remote directories and on some network drives, nothing is noticed.

    Args:
        model: What the logger watches.
        log_dir: Where it writes.
        close: Closes it.
    """

    def __init__(self, model: object, log_dir: str, close: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._directory = log_dir if "://" in log_dir else os.path.realpath(log_dir)
        self._close = weakref.WeakMethod(close)
        self._writer: weakref.ref[object] | None = None
        self._lock: _Lock | None = None
        for other in list(_CLAIMS):
            if other._model() is model and other._directory == self._directory:
                log.warning(
                    "telemetry: a new HookLogger takes the place of the one that watched the same "
                    "model and wrote to %s; that one is closed",
                    log_dir,
                )
                if (close_it := other._close()) is not None:
                    close_it()

    def hold(self, writer: object) -> None:
        """Begin to write with ``writer``; the directory is there."""
        shared = [other._lock for other in _CLAIMS if other._writer and other._writer() is writer]
        self._writer = weakref.ref(writer)
        self._lock = shared[0] if shared else _Lock(self._directory)
        _CLAIMS.add(self)
        if not shared and self._lock is not None and self._lock.is_contested:
            log.warning(
                "telemetry: %s is being written to by another HookLogger, in this process or "
                "another one, and their steps will mix. Give each run and each rank a directory "
                "of its own; loggers of several models in one process may share a SummaryWriter",
                self._directory,
            )

    def release(self) -> None:
        """The logger writes no more; harmless when done twice."""
        self._lock = self._writer = None
        _CLAIMS.discard(self)


class _Lock:
    """A shared lock on a directory, until nobody refers to this object.

    Attributes:
        is_contested: Whether there were others when it was taken.
    """

    def __init__(self, directory: str) -> None:
        self.is_contested = False
        if fcntl is None:
            return
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.is_contested = True
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _leave_to_parent() -> None:
    """In a forked child: a lock lives until its last copy is closed, perhaps long after us."""
    for claim in list(_CLAIMS):
        claim.release()


# Outlives a reload of this module in a notebook.
_CLAIMS: weakref.WeakSet[DirectoryClaim] = globals().get("_CLAIMS") or weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)

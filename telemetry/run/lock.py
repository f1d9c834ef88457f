"""Directory lock: a shared lock, which detects other loggers that write to the directory."""

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


class DirectoryLock:
    """Shared lock of a logger on the directory where it writes.

    A new lock for the same model and directory replaces the former one and closes its logger. If
    other loggers lock the directory, in this process or another one, a warning is logged, unless
    they share a writer. The directory itself is locked: the lock leaves no file, and the system
    releases it however the process ends. Other processes are not detected on Windows, in remote
    directories and on some network drives.
    """

    def __init__(self, model: object, log_dir: str, close: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._directory = log_dir if "://" in log_dir else os.path.realpath(log_dir)
        self._close = weakref.WeakMethod(close)
        self._writer: weakref.ref[object] = weakref.ref(self)
        self._unlock: Callable[[], object] = lambda: None
        for other in list(_LOCKS):
            if other._model() is model and other._directory == self._directory:
                log.warning(
                    "telemetry: a new HookLogger replaces the one that watched the same model and "
                    "wrote to %s; that one is now closed",
                    log_dir,
                )
                if (close_it := other._close()) is not None:
                    close_it()

    def acquire(self, writer: object) -> None:
        """Lock the directory, which must exist, for this writer; log a conflict."""
        is_shared = any(other._writer() is writer for other in _LOCKS)
        self._writer = weakref.ref(writer)
        _LOCKS.add(self)
        if self._has_conflict() and not is_shared:
            log.warning(
                "telemetry: another HookLogger, in this process or another one, also writes to %s, "
                "and their steps will mix. Give each run its own directory. Ranks that train one "
                "model write one run together if torch.distributed is initialized before the "
                "logger is made; loggers of several models in one process may share a "
                "SummaryWriter",
                self._directory,
            )

    def _has_conflict(self) -> bool:
        """Take a shared lock; return whether others held one before."""
        if fcntl is None:
            return False
        conflict = False
        with suppress(OSError):
            descriptor = os.open(self._directory, os.O_RDONLY)
            self._unlock = weakref.finalize(self, os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                conflict = True
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return conflict

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._unlock()
        _LOCKS.discard(self)


def _release_in_child() -> None:
    """Release all locks in a forked child: its copies could outlive the parent."""
    for lock in list(_LOCKS):
        lock.release()


# Outlives a reload of this module in a notebook.
_LOCKS: weakref.WeakSet[DirectoryLock] = globals().get("_LOCKS") or weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)

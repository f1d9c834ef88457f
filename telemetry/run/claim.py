"""Notices when several loggers write to the same directory."""

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
    """A logger's claim on a directory, held while it writes there.

    A new claim for the same model and directory replaces the former one and closes its logger. If
    other loggers claim the directory, in this process or another one, a warning is logged, unless
    they share a writer. The claim is a lock on the directory itself: it leaves no file, and the
    system releases it however the process ends. Windows, remote directories and some network drives
    have no such locks; there, other processes are not noticed.
    """

    def __init__(self, model: object, log_dir: str, close: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._directory = log_dir if "://" in log_dir else os.path.realpath(log_dir)
        self._close = weakref.WeakMethod(close)
        self._writer: weakref.ref[object] = weakref.ref(self)
        self._unlock: Callable[[], object] = lambda: None
        for other in list(_CLAIMS):
            if other._model() is model and other._directory == self._directory:
                log.warning(
                    "telemetry: a new HookLogger replaces the one that watched the same model and "
                    "wrote to %s; that one is now closed",
                    log_dir,
                )
                if (close_it := other._close()) is not None:
                    close_it()

    def hold(self, writer: object) -> None:
        """Begin to write with ``writer``; the directory must exist."""
        is_shared = any(other._writer() is writer for other in _CLAIMS)
        self._writer = weakref.ref(writer)
        _CLAIMS.add(self)
        if self._is_contested() and not is_shared:
            log.warning(
                "telemetry: another HookLogger, in this process or another one, also writes to %s, "
                "and their steps will mix. Give each run its own directory. Ranks that train one "
                "model write one run together if torch.distributed is initialized before the "
                "logger is made; loggers of several models in one process may share a "
                "SummaryWriter",
                self._directory,
            )

    def _is_contested(self) -> bool:
        """Lock the directory, shared; whether others had done so before."""
        if fcntl is None:
            return False
        contested = False
        with suppress(OSError):
            descriptor = os.open(self._directory, os.O_RDONLY)
            self._unlock = weakref.finalize(self, os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                contested = True
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return contested

    def release(self) -> None:
        """End the claim. Harmless when repeated."""
        self._unlock()
        _CLAIMS.discard(self)


def _leave_to_parent() -> None:
    """Release all claims in a forked child, whose copies of the locks could outlive the parent."""
    for claim in list(_CLAIMS):
        claim.release()


# Outlives a reload of this module in a notebook.
_CLAIMS: weakref.WeakSet[DirectoryClaim] = globals().get("_CLAIMS") or weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)

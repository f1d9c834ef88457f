"""Failures of telemetry: logged once, never raised into the training loop."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from telemetry.plain_text import printable

log = logging.getLogger("telemetry")
_PREFIX = "telemetry: "


def _without_prefix(record: logging.LogRecord) -> bool:
    """Remove our prefix where logging is configured: handlers print the logger's name."""
    if isinstance(record.msg, str) and log.hasHandlers():
        record.msg = record.msg.removeprefix(_PREFIX)
    return True


log.addFilter(_without_prefix)


def show(message: str) -> None:
    """Log a message at INFO; print it where logging is not configured, or to a terminal."""
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info(message)
    elif sys.stderr is not None and (not log.hasHandlers() or sys.stderr.isatty()):
        print(message, file=sys.stderr)


def show_at_end(message: str) -> None:
    """Show what was logged at INFO before, unless INFO is shown: in a log, else on stderr."""
    if not log.hasHandlers():
        if sys.stderr is not None:
            print(message, file=sys.stderr)
    elif not log.isEnabledFor(logging.INFO):
        log.warning(message)


class Failures:
    """Logs the first failure of each kind inside telemetry."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def report(self, doing: str) -> None:
        """Log the exception being handled; ``doing`` says what failed: "to write an alert"."""
        if doing not in self._logged:
            self._logged.add(doing)
            log.warning("telemetry failed %s; training continues", doing, exc_info=True)

    @contextmanager
    def contained(self, doing: str, of: type[BaseException] = Exception) -> Iterator[None]:
        """Report an exception of the body and continue after it.

        ``of=BaseException`` is for users' functions on the worker: ``sys.exit()`` would end it.
        """
        try:
            yield
        except of:
            self.report(doing)

    def log_once(self, message: str, *, kind: str = "", level: int = logging.WARNING) -> None:
        """Log a message once, or once for each ``kind`` of message."""
        if (kind or message) not in self._logged:
            self._logged.add(kind or message)
            log.log(level, _PREFIX + "%s", printable(message))


class RaisingFailures(Failures):
    """Raises what :class:`Failures` logs, for tests and single passes."""

    def report(self, doing: str) -> None:
        raise

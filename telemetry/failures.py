"""Failures of telemetry: logged once, never raised into the training loop."""

from __future__ import annotations

import logging
import os
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from telemetry.plain_text import printable

log = logging.getLogger("telemetry")
_PREFIX = "telemetry: "
_WIDTH = 80  # columns of a terminal that does not tell its size


def _left_to_logging(record: logging.LogRecord) -> bool:
    """Print a record on the terminal, unless logging is configured.

    Handlers print the logger's name, so that our prefix is removed for them.
    """
    if log.hasHandlers():
        if isinstance(record.msg, str):
            record.msg = record.msg.removeprefix(_PREFIX)
        return True
    if record.levelno < logging.WARNING or not _has_terminal():
        return True
    text = _wrapped(record.getMessage())
    if record.exc_info:
        text += "\n" + logging.Formatter().formatException(record.exc_info)
    _print(text)
    return False


log.addFilter(_left_to_logging)


def _has_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _wrapped(text: str) -> str:
    """Wrap lines at the terminal's width; the rest of a line is indented by two more spaces."""
    width = _WIDTH
    with suppress(OSError, ValueError):  # it is no file
        width = os.get_terminal_size(sys.stderr.fileno()).columns or _WIDTH
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.split("\n"):
        wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += wrapper.wrap(line)
    return "\n".join(lines)


def _print(text: str) -> None:
    """Print on stderr. On a terminal, a progress bar gives way and is drawn again below."""
    clear = "\r\x1b[J" if _has_terminal() else ""
    sys.stderr.write(f"{clear}{text}\n")
    sys.stderr.flush()


def show(message: str) -> None:
    """Log a message at INFO; print it where logging is not configured, or to a terminal."""
    if log.level > logging.INFO:  # a level that the user has set
        return
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info(message)
    elif _has_terminal() or (sys.stderr is not None and not log.hasHandlers()):
        _print(message)


def show_at_end(message: str) -> None:
    """Show what was logged at INFO before, unless INFO is shown: in a log, else on stderr."""
    if log.level > logging.WARNING:  # a level that the user has set
        return
    if not log.hasHandlers():
        if sys.stderr is not None:
            _print(_wrapped(message) if _has_terminal() else message)
    elif not log.isEnabledFor(logging.INFO):
        log.warning(message)


def _is_of_a_signal() -> bool:
    """Whether a signal handler raised the exception being handled: it may interrupt any line."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(sys.exc_info()[2]))


class Failures:
    """Logs the first failure of each kind inside telemetry.

    What a signal handler raises is no failure and passes: a timeout of the program, for example.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def report(self, doing: str) -> None:
        """Log the exception being handled; ``doing`` says what failed: "to write an alert"."""
        if _is_of_a_signal():
            raise
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

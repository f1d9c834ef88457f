"""Background thread that writes the items of a bounded queue; no caller blocks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sized
from typing import Generic, Protocol, TypeVar

_logger = logging.getLogger(__name__)

_ITEM_OVERHEAD_BYTES = 64  # memory of a queued item besides its bytes
_WAKE_BYTES = 1 << 20
# Droppable items are dropped at the high-water mark, others at four times that: a disk that fails
# for a day must not take the memory that training needs.
_HARD_LIMIT_FACTOR = 4
_MIN_FLUSH_S = 0.01  # torch's writer takes flush_secs=0, too
PATIENCE_S = 30.0

Item = TypeVar("Item", bound=Sized)


class NoThreadError(RuntimeError):
    """The system refuses another thread."""


def start(thread: threading.Thread) -> None:
    """Start a thread, or raise NoThreadError."""
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError(str(error)) from error


class Files(Protocol[Item]):
    """Destination of items; used on the background thread alone."""

    def write(self, items: deque[Item], *, urgent: bool) -> None:
        """Write items and remove these from ``items``; raise the first failure."""

    def close(self) -> None: ...


class BackgroundWriter(Generic[Item]):
    """Bounded queue of items, and the thread that writes them.

    The thread starts with the first item. After a failed write, items stay queued and the write is
    retried every ``flush_s``. In a forked child, all calls do nothing.

    Args:
        name, what: Names of this writer and of its items in log messages.
        flush_s: Longest time in seconds that an item stays queued.
        max_pending_bytes: High-water mark. Above it, droppable items are dropped; above four times
            as many bytes, all items. An empty queue accepts an item of any size.

    Attributes:
        dropped_count: Number of dropped droppable items.
        failure: Exception of the latest write; None if it succeeded.
    """

    dropped_count = 0
    failure: Exception | None = None

    def __init__(
        self,
        files: Files[Item],
        *,
        name: str,
        what: str = "events",
        flush_s: float = 1.0,
        max_pending_bytes: int = 64 << 20,
    ) -> None:
        self._process_id = os.getpid()
        self._files = files
        self._name = name
        self._what = what
        self._flush_s = max(flush_s, _MIN_FLUSH_S)
        self._droppable_limit = max_pending_bytes
        self._hard_limit = max_pending_bytes * _HARD_LIMIT_FACTOR
        # Re-entrant: a signal handler may add an item while its thread is adding one.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending: deque[Item] = deque()
        self._writing: deque[Item] = deque()  # taken by the thread
        self._pending_bytes = 0  # of both
        self._refused_count = 0
        self._flush_wanted = True  # the first round begins the file
        self._closing = False
        self._rounds_begun = 0
        self._round_began_s = time.monotonic()
        self._rounds_done = 0
        self._runs = False  # the thread
        self._is_failure_logged = False  # without items: the opener raises
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"telemetry: {what}", daemon=True)

    def _start(self) -> None:
        with self._lock:
            if not self._runs:
                self._runs = True  # first: a signal handler may add an item while the thread starts
                try:
                    start(self._thread)
                except NoThreadError:
                    self._runs = False
                    raise

    @property
    def is_here(self) -> bool:
        """Whether this process is not a forked child."""
        return os.getpid() == self._process_id

    @property
    def lost_count(self) -> int:
        """Number of other dropped items; after closing, also of items that are still queued.

        It decreases when a slow disk accepts them later.
        """
        if not self.is_here:
            return 0
        with self._lock:
            waiting = len(self._pending) + len(self._writing) if self._closed else 0
            return self._refused_count + waiting

    def put(self, item: Item, *, droppable: bool, flush: bool) -> None:
        """Queue an item, or drop it if the queue is full; raise OSError on a closed writer."""
        if not self.is_here:
            self._put_elsewhere()
            return
        with self._lock:
            if self._closing:
                raise OSError(f"{self._name}: the writer is closed")
            self._start()
            limit = self._droppable_limit if droppable else self._hard_limit
            size = len(item) + _ITEM_OVERHEAD_BYTES
            if self._pending_bytes and self._pending_bytes + size > limit:
                self._count_drop(droppable)
            else:
                self._pending.append(item)
                self._pending_bytes += size
            if flush:
                self._flush_wanted = True
            # Otherwise nothing has become due.
            if (flush or self._pending_bytes >= _WAKE_BYTES) and self._is_due():
                self._changed.notify_all()

    def flush(self, timeout_s: float = PATIENCE_S) -> bool:
        """Block until all queued items are written or have failed; return False on a timeout."""
        if not self.is_here:
            return True
        with self._changed:
            self._flush_wanted = True
            self._changed.notify_all()
            next_round = self._rounds_begun + 1
            return self._changed.wait_for(
                lambda: not self._runs or self._rounds_done >= next_round, timeout_s
            )

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """Write the queued items within the timeout, end the thread, and log lost items."""
        if not self.is_here or self._closed:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            # Not Thread.join(): a signal handler that closes the writer may have interrupted
            # this very thread in put(), and only this wait releases its lock.
            self._changed.wait_for(lambda: not self._runs, timeout_s)
            self._closed = True
        self._report_losses()

    def _put_elsewhere(self) -> None:
        """Handle an item that is added in a forked child."""

    def _is_due(self) -> bool:
        # After a failure, only the clock or flush() starts another attempt.
        if self._pending_bytes >= _WAKE_BYTES and self.failure is None:
            return True
        return self._flush_wanted or self._closing

    def _count_drop(self, droppable: bool) -> None:
        if self.failure is None and not self.dropped_count + self._refused_count:
            what = f"{self._what} arrive faster than they can be written"
            _logger.warning("%s: %s; measurements are dropped", self._name, what)
        self.dropped_count += droppable
        self._refused_count += not droppable

    def _report_losses(self) -> None:
        losses = []
        ago_s = time.monotonic() - self._round_began_s
        hang = f"a write that began {ago_s:.1f} s ago has not ended" if self._runs else ""
        if self.dropped_count:
            losses.append(f"{self.dropped_count} measurements were dropped, the queue was full")
        if self.lost_count:
            reason = hang or self.failure or "the queue was full"
            losses.append(f"{self.lost_count} {self._what} could not be written ({reason})")
        elif hang:
            losses.append(hang)
        if losses:
            _logger.warning("%s: %s", self._name, "; ".join(losses))

    def _run(self) -> None:
        try:
            while not self._write_round():
                pass
            self._files.close()
        finally:
            with self._changed:
                self._runs = False
                self._changed.notify_all()

    def _write_round(self) -> bool:
        """Block until a write is due, and write all items; return whether it was the last one."""
        with self._changed:
            self._changed.wait_for(self._is_due, self._flush_s)
            items, self._pending = self._pending, deque()
            self._writing = items
            taken_bytes = self._pending_bytes
            last = self._closing
            urgent = self._flush_wanted or last
            self._flush_wanted = False
            self._rounds_begun += 1
            self._round_began_s = time.monotonic()
        failure = None
        try:
            self._files.write(items, urgent=urgent)
        except Exception as error:  # no failure of a file may end this thread
            failure = error
        if failure is not None and taken_bytes and not self._is_failure_logged:
            self._is_failure_logged = True
            _logger.warning("%s: %s cannot be written for now: %s", self._name, self._what, failure)
        elif failure is None and self._is_failure_logged:
            self._is_failure_logged = False
            _logger.info("%s: %s are written again", self._name, self._what)
        with self._changed:
            self.failure = failure
            self._writing = deque()
            self._pending.extendleft(reversed(items))
            left_bytes = sum(len(item) + _ITEM_OVERHEAD_BYTES for item in items)
            self._pending_bytes += left_bytes - taken_bytes
            self._rounds_done += 1
            self._changed.notify_all()
        return last


def each_within(timeout_s: float, *waits: Callable[[float], object]) -> list[object]:
    """Call all of these within one time limit; each receives the seconds that are left."""
    deadline = time.monotonic() + timeout_s
    return [wait(max(0.0, deadline - time.monotonic())) for wait in waits]

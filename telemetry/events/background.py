"""Hands records to one background thread, which writes them; the caller never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sized
from typing import Generic, Protocol, TypeVar

_logger = logging.getLogger(__name__)

_RECORD_OVERHEAD_BYTES = 64  # what a waiting record costs beside its bytes
_WAKE_BYTES = 1 << 20
# Measurements make way at the limit. The others must not be lost, but nor may a disk that stays
# away for a day eat the memory that training needs.
_HARD_LIMIT_FACTOR = 4
_MIN_FLUSH_S = 0.01  # torch's writer takes flush_secs=0, too
PATIENCE_S = 30.0

Record = TypeVar("Record", bound=Sized)


class Files(Protocol[Record]):
    """Where records go: local or remote files. Only the background thread uses them."""

    def write(self, records: deque[Record], *, urgent: bool) -> None:
        """Takes away what it has written, leaves the rest in its order; raises what stopped it."""

    def close(self) -> None: ...


class BackgroundWriter(Generic[Record]):
    """A bounded queue of records, and the thread that empties it.

    What cannot be written waits in the queue, and is tried again every ``flush_s``.

    Args:
        files: Where the records go.
        name: What log messages call this writer.
        what: What they call the records.
        flush_s: The longest time in seconds that a record waits before it is written.
        max_pending_bytes: A droppable record is dropped if there would be more waiting with it,
            any other if there would be four times as much. One that finds nothing waiting is taken,
            however large.

    Attributes:
        dropped_count: Droppable records that found the queue full.
        failure: What stopped the latest write; None if it succeeded.
    """

    def __init__(
        self,
        files: Files[Record],
        *,
        name: str,
        what: str = "events",
        flush_s: float,
        max_pending_bytes: int,
    ) -> None:
        self.dropped_count = 0
        self.failure: Exception | None = None
        self._files = files
        self._name = name
        self._what = what
        self._flush_s = max(flush_s, _MIN_FLUSH_S)
        self._droppable_limit = max_pending_bytes
        self._hard_limit = max_pending_bytes * _HARD_LIMIT_FACTOR
        # Re-entrant: a signal handler may add a record while its thread is adding one.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending: deque[Record] = deque()
        self._writing: deque[Record] = deque()  # what the thread has taken up
        self._pending_bytes = 0  # of both
        self._refused_count = 0
        self._flush_wanted = True  # the first round begins the file
        self._closing = False
        self._rounds_begun = 0
        self._round_began_s = time.monotonic()
        self._rounds_done = 0
        self._finished = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"telemetry: {what}", daemon=True)
        self._thread.start()

    @property
    def lost_count(self) -> int:
        """Records that are not droppable and found the queue full; once closed, also all that wait.

        It falls again if a disk that did not answer in time takes them after all.
        """
        with self._lock:
            waiting = len(self._pending) + len(self._writing) if self._closed else 0
            return self._refused_count + waiting

    def put(self, record: Record, *, droppable: bool, flush: bool) -> None:
        """Adds a record to the queue; drops it if the queue is full. Never waits for the disk.

        Raises:
            OSError: The writer is closed.
        """
        size = len(record) + _RECORD_OVERHEAD_BYTES
        with self._lock:
            if self._closing:
                raise OSError(f"{self._name}: the writer is closed")
            limit = self._droppable_limit if droppable else self._hard_limit
            if self._pending_bytes and self._pending_bytes + size > limit:
                self._count_drop(droppable)
                return
            self._pending.append(record)
            self._pending_bytes += size
            if flush:
                self._flush_wanted = True
            if self._is_due():
                self._changed.notify_all()

    def flush(self, timeout_s: float = PATIENCE_S) -> bool:
        """Waits until everything added so far has been written, or has failed to be.

        Returns:
            Whether that was so within the time; if not, the disk has not answered.
        """
        with self._changed:
            self._flush_wanted = True
            self._changed.notify_all()
            next_round = self._rounds_begun + 1
            return self._changed.wait_for(
                lambda: self._finished or self._rounds_done >= next_round, timeout_s
            )

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """Writes what waits, ends the thread, and says what was lost; within this time in all."""
        with self._changed:
            if self._closed:
                return
            self._closing = True
            self._changed.notify_all()
            # Not Thread.join(): a signal handler that closes the writer may have interrupted
            # this very thread in put(), and only a wait here gives its lock away.
            self._changed.wait_for(lambda: self._finished, timeout_s)
            self._closed = True
        self._report_losses()

    def _is_due(self) -> bool:
        # After a failure only the clock or a wish to flush makes for another attempt.
        if self._pending_bytes >= _WAKE_BYTES and self.failure is None:
            return True
        return self._flush_wanted or self._closing

    def _count_drop(self, droppable: bool) -> None:
        if self.failure is None and not self.dropped_count + self._refused_count:
            _logger.warning(
                "%s: %s come faster than they can be written; measurements are dropped",
                self._name,
                self._what,
            )
        if droppable:
            self.dropped_count += 1
        else:
            self._refused_count += 1

    def _report_losses(self) -> None:
        losses = []
        ago_s = time.monotonic() - self._round_began_s
        hang = "" if self._finished else f"a write that began {ago_s:.1f} s ago has not ended"
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
                self._finished = True
                self._changed.notify_all()

    def _write_round(self) -> bool:
        """Waits until it is time to, then writes what there is; tells whether that was the last."""
        with self._changed:
            self._changed.wait_for(self._is_due, self._flush_s)
            records, self._pending = self._pending, deque()
            self._writing = records
            taken_bytes = self._pending_bytes
            urgent = self._flush_wanted or self._closing
            self._flush_wanted = False
            last = self._closing
            self._rounds_begun += 1
            self._round_began_s = time.monotonic()
        self._write(records, urgent)
        with self._changed:
            self._writing = deque()
            self._pending.extendleft(reversed(records))
            self._pending_bytes -= taken_bytes - _total_bytes(records)
            self._rounds_done += 1
            self._changed.notify_all()
        return last

    def _write(self, records: deque[Record], urgent: bool) -> None:
        try:
            self._files.write(records, urgent=urgent)
        except Exception as error:  # nothing that goes wrong with a file may end this thread
            if self.failure is None:
                _logger.warning(
                    "%s: %s cannot be written for now: %s", self._name, self._what, error
                )
            self.failure = error
        else:
            if self.failure is not None:
                _logger.info("%s: %s are written again", self._name, self._what)
            self.failure = None


def _total_bytes(records: Iterable[Sized]) -> int:
    return sum(len(record) + _RECORD_OVERHEAD_BYTES for record in records)

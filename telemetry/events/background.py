"""Hands records to one background thread, which writes them; the caller never waits."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

_logger = logging.getLogger(__name__)

_RECORD_OVERHEAD_BYTES = 64  # what a waiting record costs beside its bytes
_WAKE_BYTES = 1 << 20
# Measurements make way at the limit. The others must not be lost, but nor may a disk that stays
# away for a day eat the memory that training needs.
_HARD_LIMIT_FACTOR = 4
_MIN_FLUSH_S = 0.01  # torch's writer takes flush_secs=0, too
_PATIENCE_S = 30.0


class Files(Protocol):
    """Where records go: local or remote files. Only the background thread uses them."""

    def write(self, records: deque[bytes], *, urgent: bool) -> None:
        """Takes away from the left what it has written; raises what stopped it."""

    def close(self) -> None: ...


class BackgroundWriter:
    """A bounded queue of records, and the thread that empties it.

    What cannot be written waits in the queue, and is tried again every ``flush_s``.

    Args:
        files: Where the records go.
        name: What log messages call this writer.
        flush_s: The longest time in seconds that a record waits before it is written.
        max_pending_bytes: A droppable record is dropped if there would be more waiting with it,
            any other if there would be four times as much. One that finds nothing waiting is taken,
            however large.

    Attributes:
        dropped_count: Droppable records that found the queue full.
        lost_count: Others that found it full, and all that could not be written in the end.
        failure: What stopped the latest write; None if it succeeded.
    """

    def __init__(self, files: Files, *, name: str, flush_s: float, max_pending_bytes: int) -> None:
        self.dropped_count = 0
        self.lost_count = 0
        self.failure: Exception | None = None
        self._files = files
        self._name = name
        self._flush_s = max(flush_s, _MIN_FLUSH_S)
        self._droppable_limit = max_pending_bytes
        self._hard_limit = max_pending_bytes * _HARD_LIMIT_FACTOR
        # Re-entrant: a signal handler may add a record while its thread is adding one.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0  # of _pending and of the records that are being written
        self._flush_wanted = True  # the first round begins the file
        self._closing = False
        self._rounds_begun = 0
        self._rounds_done = 0
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="telemetry-events", daemon=True)
        self._thread.start()

    def put(self, record: bytes, *, droppable: bool, flush: bool) -> None:
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

    def flush(self, timeout_s: float = _PATIENCE_S) -> bool:
        """Waits until everything added so far has been written, or has failed to be.

        Returns:
            Whether that was so within ``timeout_s``.
        """
        with self._changed:
            self._flush_wanted = True
            self._changed.notify_all()
            next_round = self._rounds_begun + 1
            return self._changed.wait_for(
                lambda: self._finished or self._rounds_done >= next_round, timeout_s
            )

    def close(self, timeout_s: float = _PATIENCE_S) -> None:
        """Writes what waits, within ``timeout_s``, ends the thread, and tells what was lost."""
        with self._changed:
            if self._finished:
                return
            self._closing = True
            self._changed.notify_all()
            # Not Thread.join(): a signal handler that closes the writer may have interrupted
            # this very thread in put(), and only a wait here gives its lock away.
            if not self._changed.wait_for(lambda: self._finished, timeout_s):
                self.lost_count += len(self._pending)
        self._tell_losses(timeout_s)

    def _is_due(self) -> bool:
        # After a failure only the clock or a wish to flush makes for another attempt.
        if self._pending_bytes >= _WAKE_BYTES and self.failure is None:
            return True
        return self._flush_wanted or self._closing

    def _count_drop(self, droppable: bool) -> None:
        if self.failure is None and not self.dropped_count + self.lost_count:
            _logger.warning(
                "%s: events come faster than they can be written; measurements are dropped",
                self._name,
            )
        if droppable:
            self.dropped_count += 1
        else:
            self.lost_count += 1

    def _tell_losses(self, timeout_s: float) -> None:
        losses = []
        if self.dropped_count:
            losses.append(f"{self.dropped_count} measurements were dropped, the queue was full")
        if self.lost_count:
            reason = self.failure or "the queue was full"
            losses.append(f"{self.lost_count} events could not be written ({reason})")
        if not self._finished:
            losses.append(f"the latest write has not ended within {timeout_s:.3g} s")
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
            taken_bytes = self._pending_bytes
            urgent = self._flush_wanted or self._closing
            self._flush_wanted = False
            last = self._closing
            self._rounds_begun += 1
        self._write(records, urgent)
        with self._changed:
            self._pending.extendleft(reversed(records))
            self._pending_bytes -= taken_bytes - _total_bytes(records)
            if last:
                self.lost_count += len(records)
            self._rounds_done += 1
            self._changed.notify_all()
        return last

    def _write(self, records: deque[bytes], urgent: bool) -> None:
        try:
            self._files.write(records, urgent=urgent)
        except Exception as error:  # nothing that goes wrong with a file may end this thread
            if self.failure is None:
                _logger.warning("%s: events cannot be written for now: %s", self._name, error)
            self.failure = error
        else:
            if self.failure is not None:
                _logger.info("%s: events are written again", self._name)
            self.failure = None


def _total_bytes(records: Iterable[bytes]) -> int:
    return sum(len(record) + _RECORD_OVERHEAD_BYTES for record in records)

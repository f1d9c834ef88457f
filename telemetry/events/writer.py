"""The one thread that waits for disks: it appends queued items to the files of a run."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from telemetry.threads import NoThreadError, start

log = logging.getLogger("telemetry")

_ITEM_OVERHEAD_BYTES = 64  # memory of a queued item besides its bytes
_WAKE_BYTES = 1 << 20
# Droppable items are dropped at the high-water mark, others at four times that: a disk that fails
# for a day must not take the memory that training needs.
_HARD_LIMIT_FACTOR = 4
PATIENCE_S = 30.0


class File(Protocol):
    """Destination of items; a writer uses it on its thread alone."""

    def append(self, items: deque[bytes]) -> None:
        """Write items in order, and remove each that is written; raise the first failure."""

    def flush(self) -> None:
        """Hand what was written to the operating system."""

    def close(self) -> None:
        """Release the file; a later item opens it again."""


class Writer:
    """Bounded queues of items for any number of files, and the thread that writes them.

    No caller waits for a disk. Items of one file keep their order. They are queued until
    :meth:`start`. After a failed write they stay queued, and it is tried again every ``flush_s``.
    In a forked child, all calls do nothing.

    Args:
        name: Name in log messages, such as the directory.
        flush_s: Longest time in seconds that an item stays queued.
        max_pending_bytes: High-water mark. Above it, droppable items are dropped; above four times
            as many bytes, all items. Empty queues accept an item of any size.

    Attributes:
        dropped_count: Number of dropped droppable items.
        failure: Exception of the latest round of writing; None if all writes succeeded.
    """

    dropped_count = 0
    failure: Exception | None = None

    def __init__(
        self, name: str, *, flush_s: float = 0.75, max_pending_bytes: int = 64 << 20
    ) -> None:
        self._process_id = os.getpid()
        self._name = name
        self._flush_s = flush_s
        self._droppable_limit = max_pending_bytes
        self._hard_limit = max_pending_bytes * _HARD_LIMIT_FACTOR
        # Re-entrant: a signal handler may add an item while its thread is adding one.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pending: deque[tuple[File, bytes]] = deque()
        self._taken_count = 0  # of items that the thread is writing
        self._pending_bytes = 0  # of both
        self._refused_count = 0
        self._files: set[File] = set()  # that the thread has used
        self._flush_wanted = False
        self._closing = self._closed = self._discards = False
        self._rounds_begun = self._rounds_done = 0
        self._round_began_s = time.monotonic()
        self._runs = False  # the thread
        self._is_failure_logged = False
        self._thread = threading.Thread(target=self._run, name="telemetry: writer", daemon=True)

    @property
    def is_here(self) -> bool:
        """Whether this process is not a forked child."""
        return os.getpid() == self._process_id

    @property
    def lost_count(self) -> int:
        """Number of other dropped items, and of queued ones: lost if the process ends."""
        return self._refused_count + len(self._pending) + self._taken_count

    def start(self, file: File) -> None:
        """Create a file on this thread, and start the other one; raise OSError or NoThreadError.

        After an OSError, the other thread tries again until :meth:`close`.
        """
        if not self.is_here:
            return
        self._runs = True
        try:
            file.append(deque())
            self._files.add(file)
        finally:
            try:
                start(self._thread)
            except NoThreadError:
                self._runs = False
                file.close()
                raise

    def discard(self) -> None:
        """Drop the queued items and all later ones: another process writes them."""
        with self._lock:
            self._discards = True
            self._pending_bytes -= _size(self._pending)
            self._pending.clear()

    def put(self, file: File, item: bytes, *, droppable: bool = False, flush: bool = False) -> None:
        """Queue an item, or drop it if the queues are full; raise OSError on a closed writer.

        ``flush`` writes at once; this call does not wait for it.
        """
        if not self.is_here:
            return
        with self._lock:
            if self._closing:
                raise OSError(f"{self._name}: the writer is closed")
            if self._discards:
                return
            limit = self._droppable_limit if droppable else self._hard_limit
            size = len(item) + _ITEM_OVERHEAD_BYTES
            if self._pending_bytes and self._pending_bytes + size > limit:
                self._count_drop(droppable)
            else:
                self._pending.append((file, item))
                self._pending_bytes += size
            self._flush_wanted |= flush
            # Otherwise nothing has become due.
            if (flush or self._pending_bytes >= _WAKE_BYTES) and self._is_due():
                self._changed.notify_all()

    def flush(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until all queued items are written or have failed; return False on a timeout."""
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

    def _is_due(self) -> bool:
        # After a failure, only the clock or flush() starts another attempt.
        if self._pending_bytes >= _WAKE_BYTES and self.failure is None:
            return True
        return self._flush_wanted or self._closing

    def _count_drop(self, droppable: bool) -> None:
        if self.failure is None and not self.dropped_count + self._refused_count:
            log.warning(
                "telemetry: %s: events arrive faster than they can be written; measurements are "
                "dropped",
                self._name,
            )
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
            losses.append(f"{self.lost_count} events could not be written ({reason})")
        elif hang:
            losses.append(hang)
        if losses:
            log.warning("telemetry: %s: %s", self._name, "; ".join(losses))

    def _run(self) -> None:
        try:
            while not self._write_round():
                pass
            for file in self._files:
                file.close()
        finally:
            with self._changed:
                self._runs = False
                self._changed.notify_all()

    def _write_round(self) -> bool:
        """Wait until a write is due, and write all items; return whether it was the last round."""
        with self._changed:
            self._changed.wait_for(self._is_due, self._flush_s)
            taken, self._pending = self._pending, deque()
            self._taken_count = len(taken)
            last = self._closing
            flush = self._flush_wanted or last
            self._flush_wanted = False
            self._rounds_begun += 1
            self._round_began_s = time.monotonic()
        items_of: defaultdict[File, deque[bytes]] = defaultdict(deque)
        for file, item in taken:
            items_of[file].append(item)
        self._files |= items_of.keys()
        failure = self._write(items_of, flush=flush)
        left = deque((file, item) for file, items in items_of.items() for item in items)
        with self._changed:
            self.failure = failure
            self._pending_bytes -= _size(taken) - _size(left)
            left.extend(self._pending)
            self._pending, self._taken_count = left, 0
            self._rounds_done += 1
            self._changed.notify_all()
        return last

    def _write(self, items_of: Mapping[File, deque[bytes]], *, flush: bool) -> Exception | None:
        """Append to each file; return and log the first failure."""
        failure: Exception | None = None
        for file in self._files if flush else items_of:
            try:
                if items := items_of.get(file):
                    file.append(items)
                if flush:
                    file.flush()
            except Exception as error:  # no failure of a file may end this thread
                failure = failure or error
        if failure is not None and not self._is_failure_logged:
            log.warning("telemetry: %s: cannot be written for now: %s", self._name, failure)
        elif failure is None and self._is_failure_logged:
            log.info("telemetry: %s: is written again", self._name)
        self._is_failure_logged = failure is not None
        return failure


def _size(items: Iterable[tuple[File, bytes]]) -> int:
    return sum(len(item) + _ITEM_OVERHEAD_BYTES for _, item in items)

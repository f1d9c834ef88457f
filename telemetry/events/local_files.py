"""Writes serialized events to event files in a local directory, one file after another."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import re
import socket
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata

from telemetry.events.framing import frame
from telemetry.events.room import NO_ROOM, curves_apart, has_room, tags_of

_logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_HEADER_BYTES = 256  # more than the first events of a file, plus a frame
_NAME = re.compile(r"tfevents\.(\d{10})\.")  # as in events.out.tfevents.1700000000.host.123.0
_file_numbers = itertools.count()

# Where a session starts, readers drop its step and later ones from earlier files. A file that
# continues a run must drop nothing, so its session starts after the last possible step.
_NO_STEP = 2**63 - 1


def list_event_files(log_dir: str | os.PathLike[str]) -> list[Path]:
    """The event files of one run by name, which is the order in which TensorBoard reads them."""
    return sorted(path for path in Path(log_dir).iterdir() if "tfevents" in path.name)


class LocalFiles:
    """The event files that one writer creates in a directory.

    It always begins a new file and never appends to an old one, because readers stop at a torn
    event. After a failed write, or when the file has been removed, it begins another.

    If the disk has no room for a large event, smaller ones are still written, unless they share a
    tag with it: readers expect the steps of a tag in order.

    Args:
        directory: Created if it is missing.
        filename_suffix: Appended to every file's name.
        repeated: Events that readers need in every file after the first.
        max_file_bytes: When a file is larger than this, another follows.
        names_elsewhere: Names of further files that new ones must sort behind.
    """

    def __init__(
        self,
        directory: str,
        filename_suffix: str = "",
        *,
        repeated: Iterable[bytes] = (),
        max_file_bytes: float = math.inf,
        names_elsewhere: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._directory = directory
        self._filename_suffix = filename_suffix
        self._repeated = repeated
        self._max_file_bytes = max_file_bytes
        self._names_elsewhere = names_elsewhere
        self._file: FileIO | None = None
        self._size = 0  # bytes of the current file's complete events
        self._least_size = 0  # a smaller file is removed; the first may hold its header alone
        self._full_size = max_file_bytes
        self._stamp = 0  # in the latest file's name
        self._is_begun = False
        self._to_repeat: deque[bytes] = deque()
        self._limit = math.inf  # bytes; the disk has no room for events of this size
        self._errno = errno.ENOSPC  # the reason

    def write(self, events: deque[bytes], *, urgent: bool = False) -> None:
        """Writes events in order, and removes each when the operating system has it.

        The first call creates a file even without events.

        Raises:
            OSError: The remaining events could not be written.
        """
        if self._is_begun and not events and not self._to_repeat:
            return
        try:
            if self._file is not None and self._is_finished(self._file):
                self._leave()
            if not self._is_begun:
                self._open(0)
            if self._limit < math.inf and has_room(self._directory, int(self._limit)):
                self._limit = math.inf
            while not self._write_below_limit(events):
                pass
        except OSError:
            self._leave()
            raise
        if events or self._to_repeat:
            raise self._no_room()

    def close(self) -> None:
        self._leave()

    @property
    def path(self) -> str | None:
        """The current file."""
        return None if self._file is None else str(self._file.name)

    def _write_below_limit(self, events: deque[bytes]) -> bool:
        """Writes events below the limit; False if one of them found no room and lowered it."""
        try:
            if self._limit < math.inf:
                self._write_around_large(events)
            else:
                for queue in (self._to_repeat, events):
                    while queue:
                        self._append(queue)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._leave()
            return False
        return True

    def _write_around_large(self, events: deque[bytes]) -> None:
        """Writes events below the limit one by one, and from larger ones the points of curves."""
        parts: list[bytes] = []
        for event in events:
            if len(event) < self._limit:
                parts.append(event)
            else:
                of_one = curves_apart(event)
                self._limit = min(self._limit, max(map(len, of_one)))
                parts += of_one
        events.clear()
        events.extend(parts)
        tags_that_wait: set[str] = set()
        for queue in (self._to_repeat, events):
            waiting = 0
            try:
                for _ in range(len(queue)):
                    tags = tags_of(queue[0])
                    if len(queue[0]) < self._limit and tags_that_wait.isdisjoint(tags):
                        self._append(deque([queue[0]]))
                        queue.popleft()
                    else:
                        tags_that_wait |= tags
                        queue.rotate(-1)
                        waiting += 1
            finally:
                queue.rotate(waiting)  # the events passed over come first again

    def _no_room(self) -> OSError:
        return OSError(self._errno, os.strerror(self._errno), self._directory)

    def _open(self, first_bytes: int) -> None:
        os.makedirs(self._directory, exist_ok=True)
        # Otherwise each attempt would leave an empty file, and removing it is risky: TensorBoard's
        # slow loader waits forever at a file that it has seen and that is gone.
        if self._is_begun and not has_room(self._directory, _HEADER_BYTES + first_bytes):
            raise self._no_room()
        self._file = self._create()
        self._size, self._least_size = 0, 1
        self._full_size = self._max_file_bytes + sum(map(len, self._to_repeat))
        self._append_some(self._file, deque([_version(), _session_start()]))
        self._least_size = self._size + self._is_begun
        self._is_begun = True

    def _create(self) -> FileIO:
        while True:
            try:
                return FileIO(os.path.join(self._directory, self._new_name()), "xb")
            except FileExistsError:
                continue  # another container with our host name and process id was faster

    def _new_name(self) -> str:
        # Readers go by the order of names, and the clock may have gone back since the last file.
        names = [*os.listdir(self._directory), *self._names_elsewhere()]
        stamp = max(int(time.time()), _newest_stamp(names) + 1, self._stamp + 1)
        self._stamp = stamp
        writer = f"{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        return f"events.out.tfevents.{stamp:010d}.{writer}{self._filename_suffix}"

    def _is_finished(self, file: FileIO) -> bool:
        if self._size >= self._full_size:
            return True
        if os.fstat(file.fileno()).st_nlink == 0:
            _logger.warning("%s was removed; going on in a new event file", file.name)
            return True
        return False

    def _append(self, events: deque[bytes]) -> None:
        """Writes some of the events; lowers the limit if the next one finds no room."""
        try:
            if self._file is None:
                self._open(len(events[0]))
            assert self._file is not None
            self._append_some(self._file, events)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._limit, self._errno = len(events[0]), error.errno
            raise

    def _append_some(self, file: FileIO, events: deque[bytes]) -> None:
        """Writes events with one call, which releases the interpreter lock."""
        frames = _first_frames(events)
        ends = list(itertools.accumulate(map(len, frames)))
        data = memoryview(b"".join(frames))
        written = 0
        try:
            while written < len(data):
                written += file.write(data[written:])
        finally:
            whole = bisect_right(ends, written)
            self._size += ends[whole - 1] if whole else 0
            for _ in range(whole):
                events.popleft()

    def _leave(self) -> None:
        if self._file is None:
            return
        self._to_repeat = deque(self._repeated)
        with suppress(OSError):  # readers tolerate a torn event; without it the file is clean
            self._file.truncate(self._size)
        try:
            self._file.close()
        except OSError as error:  # a network file system may report late that it had no room
            _logger.warning("%s may lack its end: %s", self._file.name, error)
        if self._size < self._least_size:
            with suppress(OSError):
                os.unlink(self._file.name)
        self._file = None


def _newest_stamp(names: Iterable[str]) -> int:
    return max((int(found[1]) for name in names if (found := _NAME.search(name))), default=0)


def _first_frames(events: deque[bytes]) -> list[bytes]:
    frames: list[bytes] = []
    size = 0
    for event in events:
        frames.append(frame(event))
        size += len(event)
        if size >= _CHUNK_BYTES:
            break
    return frames


def _version() -> bytes:
    source = SourceMetadata(writer="telemetry.events")
    event = Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
    return bytes(event.SerializeToString())


def _session_start() -> bytes:
    # The slow loader ignores the first session start that it reads. So that purge_step always
    # works, every file begins with a start that has no effect.
    start = SessionLog(status=SessionLog.START)
    event = Event(wall_time=time.time(), step=_NO_STEP, session_log=start)
    return bytes(event.SerializeToString())

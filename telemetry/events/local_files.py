"""Writes records to event files in a local directory, one file after another."""

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
_HEADER_BYTES = 256  # more than a file begins with, and a record's frame
_NAME = re.compile(r"tfevents\.(\d{10})\.")  # as in events.out.tfevents.1700000000.host.123.0
_file_numbers = itertools.count()

# Readers drop what earlier files say of this and later steps when a session starts. A file that
# continues a run drops nothing, so its session starts after the last step there is.
_NO_STEP = 2**63 - 1


def list_event_files(log_dir: str | os.PathLike[str]) -> list[Path]:
    """The event files of one run, in the order in which TensorBoard reads them: by name."""
    return sorted(path for path in Path(log_dir).iterdir() if "tfevents" in path.name)


class LocalFiles:
    """The event files that one writer makes in a directory.

    Always a new file, never an append to an old one: a reader that has met a torn record sees
    nothing behind it. After a failed write, or when the file has been removed, the next write
    goes to another new file.

    While a large record finds no room, smaller ones go on without it, unless they have a tag in
    common: of each tag, readers want the steps in order.

    Args:
        directory: Made if it is missing.
        filename_suffix: Appended to every file's name.
        repeated: What readers need again in every file after the first.
        max_file_bytes: A file that has grown larger is followed by another.
        names_elsewhere: Names of further files that the new ones must sort behind.
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
        self._size = 0  # of the current file's whole records, bytes
        self._least_size = 0  # with less it says nothing; the first may hold its header alone
        self._full_size = max_file_bytes
        self._stamp = 0  # of the latest file's name
        self._is_begun = False
        self._to_repeat: deque[bytes] = deque()
        self._limit = math.inf  # bytes; records from here on find no room
        self._errno = errno.ENOSPC  # why

    def write(self, records: deque[bytes], *, urgent: bool = False) -> None:
        """Writes records in order, and removes each once the system has it.

        The first call makes a file even if there are no records.

        Raises:
            OSError: Those that remain could not be written.
        """
        if self._is_begun and not records and not self._to_repeat:
            return
        try:
            if self._file is not None and self._is_finished(self._file):
                self._leave()
            if not self._is_begun:
                self._open(0)
            if self._limit < math.inf and has_room(self._directory, int(self._limit)):
                self._limit = math.inf
            while not self._write_below_limit(records):
                pass
        except OSError:
            self._leave()
            raise
        if records or self._to_repeat:
            raise self._no_room()

    def close(self) -> None:
        self._leave()

    @property
    def path(self) -> str | None:
        """The file that is written at present."""
        return None if self._file is None else str(self._file.name)

    def _write_below_limit(self, records: deque[bytes]) -> bool:
        """Writes what is below the limit; false if some of that finds no room: the limit fell."""
        try:
            if self._limit < math.inf:
                self._write_around_large(records)
            else:
                for queue in (self._to_repeat, records):
                    while queue:
                        self._append(queue)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._leave()
            return False
        return True

    def _write_around_large(self, records: deque[bytes]) -> None:
        """Writes what is below the limit one by one, and of large events the points of curves."""
        parts: list[bytes] = []
        for record in records:
            if len(record) < self._limit:
                parts.append(record)
            else:
                of_one = curves_apart(record)
                self._limit = min(self._limit, max(map(len, of_one)))
                parts += of_one
        records.clear()
        records.extend(parts)
        tags_that_wait: set[str] = set()
        for queue in (self._to_repeat, records):
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
                queue.rotate(waiting)  # they came before those that are left

    def _no_room(self) -> OSError:
        return OSError(self._errno, os.strerror(self._errno), self._directory)

    def _open(self, first_bytes: int) -> None:
        os.makedirs(self._directory, exist_ok=True)
        # Else each attempt would leave a file with nothing in it. And removing a file is a risk:
        # TensorBoard's slow loader waits for ever at one that it has seen and that is gone.
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
                continue  # another container with our host name and process id was quicker

    def _new_name(self) -> str:
        # Readers go by the names' order. The clock may have gone back since the last file.
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

    def _append(self, records: deque[bytes]) -> None:
        """Writes some of the records; lowers the limit if the first of the others finds no room."""
        try:
            if self._file is None:
                self._open(len(records[0]))
            assert self._file is not None
            self._append_some(self._file, records)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._limit, self._errno = len(records[0]), error.errno
            raise

    def _append_some(self, file: FileIO, records: deque[bytes]) -> None:
        """Writes records with one call, which lets go of the interpreter lock."""
        frames = _first_frames(records)
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
                records.popleft()

    def _leave(self) -> None:
        if self._file is None:
            return
        self._to_repeat = deque(self._repeated)
        with suppress(OSError):  # readers bear a torn record; without it the file is clean
            self._file.truncate(self._size)
        try:
            self._file.close()
        except OSError as error:  # a network file system may tell late that it had no room
            _logger.warning("%s may lack its end: %s", self._file.name, error)
        if self._size < self._least_size:
            with suppress(OSError):
                os.unlink(self._file.name)
        self._file = None


def _newest_stamp(names: Iterable[str]) -> int:
    return max((int(found[1]) for name in names if (found := _NAME.search(name))), default=0)


def _first_frames(records: deque[bytes]) -> list[bytes]:
    frames: list[bytes] = []
    size = 0
    for record in records:
        frames.append(frame(record))
        size += len(record)
        if size >= _CHUNK_BYTES:
            break
    return frames


def _version() -> bytes:
    source = SourceMetadata(writer="telemetry.events")
    event = Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
    return bytes(event.SerializeToString())


def _session_start() -> bytes:
    # The slow loader ignores the first start that it meets. So that purge_step always has an
    # effect, every file begins with a start that has none.
    start = SessionLog(status=SessionLog.START)
    event = Event(wall_time=time.time(), step=_NO_STEP, session_log=start)
    return bytes(event.SerializeToString())

"""Writes records to event files in a local directory, one file after another."""

from __future__ import annotations

import itertools
import logging
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

_logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
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

    Args:
        directory: Made if it is missing.
        filename_suffix: Appended to every file's name.
        max_file_bytes: A file that has grown larger is followed by another.
        names_elsewhere: Names of further files that the new ones must sort behind.
    """

    def __init__(
        self,
        directory: str,
        filename_suffix: str = "",
        *,
        max_file_bytes: float = float("inf"),
        names_elsewhere: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._directory = directory
        self._filename_suffix = filename_suffix
        self._max_file_bytes = max_file_bytes
        self._names_elsewhere = names_elsewhere
        self._file: FileIO | None = None
        self._size = 0  # of the current file's whole records, bytes
        self._is_begun = False

    def write(self, records: deque[bytes], *, urgent: bool = False) -> None:
        """Writes records in order, and removes each from the left once the system has it.

        The first call makes a file even if there are no records.

        Raises:
            OSError: The first of the records that remain could not be written.
        """
        if not records and self._is_begun:
            return
        try:
            if self._file is not None and self._is_finished(self._file):
                self._leave()
            if self._file is None:
                self._open()
            while records:
                self._append(records)
        except OSError:
            self._leave()
            raise

    def close(self) -> None:
        self._leave()

    @property
    def path(self) -> str | None:
        """The file that is written at present."""
        return None if self._file is None else str(self._file.name)

    def _open(self) -> None:
        os.makedirs(self._directory, exist_ok=True)
        self._file = self._create()
        self._size = 0
        try:
            self._append(deque([_version(), _session_start()]))
        except OSError:
            with suppress(OSError):  # or every attempt on a full disk would leave a file
                os.unlink(self._file.name)
            raise
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
        stamp = max(int(time.time()), _newest_stamp(names) + 1)
        writer = f"{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        return f"events.out.tfevents.{stamp:010d}.{writer}{self._filename_suffix}"

    def _is_finished(self, file: FileIO) -> bool:
        if self._size >= self._max_file_bytes:
            return True
        if os.fstat(file.fileno()).st_nlink == 0:
            _logger.warning("%s was removed; going on in a new event file", file.name)
            return True
        return False

    def _append(self, records: deque[bytes]) -> None:
        """Writes some of the records with one call, which lets go of the interpreter lock."""
        assert self._file is not None
        frames = _first_frames(records)
        ends = list(itertools.accumulate(map(len, frames)))
        data = memoryview(b"".join(frames))
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        finally:
            whole = bisect_right(ends, written)
            self._size += ends[whole - 1] if whole else 0
            for _ in range(whole):
                records.popleft()

    def _leave(self) -> None:
        if self._file is None:
            return
        with suppress(OSError):  # readers bear a torn record; without it the file is clean
            self._file.truncate(self._size)
        try:
            self._file.close()
        except OSError as error:  # a network file system may tell late that it had no room
            _logger.warning("%s may lack its end: %s", self._file.name, error)
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

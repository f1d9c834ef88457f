"""Event files of one writer in a local directory, one after another."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import re
import shutil
import socket
import tempfile
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
_HEADER_BYTES = 256  # more than the first events of a file, plus a frame
_NAME = re.compile(r"tfevents\.(\d{10})\.")  # as in events.out.tfevents.1700000000.host.123.0
_file_numbers = itertools.count()

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# Where a session starts, readers drop its step and later ones from earlier files. A file that
# continues a run must drop nothing, so its session starts after the last possible step.
_NO_STEP = 2**63 - 1


def list_event_files(log_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the event files of one run by name, in the order in which TensorBoard reads them."""
    return sorted(path for path in Path(log_dir).iterdir() if "tfevents" in path.name)


class LocalFiles:
    """Event files that one writer creates in a directory.

    Each writer begins a new file, because readers stop at a torn event. It begins another after a
    failed write, after ``max_file_bytes``, or when the file was removed. New files sort behind
    ``names_elsewhere``. Each later file begins with the events ``repeated``.
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

    def write(self, events: deque[bytes], *, urgent: bool = False) -> None:
        """Write events in order, and remove each that the operating system has accepted.

        The first call creates a file even without events. If the rest cannot be written, it raises
        OSError.
        """
        if self._is_begun and not events and not self._to_repeat:
            return
        while True:
            count, is_new = len(events), self._file is None
            try:
                self._write(events)
                return
            except OSError as error:
                self.close()
                # Where files have a size limit, the next one takes the rest.
                if error.errno != errno.EFBIG or (is_new and len(events) == count):
                    raise

    def _write(self, events: deque[bytes]) -> None:
        if self._file is not None and self._is_finished(self._file):
            self.close()
        if not self._is_begun:
            self._open(0)
        for queue in (self._to_repeat, events):
            while queue:
                self._append(self._file or self._open(len(queue[0])), queue)

    @property
    def path(self) -> str | None:
        return None if self._file is None else str(self._file.name)

    def _open(self, first_bytes: int) -> FileIO:
        os.makedirs(self._directory, exist_ok=True)
        # Otherwise each attempt would leave an empty file, and removing it is risky: TensorBoard's
        # slow loader blocks forever on a file that it has seen and that was removed.
        if self._is_begun and not _has_room(self._directory, _HEADER_BYTES + first_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._directory)
        self._file = file = self._create()
        self._size, self._least_size = 0, 1
        self._full_size = self._max_file_bytes + sum(map(len, self._to_repeat))
        self._append(file, deque([_version(), _session_start()]))
        self._least_size = self._size + self._is_begun
        self._is_begun = True
        return file

    def _create(self) -> FileIO:
        while True:
            try:
                return FileIO(os.path.join(self._directory, self._new_name()), "xb")
            except FileExistsError:
                continue  # another container with our host name and process id was faster

    def _new_name(self) -> str:
        # Readers use the order of names, and the clock may have been set back since then.
        names = [*os.listdir(self._directory), *self._names_elsewhere()]
        stamps = [int(found[1]) for name in names if (found := _NAME.search(name))]
        self._stamp = max(int(time.time()), max(stamps, default=0) + 1, self._stamp + 1)
        writer = f"{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        return f"events.out.tfevents.{self._stamp:010d}.{writer}{self._filename_suffix}"

    def _is_finished(self, file: FileIO) -> bool:
        if self._size >= self._full_size:
            return True
        if os.fstat(file.fileno()).st_nlink == 0:
            _logger.warning("%s was removed; continuing in a new event file", file.name)
            return True
        return False

    def _append(self, file: FileIO, events: deque[bytes]) -> None:
        """Write some of the events with one call, which releases the interpreter lock."""
        frames: list[bytes] = []
        ends = [0]
        for event in events:
            frames.append(frame(event))
            ends.append(ends[-1] + len(frames[-1]))
            if ends[-1] >= _CHUNK_BYTES:
                break
        data = memoryview(b"".join(frames))
        written = 0
        try:
            while written < len(data):
                written += file.write(data[written:])
        finally:
            whole = bisect_right(ends, written) - 1
            self._size += ends[whole]
            for _ in range(whole):
                events.popleft()

    def close(self) -> None:
        """Close the current file; a later event begins another."""
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


def _has_room(directory: str, size: int) -> bool:
    """Whether ``size`` bytes fit on the directory's disk: by its free space, then by a trial.

    The trial finds quotas, which file systems do not report.
    """
    try:
        disk = shutil.disk_usage(directory)
        if disk.total and disk.free < size:  # some network drives report 0 for both
            return False
        with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
            return probe.write(bytes(size)) == size
    except OSError as error:
        return error.errno not in _NO_ROOM  # the real write will report anything else


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

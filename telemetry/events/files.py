"""Files of one logger in a local directory: event files, and the run log."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from typing import Any

from tensorboard.compat import tf
from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata

from telemetry.events.framing import frame
from telemetry.events.run_log import SUFFIX

log = logging.getLogger("telemetry")

_CHUNK_BYTES = 4 << 20
_MAX_REPEATED_BYTES = 4 << 20
# As in events.out.tfevents.1700000000.host.123.0 and telemetry.1700000000.host.123.0.runlog.
_STAMP = re.compile(r"(?:tfevents|^telemetry)\.(\d{10})\.")
_file_numbers = itertools.count()

# After these errors the same file continues when there is room again.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}

_NO_STEP = 2**63 - 1  # the last possible one: a session that starts here hides nothing


class AppendedFile:
    """File in a local directory to which frames are appended, and its successors.

    Bytes that are written never change: data that a full disk has cut is continued where it was
    cut, and readers wait there for the rest. After any other failure, or when the file was removed,
    a new file begins. Its name sorts behind all others, because readers use that order.

    Args:
        name: Name of a file, with the places ``stamp`` and ``writer``.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.continues = False  # whether the next file follows another, and repeats its data
        self._directory = os.path.abspath(directory)  # the program may change its own
        self._name = name
        self._file: FileIO | None = None
        self._cut = 0  # bytes of the next data that are written
        self._is_empty = True  # without an item
        self._head: deque[bytes] = deque()  # data to write before any item
        self._repeated: dict[str, bytes] = {}
        self._stamp = 0  # in the latest file's name

    def _first(self) -> Iterable[bytes]:
        """Return the data with which each file begins."""
        return ()

    def repeat(self, key: str, data: bytes) -> None:
        """Begin each later file with this data: the latest of each key, at most 4 MiB of them."""
        known = {name: older for name, older in self._repeated.items() if name != key}
        while known and sum(map(len, known.values())) + len(data) > _MAX_REPEATED_BYTES:
            del known[next(iter(known))]
        self._repeated = {**known, key: data}  # replaced: the writer's thread may read it

    def append(self, items: deque[bytes]) -> None:
        """Write the data of frames, and remove what the operating system has accepted.

        Without any, it creates the file.
        """
        try:
            self._append(items)
        except OSError as error:
            was_empty = self._is_empty
            if error.errno not in _NO_ROOM:
                self.close()
            if error.errno != errno.EFBIG or was_empty:
                raise
            self.append(items)  # files have a size limit: the next one takes the rest

    def _append(self, items: deque[bytes]) -> None:
        file = self._file
        if file is not None and os.fstat(file.fileno()).st_nlink == 0:
            log.warning("telemetry: %s was removed; continuing in a new file", file.name)
            self.close()
        if self._file is None:
            self._file = self._create()
        while self._head:
            self._write_some(self._file, self._head)
        while items:
            self._write_some(self._file, items)
            self._is_empty = False

    def _write_some(self, file: FileIO, items: deque[bytes]) -> None:
        """Write frames with one call, which releases the interpreter lock; remove whole ones."""
        size, frames = 0, []
        for data in items:
            frames.append(frame(data))
            size += len(frames[-1])
            if size >= _CHUNK_BYTES:
                break
        self._cut += file.write(memoryview(b"".join(frames))[self._cut :])
        for one in frames:
            if self._cut < len(one):
                break
            self._cut -= len(one)
            items.popleft()

    def _create(self) -> FileIO:
        os.makedirs(self._directory, exist_ok=True)
        names = os.listdir(self._directory)
        stamps = [int(found[1]) for name in names if (found := _STAMP.search(name))]
        # The clock may have been set back since then.
        self._stamp = max(int(time.time()), max(stamps, default=0) + 1, self._stamp + 1)
        while True:
            name = self._name.format(stamp=f"{self._stamp:010d}", writer=_writer())
            with suppress(FileExistsError):  # of a container with our host name and process id
                file = FileIO(os.path.join(self._directory, name), "xb")
                break
        self._cut, self._is_empty = 0, True
        self._head = deque(self._first())
        if self.continues:
            self._head += self._repeated.values()
        self.continues = True
        return file

    def flush(self) -> None: ...

    def close(self) -> None:
        """Close the current file, and remove it if it holds no item; the next begins another."""
        if (file := self._file) is None:
            return
        self._file = None
        try:
            file.close()
        except OSError as error:  # a network file system may report late that it had no room
            log.warning("telemetry: %s may lack its end: %s", file.name, error)
        if self._is_empty:
            with suppress(OSError):
                os.unlink(file.name)


class EventFile(AppendedFile):
    """Event file: from the step ``hidden_from`` on, readers drop what earlier files hold."""

    def __init__(self, directory: str, *, hidden_from: int | None = None) -> None:
        # Torch's writer overwrites a file that has the name it would give.
        super().__init__(directory, "events.out.tfevents.{stamp}.{writer}.telemetry")
        self._hidden_from = hidden_from

    def _first(self) -> Iterable[bytes]:
        yield _version()
        yield session_start(_NO_STEP)
        if self._hidden_from is not None and not self.continues:
            yield session_start(self._hidden_from)


def run_log_file(directory: str) -> AppendedFile | RemoteFile:
    """Return the run log of a logger, which is created with the first frame.

    TensorBoard reads no file without ``tfevents`` in its name.
    """
    name = "telemetry.{stamp}.{writer}" + SUFFIX
    return RemoteFile(directory, name) if "://" in directory else AppendedFile(directory, name)


class RemoteFile:
    """File in a remote directory, by the file systems of TensorBoard, as ``SummaryWriter`` uses.

    Most of them write a file as a whole whenever it is flushed.
    """

    def __init__(self, directory: str, name: str) -> None:
        stamp = f"{int(time.time()):010d}"
        self._path = f"{directory.rstrip('/')}/{name.format(stamp=stamp, writer=_writer())}"
        self._file: Any = None

    def repeat(self, key: str, data: bytes) -> None:
        """Do nothing: there is no further file."""

    def append(self, items: deque[bytes]) -> None:
        if self._file is None:
            self._file = tf.io.gfile.GFile(self._path, "wb")
        while items:
            self._file.write(frame(items[0]))
            items.popleft()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _writer() -> str:
    return f"{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"


def _version() -> bytes:
    source = SourceMetadata(writer="telemetry.events")
    event = Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
    return bytes(event.SerializeToString())


def session_start(step: int) -> bytes:
    """Return the event that makes readers drop this step and later ones of earlier files.

    The slow loader ignores the first of a directory. So that a resumed run always hides what it
    repeats, every file begins with one that has no effect.
    """
    start = SessionLog(status=SessionLog.START)
    return bytes(Event(wall_time=time.time(), step=step, session_log=start).SerializeToString())

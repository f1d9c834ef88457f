"""Event files of one writer in a local directory."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import socket
import time
from collections import deque
from contextlib import suppress
from io import FileIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata

from telemetry.events.framing import frame

log = logging.getLogger("telemetry")

_CHUNK_BYTES = 4 << 20
_MAX_REPEATED_BYTES = 4 << 20
_NAME = re.compile(r"tfevents\.(\d{10})\.")  # as in events.out.tfevents.1700000000.host.123.0
_file_numbers = itertools.count()

# After these errors the same file continues when there is room again.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}

_NO_STEP = 2**63 - 1  # the last possible one: a session that starts here hides nothing


class EventFile:
    """Event file in a local directory, and its successors.

    Bytes that are written never change: an event that a full disk has cut is continued where it
    was cut, and readers wait there for the rest. After any other failure, or when the file was
    removed, a new file begins. Its name sorts behind all others, because readers use that order.
    From the step ``hidden_from`` on, readers drop what earlier files hold.
    """

    def __init__(self, directory: str, *, hidden_from: int | None = None) -> None:
        self.continues = False  # whether the next file follows another, and repeats its events
        self._directory = directory
        self._hidden_from = hidden_from
        self._file: FileIO | None = None
        self._cut = 0  # bytes of the next event that are written
        self._is_empty = True  # without a whole event of an item
        self._head: deque[bytes] = deque()  # events to write before any item
        self._repeated: dict[str, bytes] = {}
        self._stamp = 0  # in the latest file's name

    def repeat(self, tag: str, event: bytes) -> None:
        """Begin each later file with this event: the latest of each tag, at most 4 MiB of them."""
        known = {name: older for name, older in self._repeated.items() if name != tag}
        while known and sum(map(len, known.values())) + len(event) > _MAX_REPEATED_BYTES:
            del known[next(iter(known))]
        self._repeated = {**known, tag: event}  # replaced: the writer's thread may read it

    def append(self, items: deque[bytes]) -> None:
        """Write events, and remove each that the operating system has accepted.

        Without events, it creates the file.
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
            log.warning("telemetry: %s was removed; continuing in a new event file", file.name)
            self.close()
        if self._file is None:
            self._file = self._create()
        while self._head:
            self._write_some(self._file, self._head)
        while items:
            self._write_some(self._file, items)
            self._is_empty = False

    def _write_some(self, file: FileIO, events: deque[bytes]) -> None:
        """Write events with one call, which releases the interpreter lock; remove whole ones."""
        size, frames = 0, []
        for event in events:
            frames.append(frame(event))
            size += len(frames[-1])
            if size >= _CHUNK_BYTES:
                break
        self._cut += file.write(memoryview(b"".join(frames))[self._cut :])
        for one in frames:
            if self._cut < len(one):
                break
            self._cut -= len(one)
            events.popleft()

    def _create(self) -> FileIO:
        os.makedirs(self._directory, exist_ok=True)
        stamps = [int(found[1]) for n in os.listdir(self._directory) if (found := _NAME.search(n))]
        # The clock may have been set back since then.
        self._stamp = max(int(time.time()), max(stamps, default=0) + 1, self._stamp + 1)
        while True:
            writer = f"{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
            # Torch's writer overwrites a file that has the name it would give.
            name = f"events.out.tfevents.{self._stamp:010d}.{writer}.telemetry"
            with suppress(FileExistsError):  # of a container with our host name and process id
                file = FileIO(os.path.join(self._directory, name), "xb")
                break
        self._cut, self._is_empty = 0, True
        self._head = deque((_version(), session_start(_NO_STEP)))
        if self.continues:
            self._head += self._repeated.values()
        elif self._hidden_from is not None:
            self._head.append(session_start(self._hidden_from))
        self.continues = True
        return file

    def flush(self) -> None: ...

    def close(self) -> None:
        """Close the current file, and remove it if it holds no event; an item begins another."""
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

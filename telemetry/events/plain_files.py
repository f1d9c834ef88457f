"""Small files next to the event files: appended lines and replaced files."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from telemetry.events.background import BackgroundWriter

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def append_line(path: Path, line: bytes) -> None:
    """Append a line in one call, so that lines of several writers do not mix.

    An unfinished last line of another writer is ended first. If it raises OSError, no part of the
    line is in the file.
    """
    with path.open("ab+", buffering=0) as file:
        line += b"\n"
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)  # another's line may be half in the file
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        written = file.write(line)
        if written < len(line):
            if file.tell() == os.fstat(file.fileno()).st_size:  # no other writer has appended since
                file.truncate(file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file; an existing one is replaced atomically, and unchanged after an OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@dataclass(frozen=True)
class _Change:
    path: Path
    content: bytes
    is_line: bool

    def __len__(self) -> int:
        return len(self.content)

    def make(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        (append_line if self.is_line else write_whole)(self.path, self.content)


class _Changes:
    """Applies changes in order; after a failure, later changes of that file stay queued."""

    def write(self, changes: deque[_Change], *, urgent: bool = False) -> None:
        failures: dict[Path, OSError] = {}
        for _ in range(len(changes)):
            change = changes[0]
            if change.path not in failures:
                try:
                    change.make()
                except OSError as error:
                    failures[change.path] = error
                else:
                    changes.popleft()
                    continue
            changes.rotate(-1)
        for failure in failures.values():
            raise failure

    def close(self) -> None: ...


class PlainFiles(BackgroundWriter[_Change]):
    """Calls these functions on a background thread; missing directories are created.

    The caller never blocks on the disk. Failed changes are retried every second until
    :meth:`close`, after which calls raise OSError.
    """

    def __init__(self, name: str) -> None:
        super().__init__(_Changes(), name=name, what="alerts and flight files")

    def append_line(self, path: Path, line: bytes) -> None:
        self.put(_Change(path, line, is_line=True), droppable=False, flush=True)

    def write_whole(self, path: Path, content: bytes) -> None:
        self.put(_Change(path, content, is_line=False), droppable=False, flush=True)

"""Small files next to the event files: of appended lines, and replaced as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class _PlainFile:
    path: Path

    def flush(self) -> None: ...

    def close(self) -> None: ...


class LineFile(_PlainFile):
    """File of lines, to which several processes append."""

    def append(self, items: deque[bytes]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while items:
            append_line(self.path, items[0])
            items.popleft()


class WholeFile(_PlainFile):
    """File of which each item is the whole content."""

    def append(self, items: deque[bytes]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, items[-1])
        items.clear()


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

"""Limits and files of untrusted sources."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

# Python's objects take up to twenty times the size of their text, so this stays below 1 GB.
MAX_JSON_BYTES = 32 << 20

# JavaScript represents every integer up to here exactly.
MAX_INTEGER = 2**53

# Characters of a name; a request URL can still hold such a name.
MAX_NAME = 10_000

# Characters of a message for people; longer ones are truncated.
MAX_TEXT = 8000

_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file or a link to one; OSError: another one, which may block or be endless."""
    # Opening a pipe must not block until there is a writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AT_ONCE))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return file

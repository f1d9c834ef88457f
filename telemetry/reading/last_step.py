"""Finds the last step of a run at the ends of its event files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from telemetry.events import list_event_files
from telemetry.events.page_format import parse_chunk
from telemetry.events.reading import events_from_end
from telemetry.tag_names import TOTAL_GRAD_NORM

# Tags that every step of a logger has and that nobody else writes: the steps of a user's own tags
# may count something else.
_MARKS = (TOTAL_GRAD_NORM.encode(), b"telemetry/n/", b"telemetry/m/")


class EventFile(NamedTuple):
    """An event file, and its size in bytes when it was found."""

    path: Path
    size: int


def event_files(log_dir: str) -> Iterator[EventFile]:
    """Regular event files of a local directory, newest first; none if the directory is missing.

    Raises:
        OSError: The directory cannot be read.
    """
    with suppress(FileNotFoundError):
        for path in reversed(list_event_files(log_dir)):
            if path.is_file():
                yield EventFile(path, path.stat().st_size)


def last_step(files: Iterable[EventFile], *, max_bytes: float = math.inf) -> int | None:
    """The last step that a logger recorded; None without any.

    It is the last step of the newest session, which may have gone back to an earlier step. This
    is cheap even in a large directory, unless none of the newest files is a logger's.

    Args:
        files: Newest first; each is read up to its ``size``.
        max_bytes: About how much of each file to read at most.

    Raises:
        OSError: A file cannot be read.
    """
    for path, size in files:
        with open(path, "rb") as file:
            for data in events_from_end(file, size, _MARKS, max_bytes=max_bytes):
                step = _step_of(data)
                if step is not None:
                    return step
    return None


def _step_of(data: bytes) -> int | None:
    """The step of a logger's event; None for any other event."""
    try:
        event = Event.FromString(data)
    except DecodeError:
        return None
    tags = (value.tag for value in event.summary.value)
    if any(tag == TOTAL_GRAD_NORM or parse_chunk(tag) is not None for tag in tags):
        return int(event.step)
    return None

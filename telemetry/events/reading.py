"""Readers of event files, whole or torn, from their beginning or their end."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from telemetry.events import framing
from telemetry.untrusted import open_file

# Limit of TensorBoard's data server, and of our writer's queue.
MAX_EVENT_BYTES = 256 << 20

_WINDOW_BYTES = 1 << 18
_LARGE_WINDOW_BYTES = 1 << 24
_LARGEST_EVENT_BYTES = 1 << 26
_MAX_CANDIDATES = 1 << 18  # offsets tried before damaged bytes are given up
# The upper half of a frame's length, which is below 4 GiB: it shows where a frame may begin.
_ZEROS = re.compile(rb"\0{4,}")


class CorruptEventFileError(ValueError):
    """Damaged event file. A torn tail does not raise this.

    Attributes:
        offset: Byte at which the damaged frame begins; everything before it was read.
    """

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(f"{path}: damaged at byte {offset}: {what}")
        self.path = path
        self.offset = offset


class EventReader(Iterator[Event]):
    """Iterator over the events of one file, in file order; see :func:`read_events`.

    Attributes:
        offset: End of the last event read, in bytes.
        torn_at: Byte at which an unfinished frame at the end of the file begins, as after a crash
            or while the file is being written; else None.
        oversized: First byte and size of each event that was skipped because it is larger than
            :data:`MAX_EVENT_BYTES`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.offset = 0
        self.torn_at: int | None = None
        self.oversized: list[tuple[int, int]] = []
        self._events = self._read()

    def __next__(self) -> Event:
        return next(self._events)

    def _read(self) -> Iterator[Event]:
        with open_file(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            while self.offset < size:
                header = file.read(framing.HEADER_BYTES)
                # After a power cut, a file that had grown may end in zeros.
                is_whole = len(header) == framing.HEADER_BYTES and any(header)
                length = framing.data_length(header) if is_whole else 0
                if length is None:
                    raise self._damaged("the length does not match its checksum")
                end = self.offset + framing.HEADER_BYTES + length + framing.FOOTER_BYTES
                if not is_whole or end > size:
                    self.torn_at = self.offset
                    return
                event = self._read_event(file, length)
                self.offset = end
                if event is not None:
                    yield event

    def _read_event(self, file: BinaryIO, length: int) -> Event | None:
        """Return the event of the next frame; None if it is skipped."""
        if length > MAX_EVENT_BYTES:
            self.oversized.append((self.offset, length))
            file.seek(length + framing.FOOTER_BYTES, os.SEEK_CUR)
            return None
        data = file.read(length)
        if not framing.is_intact(data, file.read(framing.FOOTER_BYTES)):
            raise self._damaged("the data does not match its checksum")
        try:
            return Event.FromString(data)
        except DecodeError as error:
            raise self._damaged("not an event") from error

    def _damaged(self, what: str) -> CorruptEventFileError:
        return CorruptEventFileError(self.path, self.offset, what)


def list_event_files(log_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the event files of one run by name, in the order in which TensorBoard reads them."""
    return sorted(path for path in Path(log_dir).iterdir() if "tfevents" in path.name)


def read_events(path: str | os.PathLike[str]) -> EventReader:
    """Read one event file of any writer; ``list_event_files`` finds those of a run.

    At a torn tail, the iterator stops without an error and sets ``torn_at``. To get later events of
    a file that is still being written, read it again.

    Raises:
        OSError: The file cannot be read, or is not a regular file (at the first ``next``).
        CorruptEventFileError: A frame is damaged; the events before it have been returned.
    """
    return EventReader(path)


def events_from_end(
    file: BinaryIO, end: int, marks: Sequence[bytes], *, max_bytes: float = math.inf
) -> Iterator[bytes]:
    """Yield serialized events before byte ``end`` that contain one of ``marks``, last one first.

    Torn and damaged frames are skipped. Reading stops after about ``max_bytes``.
    """
    size = _WINDOW_BYTES
    while end > 0 and max_bytes > 0:
        max_bytes -= size
        start = max(0, end - size)
        file.seek(start)
        frames = list(_intact(file.read(end - start)))
        size *= 2
        if not frames and start > 0 and size <= _LARGEST_EVENT_BYTES:
            continue  # a frame is larger than the window
        yield from (data for _, data in reversed(frames) if any(mark in data for mark in marks))
        # The next window includes the frame that this one has cut off.
        end = start + frames[0][0] if frames and start > 0 else start
        size = min(size, _LARGE_WINDOW_BYTES)


def _intact(window: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the data of each intact frame."""
    end: int | None = 0
    while end is not None:
        candidates = islice(_candidates(window, end), _MAX_CANDIDATES)
        end = None
        for begin in candidates:
            if (data := _data_at(window, begin)) is not None:
                yield begin, data
                end = begin + framing.HEADER_BYTES + len(data) + framing.FOOTER_BYTES
                break


def _candidates(window: bytes, begin: int) -> Iterator[int]:
    """Yield offsets at which the next frame may begin: ``begin`` first."""
    yield begin
    for zeros in _ZEROS.finditer(window, begin):
        # The lower half of a length has one to four bytes before its zeros.
        stop = min(zeros.start(), zeros.end() - 7)
        yield from range(max(begin, zeros.start() - 4), stop)


def _data_at(window: bytes, begin: int) -> bytes | None:
    """Return the data of the intact frame at this offset, or None."""
    data_begin = begin + framing.HEADER_BYTES
    length = int.from_bytes(window[begin : begin + 8], "little")
    if data_begin + length + framing.FOOTER_BYTES > len(window):
        return None
    if framing.data_length(window[begin:data_begin]) is None:
        return None
    data = window[data_begin : data_begin + length]
    footer = window[data_begin + length : data_begin + length + framing.FOOTER_BYTES]
    return data if framing.is_intact(data, footer) else None

"""Reads event files back, whole or torn, without TensorBoard's server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from telemetry.events import framing
from telemetry.untrusted import open_file

MAX_EVENT_BYTES = 256 << 20
"""The most that TensorBoard's data server sends at once, and that our writer holds back."""


class CorruptEventFileError(ValueError):
    """An event file holds bytes that no writer wrote. A torn tail does not raise this.

    Attributes:
        path: The file.
        offset: Byte at which the damaged frame begins; everything before it was read.
    """

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(f"{path}: damaged at byte {offset}: {what}")
        self.path = path
        self.offset = offset


class EventReader(Iterator[Event]):
    """The events of one file, in the order in which they were written; see :func:`read_events`.

    Attributes:
        path: The file.
        offset: End of the last event read, in bytes.
        torn_at: Byte at which an unfinished frame at the end of the file begins; None if the file
            ends with a whole frame, or before its end is reached. A crash leaves such a frame; a
            file that is still being written may have one, too.
        oversized: The first byte and the size of each event that was skipped because it is larger
            than :data:`MAX_EVENT_BYTES`.
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
        """The event of the next frame; None if it is skipped."""
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


def read_events(path: str | os.PathLike[str]) -> EventReader:
    """Reads one event file, whoever wrote it.

    Args:
        path: The file; ``list_event_files`` finds those of a run.

    Returns:
        An iterator over the events. Where a crash cut the file off, it stops without an error and
        sets ``torn_at``. To see new events of a file that is still being written, read it again.

    Raises:
        OSError: The file cannot be read, or is not a regular file (at the first ``next``).
        CorruptEventFileError: A frame is damaged; the events before it have been returned.
    """
    return EventReader(path)

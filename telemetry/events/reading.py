"""Reads event files back, whole or torn, without TensorBoard's server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from telemetry.events import framing


class CorruptEventFileError(ValueError):
    """An event file holds bytes that no writer wrote; a torn tail is not such a case.

    Attributes:
        path: The file.
        offset: Where the damaged record begins, in bytes; everything before it was read.
    """

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(f"{path}: damaged at byte {offset}: {what}")
        self.path = path
        self.offset = offset


class EventReader(Iterator[Event]):
    """Iterates over the events of one file, in the order in which they were written.

    Attributes:
        path: The file.
        offset: End of the last event read, in bytes.
        torn_at: Where an unfinished record at the end of the file begins, in bytes; None if
            there is none, or before the end is reached. A crash leaves such a record, and so
            does a look at a file that is being written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.offset = 0
        self.torn_at: int | None = None
        self._events = self._read()

    def __next__(self) -> Event:
        return next(self._events)

    def _read(self) -> Iterator[Event]:
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while self.offset < size:
                data = self._read_record(file, size - self.offset)
                if data is None:
                    self.torn_at = self.offset
                    return
                event = self._parse(data)
                self.offset += framing.HEADER_BYTES + len(data) + framing.FOOTER_BYTES
                yield event

    def _read_record(self, file: BinaryIO, left: int) -> bytes | None:
        """The next record's data, None if fewer than all of its bytes are left."""
        header = file.read(framing.HEADER_BYTES)
        # A file system that grew the file before a power cut leaves zeros.
        if len(header) < framing.HEADER_BYTES or not any(header):
            return None
        length = framing.data_length(header)
        if length is None:
            raise CorruptEventFileError(
                self.path, self.offset, "the length is not what was written"
            )
        if framing.HEADER_BYTES + length + framing.FOOTER_BYTES > left:
            return None
        data = file.read(length)
        if not framing.is_intact(data, file.read(framing.FOOTER_BYTES)):
            raise CorruptEventFileError(self.path, self.offset, "the data is not what was written")
        return data

    def _parse(self, data: bytes) -> Event:
        try:
            return Event.FromString(data)
        except DecodeError as error:
            raise CorruptEventFileError(self.path, self.offset, "not an event") from error


def read_events(path: str | os.PathLike[str]) -> EventReader:
    """Reads one event file, whoever wrote it.

    Args:
        path: The file; ``list_event_files`` finds those of a run.

    Returns:
        An iterator that stops without an error where a crash cut the file off, and says where:
        ``torn_at``. Events of a file that is still being written may be seen by reading again.

    Raises:
        OSError: The file cannot be read (at the first ``next``).
        CorruptEventFileError: A record is damaged; the events before it have been given out.
    """
    return EventReader(path)

"""Readers of event files and run logs, whole or torn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from telemetry.events import framing
from telemetry.untrusted import open_file

# Limit of TensorBoard's data server, and of our writer's queue.
MAX_FRAME_BYTES = 256 << 20


class CorruptFileError(ValueError):
    """Damaged file. A torn tail does not raise this.

    Attributes:
        offset: Byte at which the damaged frame begins; everything before it was read.
    """

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(f"{path}: damaged at byte {offset}: {what}")
        self.path = path
        self.offset = offset


class FrameReader(Iterator[Any]):
    """Iterator over the frames of one file, in file order.

    At a torn tail it stops without an error. To get later frames of a file that is still being
    written, read on from :attr:`offset`.

    Attributes:
        offset: End of the last frame read, in bytes.
        oversized: First byte and size of each frame that was skipped because it is larger than
            :data:`MAX_FRAME_BYTES`.

    Raises:
        OSError: The file cannot be read, or is not a regular file (at the first ``next``).
        CorruptFileError: A frame is damaged; those before it have been returned.
    """

    def __init__(self, path: str | os.PathLike[str], offset: int = 0) -> None:
        self.path = Path(path)
        self.offset = offset
        self.oversized: list[tuple[int, int]] = []
        self._frames = self._read()

    def __next__(self) -> Any:
        return next(self._frames)

    def _read(self) -> Iterator[Any]:
        with open_file(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(self.offset)
            while self.offset < size:
                header = file.read(framing.HEADER_BYTES)
                # After a power cut, a file that had grown may end in zeros.
                is_whole = len(header) == framing.HEADER_BYTES and any(header)
                length = framing.data_length(header) if is_whole else 0
                if length is None:
                    raise self._damaged("the length does not match its checksum")
                end = self.offset + framing.HEADER_BYTES + length + framing.FOOTER_BYTES
                if not is_whole or end > size:
                    return
                if length > MAX_FRAME_BYTES:
                    self.oversized.append((self.offset, length))
                    self.offset = file.seek(end)
                    continue
                data = file.read(length)
                if not framing.is_intact(data, file.read(framing.FOOTER_BYTES)):
                    raise self._damaged("the data does not match its checksum")
                frame = self._decoded(data)
                self.offset = end
                yield frame

    def _decoded(self, data: bytes) -> Any:
        return data

    def _damaged(self, what: str) -> CorruptFileError:
        return CorruptFileError(self.path, self.offset, what)


class EventReader(FrameReader):
    """Iterator over the events of one event file of any writer."""

    def _decoded(self, data: bytes) -> Event:
        try:
            return Event.FromString(data)
        except DecodeError as error:
            raise self._damaged("not an event") from error


def list_event_files(log_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the event files of one run by name, in the order in which TensorBoard reads them."""
    return sorted(path for path in Path(log_dir).iterdir() if "tfevents" in path.name)

"""Readers of event files and run logs, whole or torn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from telemetry.events import framing
from telemetry.untrusted import open_file

# Limit of TensorBoard's data server, and of our writer's queue.
MAX_FRAME_BYTES = 256 << 20

Skipped: TypeAlias = Callable[[str, object], object]
"""Receives the name of a part of the file that is skipped, and the reason."""


def read_frames(
    path: str | os.PathLike[str], skipped: Skipped, offset: int = 0
) -> Iterator[tuple[bytes, int]]:
    """Yield the data of each intact frame from an offset on, and the offset of the frame's end.

    A torn tail ends the file silently, because its writer may continue there. A damaged frame ends
    the file, too; a frame larger than :data:`MAX_FRAME_BYTES` is skipped. An OSError means that the
    file cannot be read, or is not a regular file.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        while offset < size:
            header = file.read(framing.HEADER_BYTES)
            # After a power cut, a file that had grown may end in zeros.
            if len(header) < framing.HEADER_BYTES or not any(header):
                return
            length = framing.data_length(header)
            if length is None:
                skipped("the rest", f"damaged at byte {offset}")
                return
            end = offset + framing.HEADER_BYTES + length + framing.FOOTER_BYTES
            if end > size:
                return
            if length > MAX_FRAME_BYTES:
                skipped(f"the frame at byte {offset}", f"it has {length} bytes")
                file.seek(end)
            else:
                data = file.read(length)
                if not framing.is_intact(data, file.read(framing.FOOTER_BYTES)):
                    skipped("the rest", f"damaged at byte {offset}")
                    return
                yield data, end
            offset = end


def read_events(path: str | os.PathLike[str], skipped: Skipped) -> Iterator[Event]:
    """Yield the events of one event file of any writer."""
    for data, end in read_frames(path, skipped):
        try:
            yield Event.FromString(data)
        except DecodeError:
            skipped(f"the frame before byte {end}", "it is damaged, and not an event")


def list_event_files(log_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the event files of one run by name, in the order in which TensorBoard reads them."""
    return sorted(path for path in Path(log_dir).iterdir() if "tfevents" in path.name)

"""Reads the last events of an event file without reading the whole file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import BinaryIO

from telemetry.events import framing

_WINDOW_BYTES = 1 << 18
_LARGE_WINDOW_BYTES = 1 << 24
_LARGEST_EVENT_BYTES = 1 << 26
_MAX_CANDIDATES = 1 << 18  # places tried before giving up on damaged bytes
# The upper half of a frame's length, which is below 4 GiB: it shows where a frame may begin.
_ZEROS = re.compile(rb"\0{4,}")


def events_from_end(
    file: BinaryIO, end: int, marks: Sequence[bytes], *, max_bytes: float = math.inf
) -> Iterator[bytes]:
    """Serialized events before byte ``end`` that contain one of ``marks``, last one first.

    Torn and damaged frames are skipped. Parts of the file without a mark are read but not parsed.
    It stops when about ``max_bytes`` have been read.

    Raises:
        OSError: The file cannot be read.
    """
    size = _WINDOW_BYTES
    while end > 0 and max_bytes > 0:
        max_bytes -= size
        start = max(0, end - size)
        file.seek(start)
        window = file.read(end - start)
        is_marked = any(mark in window for mark in marks)
        if not is_marked and start > 0 and size < _LARGE_WINDOW_BYTES:
            size *= 2  # no mark here
            continue
        frames = _intact(window)
        first = next(frames, None)
        if first is None and start > 0 and size < _LARGEST_EVENT_BYTES:
            size *= 2  # a frame is larger than the window
            continue
        if first is not None and is_marked:
            for _, data in reversed([first, *frames]):
                if any(mark in data for mark in marks):
                    yield data
        # The next window includes the frame that this one has cut off.
        end = start + first[0] if first is not None and start > 0 else start
        size = min(2 * size, _LARGE_WINDOW_BYTES)


def _intact(window: bytes) -> Iterator[tuple[int, bytes]]:
    """Where each intact frame begins, and its data."""
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
    """Where the next frame may begin: at ``begin`` if nothing is damaged."""
    yield begin
    for zeros in _ZEROS.finditer(window, begin):
        # The lower half of a length has one to four bytes before its zeros.
        stop = min(zeros.start(), zeros.end() - 7)
        yield from range(max(begin, zeros.start() - 4), stop)


def _data_at(window: bytes, begin: int) -> bytes | None:
    """Data of the frame that begins there; None if no intact frame does."""
    data_begin = begin + framing.HEADER_BYTES
    length = int.from_bytes(window[begin : begin + 8], "little")
    if data_begin + length + framing.FOOTER_BYTES > len(window):
        return None
    if framing.data_length(window[begin:data_begin]) is None:
        return None
    data = window[data_begin : data_begin + length]
    footer = window[data_begin + length : data_begin + length + framing.FOOTER_BYTES]
    return data if framing.is_intact(data, footer) else None

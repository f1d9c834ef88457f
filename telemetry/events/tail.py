"""Reads an event file from its end, for those who only want to know how it ends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import BinaryIO

from telemetry.events import framing

_WINDOW_BYTES = 1 << 18
_LARGE_WINDOW_BYTES = 1 << 24
_LARGEST_RECORD_BYTES = 1 << 26
_MAX_CANDIDATES = 1 << 18  # what looks for a record in bytes that are none gives up then
# The upper half of a record's length, which is below 4 GiB: what tells where one may begin.
_ZEROS = re.compile(rb"\0{4,}")


def records_from_end(
    file: BinaryIO, end: int, marks: Sequence[bytes], *, max_bytes: float = math.inf
) -> Iterator[bytes]:
    """Data of the records before byte ``end`` that contain one of ``marks``, last one first.

    A record that is torn or damaged is passed over. Where there are no such records, reading costs
    little more than the bytes do. It stops when about ``max_bytes`` have been read.

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
            size *= 2  # nothing to find here
            continue
        records = _intact(window)
        first = next(records, None)
        if first is None and start > 0 and size < _LARGEST_RECORD_BYTES:
            size *= 2  # a record is larger than the window
            continue
        if first is not None and is_marked:
            for _, data in reversed([first, *records]):
                if any(mark in data for mark in marks):
                    yield data
        # What the window has cut off belongs to the next one.
        end = start + first[0] if first is not None and start > 0 else start
        size = min(2 * size, _LARGE_WINDOW_BYTES)


def _intact(window: bytes) -> Iterator[tuple[int, bytes]]:
    """Where each intact record begins, and its data."""
    end = 0
    while (record := _next_record(window, end)) is not None:
        yield record
        begin, data = record
        end = begin + framing.HEADER_BYTES + len(data) + framing.FOOTER_BYTES


def _next_record(window: bytes, begin: int) -> tuple[int, bytes] | None:
    for candidate in islice(_candidates(window, begin), _MAX_CANDIDATES):
        data = _record_at(window, candidate)
        if data is not None:
            return candidate, data
    return None


def _candidates(window: bytes, begin: int) -> Iterator[int]:
    """Where the next record may begin: here, if nothing is damaged."""
    yield begin
    for zeros in _ZEROS.finditer(window, begin):
        # The lower half of a length has one to four bytes before its zeros.
        stop = min(zeros.start(), zeros.end() - 7)
        yield from range(max(begin, zeros.start() - 4), stop)


def _record_at(window: bytes, begin: int) -> bytes | None:
    """Data of the intact record that begins there; None if there is none."""
    data_begin = begin + framing.HEADER_BYTES
    length = int.from_bytes(window[begin : begin + 8], "little")
    if data_begin + length + framing.FOOTER_BYTES > len(window):
        return None
    if framing.data_length(window[begin:data_begin]) is None:
        return None
    data = window[data_begin : data_begin + length]
    footer = window[data_begin + length : data_begin + length + framing.FOOTER_BYTES]
    return data if framing.is_intact(data, footer) else None

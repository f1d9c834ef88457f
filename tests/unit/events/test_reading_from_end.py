"""Reading from the end finds the same records as reading from the start."""

from __future__ import annotations

import io
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.events import reading
from telemetry.events.framing import frame
from telemetry.events.reading import events_from_end

MARK = b"marked"
RECORDS = st.lists(
    st.tuples(st.sampled_from([b"", MARK]), st.binary(max_size=300)).map(b"".join), max_size=30
)
GARBAGE = st.sampled_from([b"", bytes(100), b"\1\0\0\0\0" * 40, struct.pack("<50d", *[1.0] * 50)])


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that records cross their borders and exceed one."""
    monkeypatch.setattr(reading, "_WINDOW_BYTES", 64)
    monkeypatch.setattr(reading, "_LARGE_WINDOW_BYTES", 256)


def from_end(data: bytes, **options: float) -> list[bytes]:
    return list(events_from_end(io.BytesIO(data), len(data), [MARK], **options))


@given(records=RECORDS, torn=st.integers(0, 20), garbage=GARBAGE)
def test_marked_records_come_last_one_first(
    records: list[bytes], torn: int, garbage: bytes
) -> None:
    intact = b"".join(map(frame, records))
    expected = [record for record in reversed(records) if MARK in record]
    assert from_end(intact) == expected
    assert from_end(intact + garbage) == expected
    assert from_end(intact + frame(MARK + bytes(50))[: torn + 1]) == expected


@given(before=RECORDS, after=RECORDS, garbage=GARBAGE)
def test_damage_loses_only_the_damaged_events(
    before: list[bytes], after: list[bytes], garbage: bytes
) -> None:
    damaged = bytearray(frame(MARK + b"lost"))
    damaged[-5] ^= 1
    data = b"".join([*map(frame, before), damaged, garbage, *map(frame, after)])
    assert from_end(data) == [r for r in reversed([*before, *after]) if MARK in r]


def test_events_appended_later_are_ignored() -> None:
    first, second = frame(MARK + b"1"), frame(MARK + b"2")
    file = io.BytesIO(first + second)
    assert list(events_from_end(file, len(first), [MARK])) == [MARK + b"1"]


def test_reading_from_the_end_stops_at_the_byte_limit() -> None:
    data = frame(MARK) + b"".join(frame(b"other") for _ in range(10_000))
    assert from_end(data) == [MARK]
    assert from_end(data, max_bytes=1000) == []


def test_noise_contains_no_record() -> None:
    assert from_end(os.urandom(1 << 16)) == []

"""Event files of any content: each intact event is read, and everything else is reported."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from telemetry.events import framing, reading
from telemetry.events.framing import frame
from telemetry.events.reading import read_events, read_frames

EVENTS = [
    Event(wall_time=1.0, file_version="brain.Event:2"),
    Event(wall_time=2.0, step=7, summary={"value": [{"tag": "loss", "simple_value": 0.5}]}),
    Event(wall_time=3.0, step=8, graph_def=b"graph"),
]
FRAMES = [frame(event.SerializeToString()) for event in EVENTS]
FILE = b"".join(FRAMES)

# Steps are int64; protobuf distinguishes 0.0 and -0.0, and NaN differs from itself.
events = st.builds(
    Event,
    wall_time=st.floats(allow_nan=False),
    step=st.integers(-(2**63), 2**63 - 1),
    graph_def=st.binary(max_size=100),
)


def read(content: bytes) -> tuple[list[Event], list[str]]:
    """Return the events of a file with this content, and what was reported."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events.out.tfevents.1"
        path.write_bytes(content)
        problems: list[str] = []
        events = list(read_events(path, lambda what, why: problems.append(f"{what}: {why}")))
        return events, problems


@given(st.lists(events, max_size=5))
def test_events_are_read_back_as_written(written: list[Event]) -> None:
    content = b"".join(frame(event.SerializeToString()) for event in written)
    assert read(content) == (written, [])


@pytest.mark.parametrize("cut", range(len(FILE)))
def test_a_torn_tail_ends_the_file_and_is_read_later(tmp_path: Path, cut: int) -> None:
    path, at = tmp_path / "events.out.tfevents.1", 0
    found: list[bytes] = []
    for content in (FILE[:cut], FILE):
        path.write_bytes(content)
        for data, end in read_frames(path, pytest.fail, at):
            found.append(data)
            at = end
        assert len(b"".join(map(frame, found))) == at <= len(content)
    assert b"".join(map(frame, found)) == FILE


ENORMOUS = (2**62).to_bytes(8, "little")


@pytest.mark.parametrize("tail", [bytes(4096), ENORMOUS + frame(ENORMOUS)[-4:] + b"some data"])
def test_zeros_after_a_power_cut_and_a_length_beyond_the_file_are_a_torn_tail(tail: bytes) -> None:
    assert read(FILE + tail) == (EVENTS, [])


@pytest.mark.parametrize("part", ["length", "data", "checksum"])
def test_a_damaged_record_is_reported_after_the_intact_ones_are_read(part: str) -> None:
    start = len(FRAMES[0])
    offset = {"length": 0, "data": 15, "checksum": len(FRAMES[1]) - 1}[part]
    content = bytearray(FILE)
    content[start + offset] ^= 0x10
    assert read(bytes(content)) == (EVENTS[:1], [f"the rest: damaged at byte {start}"])


def test_an_intact_record_with_another_content_is_reported() -> None:
    found, [problem] = read(FRAMES[0] + frame(b"\xff\xff\xff") + FRAMES[1])
    assert found == EVENTS[:2]
    assert "not an event" in problem


@given(st.sampled_from([FILE, b""]), st.data())
def test_a_corrupted_file_gives_events_and_at_most_a_line(
    file: bytes, drawn: st.DataObject
) -> None:
    content = bytearray(file)
    for _ in range(drawn.draw(st.integers(1, 4))):
        start = drawn.draw(st.integers(0, len(content)))
        end = drawn.draw(st.integers(start, min(start + 30, len(content))))
        content[start:end] = drawn.draw(st.binary(max_size=200))
    found, problems = read(bytes(content))
    assert all(isinstance(event, Event) for event in found)
    assert len(problems) <= 1


def test_an_oversized_record_is_skipped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_FRAME_BYTES", 100)
    found, problems = read(FRAMES[0] + frame(bytes(1000)) + b"".join(FRAMES[1:]))
    assert found == EVENTS
    assert problems == [f"the frame at byte {len(FRAMES[0])}: it has 1000 bytes"]


def test_a_file_that_shrinks_while_it_is_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    larger_than_the_read_ahead = Event(file_version="x" * 1_000_000)
    path.write_bytes(FILE + frame(larger_than_the_read_ahead.SerializeToString()))
    problems: list[str] = []
    events = read_events(path, lambda what, why: problems.append(str(why)))
    next(events)
    os.truncate(path, len(FRAMES[0]))
    list(events)
    assert len(problems) == 1


def test_other_than_regular_files_are_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        next(read_events(path, pytest.fail))


@given(st.binary(max_size=300), st.data())
def test_a_frame_equals_that_of_tensorboard_and_a_changed_bit_is_detected(
    data: bytes, drawn: st.DataObject
) -> None:
    expected = io.BytesIO()
    RecordWriter(expected).write(data)
    assert frame(data) == expected.getvalue()
    record = bytearray(frame(data))
    bit = drawn.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    head, foot = framing.HEADER_BYTES, framing.FOOTER_BYTES
    length = framing.data_length(bytes(record[:head]))
    assert length is None or not framing.is_intact(bytes(record[head:-foot]), bytes(record[-foot:]))

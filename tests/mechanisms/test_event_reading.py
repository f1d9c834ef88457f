"""Event files of any content: each intact event is read, and any other ends in a named error."""

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
from telemetry.events.reading import CorruptFileError, EventReader
from tests.helpers.scripts import run_script

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


def read(content: bytes) -> tuple[list[Event], EventReader]:
    """Return the events of a file with this content, and its reader."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events.out.tfevents.1"
        path.write_bytes(content)
        reader = EventReader(path)
        return list(reader), reader


@given(st.lists(events, max_size=5))
def test_events_are_read_back_as_written(written: list[Event]) -> None:
    content = b"".join(frame(event.SerializeToString()) for event in written)
    found, reader = read(content)
    assert found == written
    assert reader.offset == len(content)


@pytest.mark.parametrize("cut", range(len(FILE)))
def test_a_torn_tail_ends_the_file_and_is_reported(cut: int) -> None:
    complete = sum(len(b"".join(FRAMES[: n + 1])) <= cut for n in range(len(FRAMES)))
    end = len(b"".join(FRAMES[:complete]))
    found, reader = read(FILE[:cut])
    assert found == EVENTS[:complete]
    assert reader.offset == end


ENORMOUS = (2**62).to_bytes(8, "little")


@pytest.mark.parametrize("tail", [bytes(4096), ENORMOUS + frame(ENORMOUS)[-4:] + b"some data"])
def test_zeros_after_a_power_cut_and_a_length_beyond_the_file_are_a_torn_tail(tail: bytes) -> None:
    found, reader = read(FILE + tail)
    assert found == EVENTS
    assert reader.offset == len(FILE)


@pytest.mark.parametrize("part", ["length", "data", "checksum"])
def test_a_damaged_record_raises_an_error_after_the_intact_ones_are_read(
    tmp_path: Path, part: str
) -> None:
    start = len(FRAMES[0])
    offset = {"length": 0, "data": 15, "checksum": len(FRAMES[1]) - 1}[part]
    content = bytearray(FILE)
    content[start + offset] ^= 0x10
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(content)
    reader = EventReader(path)
    assert next(reader) == EVENTS[0]
    with pytest.raises(CorruptFileError, match=f"damaged at byte {start}") as caught:
        next(reader)
    assert (caught.value.path, caught.value.offset) == (path, start)


def test_an_intact_record_with_another_content_is_reported() -> None:
    with pytest.raises(CorruptFileError, match="not an event"):
        read(FRAMES[0] + frame(b"\xff\xff\xff"))


@given(st.sampled_from([FILE, b""]), st.data())
def test_a_corrupted_file_gives_a_clean_stop_or_a_named_error(
    file: bytes, drawn: st.DataObject
) -> None:
    content = bytearray(file)
    for _ in range(drawn.draw(st.integers(1, 4))):
        start = drawn.draw(st.integers(0, len(content)))
        end = drawn.draw(st.integers(start, min(start + 30, len(content))))
        content[start:end] = drawn.draw(st.binary(max_size=200))
    try:
        found, _ = read(bytes(content))
    except CorruptFileError:
        return
    assert all(isinstance(event, Event) for event in found)


def test_reading_loads_neither_the_server_nor_torch(tmp_path: Path) -> None:
    output, _ = run_script(
        tmp_path,
        """
        import sys
        import telemetry.events.files
        import telemetry.events.reading
        heavy = {"torch", "grpc", "werkzeug", "fsspec", "tensorboard.backend"}
        print(heavy & set(sys.modules))
        """,
    )
    assert output == "set()\n"


def test_an_oversized_record_is_skipped_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    large = frame(bytes(1000))
    monkeypatch.setattr(reading, "MAX_FRAME_BYTES", 100)
    found, reader = read(FRAMES[0] + large + b"".join(FRAMES[1:]))
    assert found == EVENTS
    assert reader.oversized == [(len(FRAMES[0]), 1000)]
    assert reader.offset == len(FILE) + len(large)


def test_a_file_that_shrinks_while_it_is_read_ends_with_a_named_error(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    larger_than_the_read_ahead = Event(file_version="x" * 1_000_000)
    path.write_bytes(FILE + frame(larger_than_the_read_ahead.SerializeToString()))
    reader = EventReader(path)
    next(reader)
    os.truncate(path, len(FRAMES[0]))
    with pytest.raises(CorruptFileError):
        list(reader)


def test_other_than_regular_files_are_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        next(EventReader(path))


# --- frames --------------------------------------------------------------------------------------


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

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import RecordWriter

from telemetry.events import framing

HEADER = framing.HEADER_BYTES
FOOTER = framing.FOOTER_BYTES


@given(st.binary(max_size=300))
def test_a_frame_equals_that_of_tensorboard(data: bytes) -> None:
    expected = io.BytesIO()
    RecordWriter(expected).write(data)

    assert framing.frame(data) == expected.getvalue()


@given(st.binary(max_size=300))
def test_a_frame_is_decoded_to_its_data(data: bytes) -> None:
    record = framing.frame(data)

    assert framing.data_length(record[:HEADER]) == len(data)
    assert record[HEADER:-FOOTER] == data
    assert framing.is_intact(data, record[-FOOTER:])


@given(st.binary(max_size=50), st.data())
def test_a_changed_bit_is_detected(data: bytes, drawn: st.DataObject) -> None:
    record = bytearray(framing.frame(data))
    bit = drawn.draw(st.integers(0, 8 * len(record) - 1))

    record[bit // 8] ^= 1 << bit % 8

    length = framing.data_length(bytes(record[:HEADER]))
    intact = framing.is_intact(bytes(record[HEADER:-FOOTER]), bytes(record[-FOOTER:]))
    assert length is None or not intact

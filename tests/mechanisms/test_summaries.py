"""Values of events: TensorBoard shows them as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from telemetry.events import summaries
from tests.helpers.board import ReadBoard
from tests.helpers.serialized import histogram, summary_of


def test_histograms_and_bytes_are_shown_as_they_are(tmp_path: Path, read_board: ReadBoard) -> None:
    """Also a histogram without buckets, and bytes that end with a zero."""
    writer = EventFileWriter(str(tmp_path / "run"))
    values = [
        histogram("grad", [-1.0, 0.0], [0.0, 2.5], [7, 9]),
        histogram("empty", [], [], []),
        summaries.tensor("layout", b'{"a": 1}\0', "telemetry"),
        summaries.image("maps", [b"first", b"second"], width=4, height=2),
    ]
    writer.add_event(Event(wall_time=1.0, step=3, summary=summary_of(values)))
    writer.close()
    board = read_board(tmp_path)
    shown = board.tensors("histograms")["run"]
    np.testing.assert_array_equal(shown["grad"][0][1], [[-1.0, 0.0, 7.0], [0.0, 2.5, 9.0]])
    assert shown["empty"][0][1].shape == (0, 3)
    [(_, layout)] = board.tensors("telemetry")["run"]["layout"]
    assert layout.tolist() == [b'{"a": 1}\0']
    assert board.blobs("images")["run"]["maps"] == [(3, [b"4", b"2", b"first", b"second"])]


def test_an_unsupported_dtype_is_refused() -> None:
    with pytest.raises(KeyError, match="complex64"):
        summaries.tensor("m/0", np.zeros(2, np.complex64), "telemetry")

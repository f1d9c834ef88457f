from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from board import ReadBoard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from telemetry.events import summaries


def write(logdir: Path, *values: Summary.Value, step: int = 3) -> None:
    """Writes one event with TensorBoard's own writer."""
    writer = EventFileWriter(str(logdir))
    writer.add_event(Event(wall_time=1.0, step=step, summary=Summary(value=values)))
    writer.close()


def test_many_values_of_one_event_are_all_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    write(tmp_path / "run", *(summaries.scalar(f"loss/{i}", i / 4) for i in range(50)))

    shown = read_board(tmp_path).scalars()["run"]

    assert shown == {f"loss/{i}": [(3, i / 4)] for i in range(50)}


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45])
def test_scalars_of_every_kind_are_shown(
    tmp_path: Path, read_board: ReadBoard, value: float
) -> None:
    write(tmp_path / "run", summaries.scalar("loss", value))

    ((step, shown),) = read_board(tmp_path).scalars()["run"]["loss"]

    assert step == 3
    np.testing.assert_array_equal(np.float32(shown), np.float32(value))


def test_scalars_are_found_by_the_event_accumulator(tmp_path: Path) -> None:
    write(tmp_path, summaries.scalar("loss", 0.25))

    (event,) = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")

    assert (event.step, event.value) == (3, 0.25)


def test_histograms_are_shown_with_their_buckets(tmp_path: Path, read_board: ReadBoard) -> None:
    write(tmp_path / "run", summaries.histogram("grad", [-1.0, 0.0], [0.0, 2.5], [7, 9]))

    ((step, buckets),) = read_board(tmp_path).tensors("histograms")["run"]["grad"]

    assert step == 3
    np.testing.assert_array_equal(buckets, [[-1.0, 0.0, 7.0], [0.0, 2.5, 9.0]])


def test_an_empty_histogram_is_shown_as_no_buckets(tmp_path: Path, read_board: ReadBoard) -> None:
    write(tmp_path / "run", summaries.histogram("grad", [], [], []))

    ((_, buckets),) = read_board(tmp_path).tensors("histograms")["run"]["grad"]

    assert buckets.shape == (0, 3)


def test_histograms_are_found_by_the_event_accumulator(tmp_path: Path) -> None:
    write(tmp_path, summaries.histogram("grad", [0.0], [1.0], [5]))

    (event,) = EventAccumulator(str(tmp_path)).Reload().Tensors("grad")

    np.testing.assert_array_equal(tensor_util.make_ndarray(event.tensor_proto), [[0.0, 1.0, 5.0]])


def test_histogram_metadata_is_what_the_plugin_expects() -> None:
    metadata = summaries.histogram("grad", [0.0], [1.0], [5]).metadata.plugin_data

    assert metadata.plugin_name == histogram_metadata.PLUGIN_NAME
    assert histogram_metadata.parse_plugin_metadata(metadata.content).version == 0


@pytest.mark.parametrize(
    ("right", "count", "dtype"),
    [
        (1.0, 2**24, np.float32),
        (1.0, 2**24 + 1, np.float64),
        (1.0, 0.1, np.float64),
        (1e300, 1.0, np.float64),
    ],
)
def test_histogram_is_float32_only_where_nothing_is_lost(
    right: float, count: float, dtype: type
) -> None:
    value = summaries.histogram("grad", [0.0], [right], [count])

    array = tensor_util.make_ndarray(value.tensor)

    assert array.dtype == dtype
    np.testing.assert_array_equal(array, [[0.0, right, count]])


def test_images_are_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    write(tmp_path / "run", summaries.image("maps", [b"first", b"second"], width=4, height=2))

    ((step, blobs),) = read_board(tmp_path).blobs("images")["run"]["maps"]

    assert (step, blobs) == (3, [b"4", b"2", b"first", b"second"])


def test_texts_are_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    write(tmp_path / "run", summaries.text("alert", "loss is **NaN** ↯"))

    ((step, strings),) = read_board(tmp_path).tensors("text")["run"]["alert"]

    assert step == 3
    assert [string.decode() for string in strings] == ["loss is **NaN** ↯"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8"])
def test_tensors_of_a_plugin_come_back_bit_for_bit(
    tmp_path: Path, read_board: ReadBoard, dtype: str
) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)[:, ::-1]
    write(tmp_path / "run", summaries.tensor("m/0", array, "telemetry", b"layout 1"))

    board = read_board(tmp_path)

    ((_, shown),) = board.tensors("telemetry")["run"]["m/0"]
    assert shown.dtype == dtype
    np.testing.assert_array_equal(shown, array)
    assert board.plugin_content("telemetry", "run", "m/0") == b"layout 1"


def test_bytes_of_a_plugin_come_back_with_trailing_zeros(
    tmp_path: Path, read_board: ReadBoard
) -> None:
    write(tmp_path / "run", summaries.tensor("layout", b'{"a": 1}\0', "telemetry"))

    ((_, shown),) = read_board(tmp_path).tensors("telemetry")["run"]["layout"]

    assert shown.tolist() == [b'{"a": 1}\0']


def test_an_unsupported_dtype_is_refused() -> None:
    with pytest.raises(KeyError, match="complex64"):
        summaries.tensor("m/0", np.zeros(2, np.complex64), "telemetry")

"""Values of events: the bytes are those of protocol buffers, and TensorBoard shows them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_BLOB_SEQUENCE,
    DATA_CLASS_TENSOR,
    Summary,
    SummaryMetadata,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from telemetry.events import summaries
from tests.helpers.board import ReadBoard
from tests.helpers.serialized import histogram, parsed, summary_of


@pytest.mark.parametrize(
    ("right", "count", "dtype"),
    [
        (1.0, 2**24, np.float32),
        (1.0, 2**24 + 1, np.float64),
        (1.0, 2**24 + 0.5, np.float32),
        (1e300, 1.0, np.float64),
    ],
)
def test_histogram_is_float32_only_where_no_whole_count_is_lost(
    right: float, count: float, dtype: type
) -> None:
    value = parsed(histogram("grad", [0.0], [right], [count]))

    array = tensor_util.make_ndarray(value.tensor)

    assert array.dtype == dtype
    np.testing.assert_array_equal(array, np.array([[0.0, right, count]], dtype))


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


# --- the bytes are those of protocol buffers

TAGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
ARRAYS = arrays(
    st.sampled_from([np.float32, np.float64]),
    array_shapes(min_dims=0, min_side=0, max_side=9),
)


@given(TAGS, st.floats())
@example("", 0.0)
@example("loss", -0.0)
@example("loss", 3.5e38)
def test_a_scalar_is_serialized_as_by_protobuf(tag: str, value: float) -> None:
    assert summaries.scalar(tag, value) == serialized(tag, simple_value=value)


@pytest.mark.parametrize("size", [1, 100, 5_000, 600_000])
def test_tensors_of_any_length_are_serialized_as_by_protobuf(size: int) -> None:
    array = np.arange(size, dtype=np.float32)
    tensor = TensorProto(
        dtype=types_pb2.DT_FLOAT,
        tensor_shape={"dim": [{"size": size}]},
        tensor_content=array.tobytes(),
    )
    value = serialized("m", tensor=tensor, metadata=metadata_of("telemetry"))
    assert summaries.tensor("m", array, "telemetry") == value


@given(TAGS, ARRAYS, TAGS.filter(bool))
def test_a_tensor_is_serialized_as_by_protobuf(tag: str, array: np.ndarray, plugin: str) -> None:
    tensor = TensorProto(
        dtype=tensor_util.make_tensor_proto(array).dtype,
        tensor_shape={"dim": [{"size": size} for size in array.shape]},
        tensor_content=array.tobytes(),
    )
    value = serialized(tag, tensor=tensor, metadata=metadata_of(plugin))
    assert summaries.tensor(tag, array, plugin) == value


@given(TAGS, st.lists(st.binary(max_size=300), min_size=1, max_size=3), st.integers(0, 9999))
def test_texts_and_images_are_serialized_as_by_protobuf(
    tag: str, strings: list[bytes], size: int
) -> None:
    def tensor(strings: list[bytes]) -> TensorProto:
        shape = {"dim": [{"size": len(strings)}]}
        return TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=shape, string_val=strings)

    value = serialized(tag, tensor=tensor(strings[:1]), metadata=metadata_of("telemetry"))
    assert summaries.tensor(tag, strings[0], "telemetry") == value
    images = tensor([str(size).encode(), b"7", *strings])
    metadata = metadata_of("images", data_class=DATA_CLASS_BLOB_SEQUENCE)
    value = serialized(tag, tensor=images, metadata=metadata)
    assert summaries.image(tag, strings, size, 7) == value


@given(
    st.lists(st.builds(summaries.scalar, TAGS, st.floats())),
    st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300),
    st.floats() | st.integers(0, 2**40) | st.floats(width=32).map(np.float32),
)
@example([], 0, 0.0)
@example([], 1, -0.0)
def test_an_event_is_serialized_as_by_protobuf(
    values: list[bytes], step: int, walltime: float
) -> None:
    event = Event(wall_time=walltime, step=step, summary=summary_of(values))
    assert summaries.event_of(values, step, walltime) == event.SerializeToString()


def serialized(tag: str, **fields: object) -> bytes:
    summary = Summary(value=[Summary.Value(tag=tag, **fields)])  # type: ignore[arg-type]
    return bytes(summary.SerializeToString())


def metadata_of(
    plugin: str, content: bytes = b"", data_class: int = DATA_CLASS_TENSOR
) -> SummaryMetadata:
    plugin_data = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    return SummaryMetadata(plugin_data=plugin_data, data_class=data_class)

"""Builds the values of an event: scalars, histograms, images, texts and plain tensors.

Each is a serialized ``Summary`` of one ``Summary.Value``; joined, they are the summary of all of
them. TensorBoard shows them with either of its loaders. The fast loader shows a tensor only when
its metadata names a data class, so every tensor here does.

They are written in protocol buffers' wire format: a message is the concatenation of its fields, and
the concatenation of two messages is their merge. Building a message, copying it into another and
serializing that takes several times as long.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_BLOB_SEQUENCE,
    DATA_CLASS_TENSOR,
    HistogramProto,
    Summary,
    SummaryMetadata,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

FLOAT32_MAX = float(np.finfo(np.float32).max)
_DTYPES = {
    np.dtype(np.float32): types_pb2.DT_FLOAT,
    np.dtype(np.float64): types_pb2.DT_DOUBLE,
    np.dtype(np.int32): types_pb2.DT_INT32,
    np.dtype(np.int64): types_pb2.DT_INT64,
    np.dtype(np.uint8): types_pb2.DT_UINT8,
}
# Numbers of fields in tensorflow's .proto files, and first bytes of fields that are no messages.
_EVENT_SUMMARY, _SUMMARY_VALUE = 5, 1
_TAG, _HISTO, _TENSOR, _METADATA = 1, 5, 8, 9  # of Summary.Value
_BUCKET_LIMIT, _BUCKET = 6, 7
_TENSOR_CONTENT, _STRING_VAL = 4, 8
_TIME_AND_KEY = struct.Struct("<cdc")
_SIMPLE_VALUE = struct.Struct("<f")
_WALL_TIME_KEY, _STEP_KEY, _SIMPLE_VALUE_KEY = b"\x09", b"\x10", b"\x15"


def event_of(
    values: Iterable[bytes], step: int | None = None, walltime: float | None = None
) -> bytes:
    """A serialized ``Event``.

    Args:
        values: As the functions below give them.
        step: 0 if omitted.
        walltime: Seconds since the epoch; now if omitted.

    Raises:
        TypeError: The step or the time is no number.
        ValueError: The step is beyond 64 bits.
    """
    seconds = time.time() if walltime is None else walltime
    step = 0 if step is None else int(step)
    summary = b"".join(values)
    between = _delimiter(_EVENT_SUMMARY, len(summary))
    if type(seconds) is float and seconds > 0 and 0 < step < 2**63:
        time_and_key = _TIME_AND_KEY.pack(_WALL_TIME_KEY, seconds, _STEP_KEY)
        return b"".join((time_and_key, _varint(step), between, summary))
    return bytes(Event(wall_time=seconds, step=step).SerializeToString()) + between + summary


def scalar(tag: str, value: float) -> bytes:
    """One point of a curve, in float32 as from ``SummaryWriter.add_scalar``.

    It has no metadata: readers take a bare ``simple_value`` for a scalar, which has a third of the
    size and is found by ``EventAccumulator.Scalars``.
    """
    try:
        return _before_point(tag) + _SIMPLE_VALUE.pack(value)
    except (OverflowError, struct.error):  # beyond float32, or no number
        point = Summary.Value(tag=tag, simple_value=value)
        return bytes(Summary(value=[point]).SerializeToString())


def histograms(tags: Iterable[str], rows: NDArray[Any], ends: Iterable[int]) -> Iterator[bytes]:
    """Histograms, for the Histograms and Distributions dashboards.

    Args:
        tags: Names of the charts.
        rows: Left edge, right edge and count of each bucket, one histogram after the other, shape
            ``[buckets, 3]`` and :func:`histogram_dtype`. Edges ascend within a histogram, which may
            have no buckets.
        ends: Where the rows of each chart end.

    Returns:
        Tensors of shape ``[buckets, 3]``, readable by ``EventAccumulator.Tensors``.
    """
    metadata, content = _metadata("histograms"), rows.tobytes()
    begin, row_bytes = 0, 3 * rows.itemsize
    for tag, end in zip(tags, ends, strict=True):
        head = _array_head(rows.dtype, end - begin, 3)
        yield _tensor(tag, head, content[begin * row_bytes : end * row_bytes], metadata)
        begin = end


def histogram_dtype(counts: NDArray[np.float64], largest: float) -> type[np.floating[Any]]:
    """float32 if the edges, of which the largest is given, and all whole counts fit, else float64.

    Fractional counts are those of a sample, and may be rounded.
    """
    changed = counts.astype(np.float32) != counts
    fits = largest <= FLOAT32_MAX and not (changed & (counts == np.floor(counts))).any()
    return np.float32 if fits else np.float64


def classic_histograms(
    tags: Iterable[str],
    rows: NDArray[Any],
    ends: Iterable[int],
    sums: Iterable[tuple[float, float]],
) -> Iterator[bytes]:
    """As :func:`histograms`, in the form that torch writes, for readers that know no other.

    Args:
        tags, rows, ends: As there.
        sums: Of the values of each, and of their squares.
    """
    begin = 0
    for tag, end, (total, squares) in zip(tags, ends, sums, strict=True):
        left, right, counts = np.array(rows[begin:end].T, np.float64)
        begin = end
        figures = HistogramProto(num=counts.sum(), sum=total, sum_squares=squares)
        if left.size:
            figures.min, figures.max = left[0], right[-1]
        else:  # one bucket without values
            right = counts = np.zeros(1)
        figures_bytes = figures.SerializeToString()
        yield histogram_proto(tag, figures_bytes, right.tobytes(), counts.tobytes())


def histogram_proto(tag: str, figures: bytes, limits: bytes, counts: bytes) -> bytes:
    """A histogram in the form that torch writes.

    Args:
        tag: Name of the chart.
        figures: A serialized ``HistogramProto`` without the buckets.
        limits: Right edges, as bytes of float64, shape ``[k]`` with at least one.
        counts: Elements per bucket, in the same form.
    """
    size = len(limits)
    proto = (figures, _delimiter(_BUCKET_LIMIT, size), limits, _delimiter(_BUCKET, size), counts)
    return _value(tag, _delimiter(_HISTO, sum(map(len, proto))), *proto)


def image(tag: str, png: Sequence[bytes], width: int, height: int) -> bytes:
    """One or more PNGs of the same size, in pixels; TensorBoard shows them all."""
    strings = [str(width).encode(), str(height).encode(), *png]
    head = _tensor_head(types_pb2.DT_STRING, len(strings))
    metadata = _metadata("images", b"", DATA_CLASS_BLOB_SEQUENCE)
    return _tensor(tag, head, _strings(strings), metadata)


def classic_image(tag: str, png: bytes, width: int, height: int) -> bytes:
    """A PNG in the form that torch writes, for readers that know no other."""
    picture = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)
    return bytes(Summary(value=[Summary.Value(tag=tag, image=picture)]).SerializeToString())


def text(tag: str, markdown: str) -> bytes:
    """A text, shown as Markdown. Of two texts with the same tag and step only the last is shown."""
    return tensor(tag, markdown.encode(), "text")


def tensor(tag: str, array: NDArray[Any] | bytes, plugin_name: str, content: bytes = b"") -> bytes:
    """Data of any plugin: an array, or a string of bytes.

    Args:
        tag: Name of the data.
        array: float32, float64, int32, int64 or uint8, any shape; or ``bytes``, which becomes
            a string tensor of shape ``[1]``.
        plugin_name: The plugin that reads it.
        content: The plugin's own metadata; readers keep only that of a tag's first value.

    Raises:
        KeyError: The array's dtype is not one of these.
    """
    metadata = _metadata(plugin_name, content)
    if isinstance(array, bytes):
        return _tensor(tag, _tensor_head(types_pb2.DT_STRING, 1), _strings([array]), metadata)
    return _tensor(tag, _array_head(array.dtype, *array.shape), array.tobytes(), metadata)


def _strings(strings: Iterable[bytes]) -> bytes:
    return b"".join(_delimited(_STRING_VAL, string) for string in strings)


def _tensor(tag: str, head: bytes, elements: bytes, metadata: bytes) -> bytes:
    return _value(tag, _delimiter(_TENSOR, len(head) + len(elements)), head, elements, metadata)


def _value(tag: str, *fields: bytes) -> bytes:
    before = _tag(tag)
    size = len(before) + sum(map(len, fields))
    return b"".join((_delimiter(_SUMMARY_VALUE, size), before, *fields))


# Cached: these recur at every step, and building them takes longer than the rest.


@lru_cache(maxsize=16384)
def _tag(tag: str) -> bytes:
    return _delimited(_TAG, tag.encode()) if tag else b""


@lru_cache(maxsize=16384)
def _before_point(tag: str) -> bytes:
    """A whole value but for the four bytes of its number."""
    before = _tag(tag) + _SIMPLE_VALUE_KEY
    return _delimiter(_SUMMARY_VALUE, len(before) + _SIMPLE_VALUE.size) + before


@lru_cache(maxsize=256)
def _metadata(plugin_name: str, content: bytes = b"", data_class: int = DATA_CLASS_TENSOR) -> bytes:
    plugin_data = SummaryMetadata.PluginData(plugin_name=plugin_name, content=content)
    metadata = SummaryMetadata(plugin_data=plugin_data, data_class=data_class)
    return _delimited(_METADATA, metadata.SerializeToString())


@lru_cache(maxsize=1024)
def _array_head(dtype: np.dtype[Any], *sizes: int) -> bytes:
    """The tensor of an array but for its elements."""
    head, nbytes = _tensor_head(_DTYPES[dtype], *sizes), dtype.itemsize * math.prod(sizes)
    # As in protocol buffers, nothing stands for no bytes.
    return head + _delimiter(_TENSOR_CONTENT, nbytes) if nbytes else head


@lru_cache(maxsize=1024)
def _tensor_head(dtype: int, *sizes: int) -> bytes:
    """A tensor but for its elements."""
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in sizes])
    return bytes(TensorProto(dtype=dtype, tensor_shape=shape).SerializeToString())


_LAST = [bytes([bits]) for bits in range(128)]
_MORE_FOLLOWS = [bytes([bits | 128]) for bits in range(128)]


def _varint(number: int) -> bytes:
    """An integer from 0 to 2^63 - 1, seven bits at a time."""
    if number < 128:
        return _LAST[number]
    return _MORE_FOLLOWS[number & 127] + _varint(number >> 7)


@lru_cache(maxsize=4096)  # the fields of a run have few different lengths
def _delimiter(number: int, length: int) -> bytes:
    """What stands before a field of bytes, text or a message: its number and its length."""
    return _varint(number << 3 | 2) + _varint(length)


def _delimited(number: int, content: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return _delimiter(number, len(content)) + content

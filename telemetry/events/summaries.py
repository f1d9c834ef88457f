"""Values of an event: scalars, histograms, images, texts and plain tensors.

Each is a serialized ``Summary``, which has several values only if it is of :func:`scalars`;
concatenated, they are the summary of all. Every tensor has a data class in its metadata, without
which TensorBoard's fast loader does not show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_BLOB_SEQUENCE,
    DATA_CLASS_TENSOR,
    Summary,
    SummaryMetadata,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

FLOAT32_MAX = float(np.finfo(np.float32).max)
_DTYPES = {
    np.dtype(np.float32): types_pb2.DT_FLOAT,
    np.dtype(np.float64): types_pb2.DT_DOUBLE,
}


def event_of(values: Iterable[bytes], step: int | None, walltime: float) -> bytes:
    """Return a serialized ``Event`` of the values that the functions below return."""
    event = Event(wall_time=walltime, step=0 if step is None else int(step))
    event.summary.MergeFromString(b"".join(values))
    return bytes(event.SerializeToString())


def scalar(tag: str, value: float) -> bytes:
    """Return one point of a curve, in float32 as from ``SummaryWriter.add_scalar``.

    It has no metadata: all readers accept a bare ``simple_value``, which has a third of the size.
    """
    return scalars([(tag, value)])


def scalars(points: Iterable[tuple[str, float]]) -> bytes:
    """Return the points of several curves, by their tags: a summary of as many values."""
    summary = Summary()
    for tag, value in points:
        summary.value.add(tag=tag, simple_value=value)
    return bytes(summary.SerializeToString())


def histograms(tags: Iterable[str], rows: NDArray[Any], ends: Sequence[int]) -> list[bytes]:
    """Return histograms for the Histograms and Distributions dashboards, as ``[buckets, 3]``.

    ``rows`` are left edge, right edge and count of each bucket, one histogram after the other;
    ``ends`` are the ends of each chart's rows. Edges ascend within a histogram, which may have no
    buckets.
    """
    spans = zip(tags, pairwise((0, *ends)), strict=True)
    return [tensor(tag, rows[begin:end], "histograms") for tag, (begin, end) in spans]


def image(tag: str, png: Sequence[bytes], width: int, height: int) -> bytes:
    """Return one or more PNGs of the same size; TensorBoard shows them all."""
    strings = [str(width).encode(), str(height).encode(), *png]
    return _value(
        tag, tensor=_strings(strings), metadata=_metadata("images", DATA_CLASS_BLOB_SEQUENCE)
    )


def text(tag: str, markdown: str) -> bytes:
    """Return a Markdown text. A later text with the same tag and step replaces it."""
    return tensor(tag, markdown.encode(), "text")


def tensor(tag: str, array: NDArray[Any] | bytes, plugin_name: str) -> bytes:
    """Return data of any plugin: float32 or float64 of any shape.

    ``bytes`` become a string tensor of shape ``[1]``.
    """
    data = _strings([array]) if isinstance(array, bytes) else _array(array)
    return _value(tag, tensor=data, metadata=_metadata(plugin_name))


def _value(tag: str, **fields: Any) -> bytes:
    summary = Summary()
    summary.value.add(tag=tag, **fields)
    return bytes(summary.SerializeToString())


def _array(array: NDArray[Any]) -> TensorProto:
    shape, content = _shape(*array.shape), array.tobytes()
    return TensorProto(dtype=_DTYPES[array.dtype], tensor_shape=shape, tensor_content=content)


def _strings(strings: Sequence[bytes]) -> TensorProto:
    shape = _shape(len(strings))
    return TensorProto(dtype=types_pb2.DT_STRING, tensor_shape=shape, string_val=strings)


@lru_cache(maxsize=256)
def _shape(*sizes: int) -> TensorShapeProto:
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in sizes])


@lru_cache(maxsize=256)
def _metadata(plugin_name: str, data_class: int = DATA_CLASS_TENSOR) -> SummaryMetadata:
    plugin_data = SummaryMetadata.PluginData(plugin_name=plugin_name)
    return SummaryMetadata(plugin_data=plugin_data, data_class=data_class)

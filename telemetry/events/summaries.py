"""Builds the values of an event: scalars, histograms, images, texts and plain tensors.

Each is one ``Summary.Value`` that TensorBoard shows with either of its loaders. The fast loader
shows a tensor only when its metadata names a data class, so every tensor here does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_BLOB_SEQUENCE,
    DATA_CLASS_TENSOR,
    Summary,
    SummaryMetadata,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_DTYPES = {
    np.dtype(np.float32): types_pb2.DT_FLOAT,
    np.dtype(np.float64): types_pb2.DT_DOUBLE,
    np.dtype(np.int32): types_pb2.DT_INT32,
    np.dtype(np.int64): types_pb2.DT_INT64,
    np.dtype(np.uint8): types_pb2.DT_UINT8,
}


def scalar(tag: str, value: float) -> Summary.Value:
    """One point of a curve, in float32 as from ``SummaryWriter.add_scalar``.

    It has no metadata: readers take a bare ``simple_value`` for a scalar, which has a third of the
    size and is found by ``EventAccumulator.Scalars``.
    """
    return Summary.Value(tag=tag, simple_value=value)


def histogram(tag: str, left: ArrayLike, right: ArrayLike, counts: ArrayLike) -> Summary.Value:
    """A histogram of ``k`` buckets, for the Histograms and Distributions dashboards.

    Args:
        tag: Name of the chart.
        left: Left edges, shape ``[k]``, ascending.
        right: Right edges, shape ``[k]``.
        counts: Elements per bucket, shape ``[k]``; ``k`` may be 0.

    Returns:
        A tensor of shape ``[k, 3]``, float32 if the counts are exact in it and the edges
        finite, else float64. Readable by ``EventAccumulator.Tensors``.
    """
    wide = np.array([left, right, counts], dtype=np.float64).T
    if len(wide) and not (wide[0, 0] >= -_FLOAT32_MAX and wide[-1, 1] <= _FLOAT32_MAX):
        return tensor(tag, wide, "histograms")
    narrow = wide.astype(np.float32)
    inexact = np.count_nonzero(narrow[:, 2] != wide[:, 2])
    return tensor(tag, wide if inexact else narrow, "histograms")


def image(tag: str, png: Sequence[bytes], width: int, height: int) -> Summary.Value:
    """One or more PNGs of the same size; TensorBoard shows them all.

    Args:
        tag: Name of the card.
        png: The encoded pictures.
        width: Width of each, in pixels.
        height: Height of each, in pixels.
    """
    value = Summary.Value(tag=tag, metadata=_metadata("images", b"", DATA_CLASS_BLOB_SEQUENCE))
    _set_strings(value.tensor, [str(width).encode(), str(height).encode(), *png])
    return value


def text(tag: str, markdown: str) -> Summary.Value:
    """A text, shown as Markdown. Of two texts with the same tag and step only the last is shown."""
    return tensor(tag, markdown.encode(), "text")


def tensor(
    tag: str, array: NDArray[Any] | bytes, plugin_name: str, content: bytes = b""
) -> Summary.Value:
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
    value = Summary.Value(tag=tag, metadata=_metadata(plugin_name, content))
    if isinstance(array, bytes):
        _set_strings(value.tensor, [array])
    else:
        value.tensor.dtype = _DTYPES[array.dtype]
        value.tensor.tensor_shape.CopyFrom(_shape(array.shape))
        value.tensor.tensor_content = array.tobytes()
    return value


# Cached: building these takes longer than the rest of a value, which then copies them.
@lru_cache(maxsize=256)
def _metadata(
    plugin_name: str, content: bytes = b"", data_class: int = DATA_CLASS_TENSOR
) -> SummaryMetadata:
    plugin_data = SummaryMetadata.PluginData(plugin_name=plugin_name, content=content)
    return SummaryMetadata(plugin_data=plugin_data, data_class=data_class)


@lru_cache(maxsize=256)
def _shape(sizes: tuple[int, ...]) -> TensorShapeProto:
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in sizes])


def _set_strings(tensor: TensorProto, strings: Sequence[bytes]) -> None:
    tensor.dtype = types_pb2.DT_STRING
    tensor.tensor_shape.CopyFrom(_shape((len(strings),)))
    tensor.string_val.extend(strings)

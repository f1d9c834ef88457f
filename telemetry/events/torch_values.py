"""The values that torch's ``SummaryWriter`` writes, byte for byte, in a fraction of the time.

What is out of the ordinary is left to torch.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensorboard.compat.proto.summary_pb2 import HistogramProto
from torch.utils.tensorboard import summary
from torch.utils.tensorboard._convert_np import make_np

from telemetry.events import summaries
from telemetry.measure.native import available

if available:
    from telemetry import _native

# A cell is what the float64 numbers with the same upper 16 bits have in common: a sign, an
# exponent and 4 bits of mantissa. Its far end is at most 1/16 above its near one.
_CELL_SHIFT = 48
_CELLS = 1 << 16


def scalar(tag: str, value: Any) -> bytes:
    """What ``add_scalar`` writes: of a number, or an array or tensor with one element."""
    if type(tag) is str:
        if type(value) is float or isinstance(value, (float, int, np.floating)):
            return summaries.scalar(tag, float(value))
        # Other dtypes are left to torch, which rounds bfloat16 to float16, for instance.
        is_usual = type(value) is torch.Tensor and value.dtype == torch.float32
        if is_usual and value.numel() == 1 and not value.is_meta:
            return summaries.scalar(tag, value.item())
    return bytes(summary.scalar(tag, value).SerializeToString())


def raw_histogram(tag: str, figures: HistogramProto, limits: Any, counts: Any) -> bytes | None:
    """What ``add_histogram_raw`` writes of lists of numbers; None if it is left to torch.

    Args:
        tag: Name of the chart.
        figures: The histogram without its buckets.
        limits: Right edges.
        counts: Elements per bucket.
    """
    are_lists = type(limits) is list and type(counts) is list
    if type(tag) is not str or not are_lists or not 0 < len(limits) == len(counts):
        return None
    floats = f"<{len(limits)}d"
    try:
        limits, counts = struct.pack(floats, *limits), struct.pack(floats, *counts)
    except struct.error:  # no numbers
        return None
    return summaries.histogram_proto(tag, figures.SerializeToString(), limits, counts)


class Bins:
    """Bins of histograms; the C extension takes one look into a table and one comparison a value.

    Args:
        edges: Ascending. Positive and negative ones grow by more than 1/16 from one to the next,
            as those of torch do; others are left to torch.
    """

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = np.array([*edges, np.inf])
        cells = np.arange(_CELLS, dtype=np.uint64) << np.uint64(_CELL_SHIFT)
        ends = np.stack([cells, cells | np.uint64((1 << _CELL_SHIFT) - 1)]).view(np.float64)
        # How many edges there are up to each cell's smallest number; all are up to NaN.
        below = self._edges[:-1].searchsorted(ends.min(axis=0), "right")
        up_to = self._edges[:-1].searchsorted(ends.max(axis=0), "right")
        self._tables = below.astype(np.int32).tobytes(), self._edges.tobytes()
        self._fit = bool((up_to - below <= 1).all())

    def histogram(self, tag: str, values: Any) -> bytes | None:
        """What ``add_histogram`` writes of these values; None if that is left to torch.

        Raises:
            NotImplementedError: They are no array, tensor or number.
        """
        found = make_np(values)
        if not self._fit or type(tag) is not str or not found.size or found.dtype.kind not in "fiu":
            return None
        flat = found.astype(np.float64).reshape(-1)
        low, high = np.minimum.reduce(flat), np.maximum.reduce(flat)
        if not (self._edges[0] <= low and high < self._edges[-2]):  # or NaN
            return None
        counts = self._count(flat)
        first, last = counts.nonzero()[0][[0, -1]].tolist()
        figures = HistogramProto(
            min=low, max=high, num=flat.size, sum=np.add.reduce(flat), sum_squares=flat.dot(flat)
        )
        # Readers know right edges alone; that of an empty bucket is where the first one begins.
        shown = counts[first - 1 : last + 1] if first else np.append(0.0, counts[: last + 1])
        limits = self._edges[first : last + 2]
        return summaries.histogram_proto(
            tag, figures.SerializeToString(), limits.tobytes(), shown.tobytes()
        )

    def _count(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        """How many values lie in each bin, shape ``[bins]``; each lies in one."""
        if available:
            found = _native.count_bins(flat.ctypes.data, flat.size, *self._tables)
            return np.frombuffer(found, np.int64)[1:-1].astype(np.float64)
        places = self._edges.searchsorted(flat, "right")
        return np.bincount(places, minlength=len(self._edges) - 1)[1:].astype(np.float64)


@lru_cache(maxsize=4)
def bins_of(edges: tuple[float, ...]) -> Bins:
    """Making them takes milliseconds."""
    return Bins(edges)

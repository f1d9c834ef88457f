"""Large tensors in CPU memory: reduced at once where they lie, piece by piece."""

from __future__ import annotations

from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.measure.moments import FloatArray, RunningMoments, tensor_record, unit_extremes
from telemetry.measure.sampling import Sample
from telemetry.measure.tensors import SERIAL_ELEMENTS, Values, pieces, unit_shape, working
from telemetry.records import TensorRecord

# A piece is read five times: half a megabyte of float32 stays in a core's cache meanwhile. Where
# units are told apart there is more to do for each piece, and larger ones are faster.
PIECE_ELEMENTS = 1 << 17
UNIT_PIECE_ELEMENTS = 1 << 18


class Scratch:
    """Memory for work on one piece, allocated when it is first needed."""

    def __init__(self) -> None:
        self._wide: Tensor | None = None
        self._flags: NDArray[np.bool_] | None = None

    def wide(self, dtype: torch.dtype) -> Tensor:
        """For a piece's values in float32 or float64, 1-D."""
        if self._wide is None:
            self._wide = torch.empty(UNIT_PIECE_ELEMENTS, dtype=torch.float64)
        return self._wide.view(dtype)[:UNIT_PIECE_ELEMENTS]

    def flags(self) -> NDArray[np.bool_]:
        """For a truth value of each of a piece's values, 1-D."""
        if self._flags is None:
            self._flags = np.empty(UNIT_PIECE_ELEMENTS, np.bool_)
        return self._flags


class LargeTensor:
    """RunningMoments and unit extremes of a tensor, and a sample that becomes its histogram later.

    Args:
        values: The tensor, not empty. It is read now and not kept.
        scratch: Free to use until the object is made.
        sample_memory: For the :class:`Sample`; used until :meth:`record`.
    """

    def __init__(self, values: Values, scratch: Scratch, sample_memory: FloatArray) -> None:
        values = values.collapsed()
        tensor, dtype, axis = values.tensor, values.working_dtype, values.unit_axis
        self._moments = RunningMoments()
        self._sample = Sample(tensor.numel(), sample_memory)
        self._unit_axis = axis
        self._units: tuple[FloatArray, FloatArray] | None = None
        if axis is not None:
            unit_count = tensor.shape[axis]
            self._units = np.full(unit_count, inf), np.full(unit_count, -inf)
        if not tensor.is_contiguous():
            for index in pieces(tensor.shape, SERIAL_ELEMENTS):
                piece = working(tensor[index]).contiguous()
                self._add(piece.numpy(), index, scratch.flags())
            return
        array = tensor.numpy() if tensor.dtype is dtype else None
        limit = PIECE_ELEMENTS if axis is None else UNIT_PIECE_ELEMENTS
        for index in pieces(tensor.shape, limit):
            if array is None:
                self._add(_convert(tensor[index], scratch.wide(dtype)), index, scratch.flags())
            else:
                self._add(array[index], index, scratch.flags())

    def _add(self, piece: FloatArray, index: tuple[slice, ...], flags: NDArray[np.bool_]) -> None:
        flat = piece.reshape(-1)
        if self._unit_axis is None or self._units is None:
            low, high = np.minimum.reduce(flat), np.maximum.reduce(flat)
        else:
            lows, highs = unit_extremes(piece.reshape(unit_shape(piece.shape, self._unit_axis)))
            low, high = lows.min(), highs.max()
            unit_min, unit_max = (extreme[index[self._unit_axis]] for extreme in self._units)
            with np.errstate(invalid="ignore"):  # of signaling NaN
                np.minimum(unit_min, lows, out=unit_min)
                np.maximum(unit_max, highs, out=unit_max)
        self._moments.add(flat, float(low), float(high), flags)
        self._sample.add(flat)  # it is in the cache by now

    def record(self) -> TensorRecord:
        """What was in the tensor."""
        buckets, counts = self._sample.histogram(self._moments)
        return tensor_record(self._moments.sketch(buckets, counts), self._units)


def _convert(piece: Tensor, scratch: Tensor) -> FloatArray:
    """A contiguous piece's values in the dtype of ``scratch`` and in its memory."""
    target = scratch[: piece.numel()]
    parts = zip(target.split(SERIAL_ELEMENTS), piece.view(-1).split(SERIAL_ELEMENTS), strict=True)
    for to, source in parts:
        to.copy_(working(source) if source.is_complex() else source)
    converted: FloatArray = target.view(piece.shape).numpy()
    return converted

"""Large tensors in CPU memory: reduced at once where they lie, piece by piece."""

from __future__ import annotations

from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.measure.moments import FloatArray, Moments, tensor_record, unit_extremes
from telemetry.measure.sampling import Sample
from telemetry.measure.tensors import SERIAL_ELEMENTS, Values, pieces, unit_shape, working
from telemetry.records import TensorRecord

# A piece is read five times: half a megabyte of float32 stays in a core's cache meanwhile.
PIECE_ELEMENTS = 1 << 17


class Scratch:
    """Memory for work on one piece, allocated when it is first needed."""

    def __init__(self) -> None:
        self._wide: Tensor | None = None
        self._flags: NDArray[np.bool_] | None = None

    def wide(self, dtype: torch.dtype) -> Tensor:
        """For a piece's values in float32 or float64, 1-D."""
        if self._wide is None:
            self._wide = torch.empty(PIECE_ELEMENTS, dtype=torch.float64)
        return self._wide.view(dtype)[:PIECE_ELEMENTS]

    def flags(self) -> NDArray[np.bool_]:
        """For a truth value of each of a piece's values, 1-D."""
        if self._flags is None:
            self._flags = np.empty(PIECE_ELEMENTS, np.bool_)
        return self._flags


class LargeTensor:
    """Moments and unit extremes of a tensor, and a sample that becomes its histogram later.

    Args:
        values: The tensor, not empty. It is read now and not kept.
        scratch: Free to use until the object is made.
        sample_memory: For the :class:`Sample`; used until :meth:`record`.
    """

    def __init__(self, values: Values, scratch: Scratch, sample_memory: Tensor) -> None:
        values = values.collapsed()
        tensor, dtype = values.tensor, values.working_dtype
        self._moments = Moments()
        self._sample = Sample(tensor.numel(), sample_memory)
        self._units: tuple[FloatArray, FloatArray] | None = None
        if not tensor.is_contiguous():
            for index in pieces(tensor.shape, SERIAL_ELEMENTS):
                piece = working(tensor[index]).contiguous()
                self._sample.add(piece.view(-1))
                self._add(piece.numpy(), values, index, scratch)
            return
        self._sample.add(tensor.view(-1))
        array = tensor.numpy() if tensor.dtype is dtype else None
        for index in pieces(tensor.shape, PIECE_ELEMENTS):
            self._add(
                _convert(tensor[index], scratch.wide(dtype)) if array is None else array[index],
                values,
                index,
                scratch,
            )

    def _add(
        self, piece: FloatArray, values: Values, index: tuple[slice, ...], scratch: Scratch
    ) -> None:
        flat = piece.reshape(-1)
        if values.unit_axis is None:
            low, high = np.minimum.reduce(flat), np.maximum.reduce(flat)
        else:
            extremes = unit_extremes(piece.reshape(unit_shape(piece.shape, values.unit_axis)))
            low, high = extremes[0].min(), extremes[1].max()
            self._add_units(
                extremes, index[values.unit_axis], values.tensor.shape[values.unit_axis]
            )
        self._moments.add(flat, float(low), float(high), scratch.flags())

    def _add_units(
        self, extremes: tuple[FloatArray, FloatArray], units: slice, unit_count: int
    ) -> None:
        lows, highs = extremes
        if self._units is None:
            self._units = (
                np.full(unit_count, inf, lows.dtype),
                np.full(unit_count, -inf, lows.dtype),
            )
        low, high = self._units[0][units], self._units[1][units]
        np.minimum(low, lows, out=low)
        np.maximum(high, highs, out=high)

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

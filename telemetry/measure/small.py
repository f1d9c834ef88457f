"""Small tensors in CPU memory: copied at once, reduced together later on another thread."""

from __future__ import annotations

from math import isfinite

import numpy as np
import torch

from telemetry.measure.moments import FloatArray, tensor_record, unit_extremes
from telemetry.measure.sampling import CODES, codes_of, histogram_of_codes
from telemetry.measure.tensors import SERIAL_ELEMENTS, Values, unit_shape, working
from telemetry.records import TensorRecord
from telemetry.sketch import Sketch, sketch_array

SMALL_ELEMENTS = SERIAL_ELEMENTS
"""Tensors of more elements are not small: they are cheaper to reduce than to copy and reduce."""

BATCH_ELEMENTS = 65_536
"""Memory for tensors to be reduced together; what that needs fits in a core's cache."""


class SmallTensors:
    """Copies of small tensors, one after the other, reduced together.

    Args:
        memory: Where to keep them: 1-D, float32 or float64.
    """

    def __init__(self, memory: FloatArray) -> None:
        self._memory = torch.from_numpy(memory)
        self._starts: list[int] = []
        self._unit_shapes: list[tuple[int, int, int] | None] = []
        self._end = 0
        self._records: list[TensorRecord] | None = None

    def has_room(self, count: int) -> bool:
        """Whether a tensor of ``count`` elements can be added."""
        return self._end + count <= self._memory.numel()

    def add(self, values: Values) -> int:
        """Copy a tensor that is not empty and for which there is room; its number."""
        tensor, start = values.tensor, self._end
        end = start + tensor.numel()
        if tensor.is_contiguous():
            at = self._memory.storage_offset() + start
            target = self._memory.as_strided(tensor.shape, tensor.stride(), at)
        else:
            target = self._memory[start:end].view(tensor.shape)
        target.copy_(working(tensor) if tensor.is_complex() else tensor)
        axis = values.unit_axis
        self._unit_shapes.append(None if axis is None else unit_shape(tensor.shape, axis))
        self._starts.append(start)
        self._end = end
        return len(self._starts) - 1

    def record(self, number: int) -> TensorRecord:
        """What was in a tensor. Reduces them all at the first call; add no more then."""
        if self._records is None:
            self._records = self._reduce()
        return self._records[number]

    def _reduce(self) -> list[TensorRecord]:
        values: FloatArray = self._memory[: self._end].numpy()
        places = list(map(slice, self._starts, [*self._starts[1:], self._end]))
        with np.errstate(over="ignore", invalid="ignore"):
            sketches = _sketches(values, self._starts, places)
        return [
            tensor_record(sketch, shape and unit_extremes(values[place].reshape(shape)))
            for sketch, place, shape in zip(sketches, places, self._unit_shapes, strict=True)
        ]


def _sketches(values: FloatArray, starts: list[int], places: list[slice]) -> list[Sketch]:
    """Sketch of each tensor among ``values``, as :func:`sketch_array` would make it."""
    lows = np.minimum.reduceat(values, starts).tolist()
    highs = np.maximum.reduceat(values, starts).tolist()
    # At most 32,000 each, which int16 can count.
    zeros = np.add.reduceat((values == 0).view(np.int8), starts, dtype=np.int16).tolist()
    wide = values.astype(np.float64)
    sums = np.add.reduceat(wide, starts).tolist()
    squares = np.square(wide)
    sums_squares = np.add.reduceat(squares, starts).tolist()
    sums_cubes = np.add.reduceat(np.multiply(wide, squares, out=wide), starts).tolist()
    sums_fourths = np.add.reduceat(np.square(squares, out=squares), starts).tolist()
    codes = codes_of(values)

    def sketch(i: int, place: slice) -> Sketch:
        if not (isfinite(lows[i]) and isfinite(highs[i])):
            return sketch_array(values[place])
        buckets, counts = histogram_of_codes(np.bincount(codes[place], minlength=CODES), 0, 0)
        return Sketch(
            count=place.stop - place.start,
            zero_count=zeros[i],
            min=lows[i],
            max=highs[i],
            sum=sums[i],
            sum_squares=sums_squares[i],
            sum_cubes=sums_cubes[i],
            sum_fourth_powers=sums_fourths[i],
            buckets=buckets,
            counts=counts,
        )

    return [sketch(i, place) for i, place in enumerate(places)]

"""Measures tensors in CPU memory; the C extension does so in a single read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
from torch import Tensor

from telemetry.measure import native
from telemetry.measure.native import Pending
from telemetry.measure.sampling import sample_step
from telemetry.measure.tensors import SERIAL_ELEMENTS, Values, pieces, unit_shape, working
from telemetry.moments import POWER_SUMS
from telemetry.records import TensorRecord
from telemetry.sketch import Sketch, sketch_array


def measure(values: Values, powers: int) -> Pending:
    """Read a non-empty tensor now. The sums of its first 2 or 4 ``powers`` are known then."""
    request = _request(values, powers)
    if request is None:
        return partial(_same, _in_pieces(values.collapsed(), powers))
    return native.measure(request)


def _request(values: Values, powers: int) -> native.Request | None:
    """For the C extension; None if it cannot read these values."""
    tensor, axis, _ = values
    dtype = native.DTYPES.get(tensor.dtype)
    if dtype is None or not tensor.is_contiguous():
        return None
    count, units, inner = tensor.numel(), 0, 1
    if axis is not None:
        _, units, inner = unit_shape(tensor.shape, axis)
    return tensor.data_ptr(), count, dtype, units, inner, sample_step(count), powers


def _same(record: TensorRecord) -> TensorRecord:
    return record


def _in_pieces(values: Values, powers: int) -> TensorRecord:
    """Measures a copy of each piece of a tensor, in its working dtype."""
    tensor, axis = values.tensor, values.unit_axis
    size = 0 if axis is None else tensor.shape[axis]
    low, high = np.full(size, inf, np.float32), np.full(size, -inf, np.float32)
    sketches = []
    for index in pieces(tensor.shape, SERIAL_ELEMENTS):
        piece = working(tensor[index]).contiguous()
        record = _of_piece(piece, axis, powers)
        sketches.append(record.sketch)
        if axis is not None and record.unit_min is not None and record.unit_max is not None:
            with np.errstate(invalid="ignore"):  # of signaling NaN
                np.minimum(low[index[axis]], record.unit_min, out=low[index[axis]])
                np.maximum(high[index[axis]], record.unit_max, out=high[index[axis]])
    sketch = Sketch.merge_all(sketches)
    unknown: dict[str, Any] = dict.fromkeys(POWER_SUMS[powers:], nan)
    sketch = replace(sketch, **unknown)
    if axis is None:
        return TensorRecord(sketch=sketch)
    return TensorRecord(sketch=sketch, unit_min=low, unit_max=high)


def _of_piece(piece: Tensor, axis: int | None, powers: int) -> TensorRecord:
    if piece.dtype in native.DTYPES:
        return measure(Values(tensor=piece, unit_axis=axis), powers)()
    array = piece.numpy()
    if axis is None:
        return TensorRecord(sketch=sketch_array(array))
    units = array.reshape(unit_shape(array.shape, axis))
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = (extreme((0, 2)).astype(np.float32) for extreme in (units.min, units.max))
    return TensorRecord(sketch=sketch_array(array), unit_min=low, unit_max=high)

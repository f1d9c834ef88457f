"""Measures tensors in CPU memory: by the C extension in a single read, or piece by piece."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.measure.sampling import sample_step
from telemetry.measure.tensors import SERIAL_ELEMENTS, Values, pieces, unit_shape, working
from telemetry.records import TensorRecord
from telemetry.records.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.records.sketch import Sketch, sketch_array

log = logging.getLogger("telemetry")

available = False
"""Whether the extension is installed and not switched off by ``TELEMETRY_NATIVE=0``."""

native = "NumPy, because TELEMETRY_NATIVE is 0"
"""What measures tensors in CPU memory, in words."""

if os.environ.get("TELEMETRY_NATIVE") != "0":
    try:
        from telemetry.measure import _native
    except ImportError as error:
        native = f"NumPy, because the C extension cannot be loaded: {error}"
        log.info(
            "telemetry: the C extension cannot be loaded (%s), so measuring tensors in CPU memory "
            "takes 5 to 80 times as long. Reinstall telemetry with a C compiler, or set "
            "TELEMETRY_NATIVE=0 to silence this message",
            error,
        )
    else:
        available = True
        native = f"C extension {_native.__file__} ({_native.instructions()[-1]})"

_LETTERS = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "bfloat16": "E",
    "float8_e4m3fn": "4",
    "float8_e5m2": "5",
    "float32": "f",
    "float64": "d",
}
# The dtypes that the extension reads; none without the extension.
DTYPES = {getattr(torch, name): ord(letter) for name, letter in _LETTERS.items() if available}

# Tells the extension where a tensor's elements are; None if it cannot be told so.
TENSORS: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if available else None

_TYPES = (torch.Tensor, torch.nn.Parameter)

Pending = Callable[[], TensorRecord]
"""Gives the record of a tensor that was read, on any thread."""

_NUMBERS = struct.Struct("=4q6d")
_NAMES = (*COUNTS[1:], *EXTREMES, *POWER_SUMS)


def measure(values: Values, powers: int) -> Pending:
    """Read a non-empty tensor now. The sums of its first 2 or 4 ``powers`` are known then."""
    tensor, axis, _ = values
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or not tensor.is_contiguous():
        record = _in_pieces(values.collapsed(), powers)
        return lambda: record
    count, units, inner = tensor.numel(), 0, 1
    if axis is not None:
        _, units, inner = unit_shape(tensor.shape, axis)
    request = tensor.data_ptr(), count, dtype, units, inner, sample_step(count), powers
    return partial(record_of, _native.measure(request), request)


def measure_one(tensor: Tensor, unit_axis: int | None, powers: int) -> Pending | None:
    """Read a dense tensor of floats in CPU memory now; None, and nothing done, for any other.

    No operation of PyTorch's is called; only torch-function modes see that something is asked.
    """
    # What stands for the negative of its memory is not as that says.
    if TENSORS is None or type(tensor) not in _TYPES or tensor.is_neg():
        return None
    (found,) = _native.measure_tensors([tensor], unit_axis, _TYPES, TENSORS, sample_step, powers)
    return None if found is None else partial(record_of, *found)


def measure_all(tensors: Sequence[Tensor], powers: int) -> list[Pending | None]:
    """Read many tensors without units in one call; see :func:`measure_one`."""
    if TENSORS is None:
        return [None] * len(tensors)
    plain = [t if type(t) in _TYPES and not t.is_neg() else None for t in tensors]
    found = _native.measure_tensors(plain, None, _TYPES, TENSORS, sample_step, powers)
    return [None if one is None else partial(record_of, *one) for one in found]


def record_of(found: bytearray, request: tuple[int, ...]) -> TensorRecord:
    """Of what the extension has answered to a request, see ``_native.pyi``."""
    _, count, _, units, *_ = request
    numbers = dict(zip(_NAMES, _NUMBERS.unpack_from(found), strict=True))
    filled = (len(found) - _NUMBERS.size - 8 * units) // 10
    units_at = _NUMBERS.size + 8 * filled
    sketch = Sketch(
        count=count,
        **numbers,
        buckets=np.frombuffer(found, np.int16, filled, units_at + 8 * units),
        counts=np.frombuffer(found, np.float64, filled, _NUMBERS.size),
    )
    if not units:
        return TensorRecord(sketch=sketch)
    extremes = np.frombuffer(found, np.float32, 2 * units, units_at)
    return TensorRecord(sketch=sketch, unit_min=extremes[:units], unit_max=extremes[units:])


def squared_norms(tensors: Sequence[Tensor]) -> NDArray[np.float64]:
    """Sum of the squares of each tensor's elements, ``[tensors]``, in one call.

    NaN or infinite if an element is. Allocates only the result, and records nothing for autograd.

    Args:
        tensors: Contiguous or dense, in CPU memory and of one of :data:`DTYPES`.
    """
    addresses, counts, dtypes = [], [], bytearray()
    for tensor in tensors:
        addresses.append(tensor.data_ptr())
        counts.append(tensor.numel())
        dtypes.append(DTYPES[tensor.dtype])
    return np.frombuffer(_native.squared_norms(addresses, counts, bytes(dtypes)), np.float64)


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
    if piece.dtype in DTYPES:
        return measure(Values(tensor=piece, unit_axis=axis), powers)()
    array = piece.numpy()
    if axis is None:
        return TensorRecord(sketch=sketch_array(array))
    units = array.reshape(unit_shape(array.shape, axis))
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = (extreme((0, 2)).astype(np.float32) for extreme in (units.min, units.max))
    return TensorRecord(sketch=sketch_array(array), unit_min=low, unit_max=high)

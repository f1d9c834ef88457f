"""Passes tensors to the C extension, and turns its answers into records."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.kernel import available
from telemetry.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.records import TensorRecord
from telemetry.sketch import Sketch

if available:
    from telemetry import _native

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
DTYPES = {getattr(torch, name): ord(letter) for name, letter in _LETTERS.items() if available}
"""The dtypes that the extension reads; none without the extension."""

_NUMBERS = struct.Struct("=4q6d")
_NAMES = (*COUNTS[1:], *EXTREMES, *POWER_SUMS)


def measure(tensor: Tensor, units: int, inner: int, sample_step: int) -> Callable[[], TensorRecord]:
    """Read a tensor now. Returns a function that gives its record.

    Args:
        tensor: Contiguous, not empty, in CPU memory and of one of :data:`DTYPES`.
        units: How many units its shape ``[outer, units, inner]`` has; 0 for no extremes of units.
        inner: Number of adjacent elements of a unit.
        sample_step: Elements between the starts of two runs of the sample; 0 to count all.
    """
    count = tensor.numel()
    found = _native.measure(
        tensor.data_ptr(), count, DTYPES[tensor.dtype], units, inner, sample_step
    )
    return partial(_record, found, count, units)


def _record(found: bytearray, count: int, units: int) -> TensorRecord:
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
    addresses = [tensor.data_ptr() for tensor in tensors]
    counts = [tensor.numel() for tensor in tensors]
    dtypes = bytes([DTYPES[tensor.dtype] for tensor in tensors])
    return np.frombuffer(_native.squared_norms(addresses, counts, dtypes), np.float64)

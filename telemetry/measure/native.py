"""Passes tensors to the C extension, and turns its answers into records."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.measure.sampling import sample_step
from telemetry.measure.tensors import in_memory_order
from telemetry.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.records import TensorRecord
from telemetry.sketch import Sketch

log = logging.getLogger("telemetry")

available = False
"""Whether ``telemetry._native`` is installed and not switched off by ``TELEMETRY_NATIVE=0``."""

native = "NumPy, because TELEMETRY_NATIVE is 0"
"""What measures tensors in CPU memory, in words."""

if os.environ.get("TELEMETRY_NATIVE") != "0":
    try:
        from telemetry import _native
        from telemetry._native import compare_sample as compare_sample
        from telemetry._native import copy_sample as copy_sample
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
DTYPES = {getattr(torch, name): ord(letter) for name, letter in _LETTERS.items() if available}
"""The dtypes that the extension reads; none without the extension."""

TENSORS: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if available else None
"""Tells the extension where a tensor's elements are; None if it cannot be told so."""

_TYPES = (torch.Tensor, torch.nn.Parameter)

Pending = Callable[[], TensorRecord]
"""Gives the record of a tensor that was read, on any thread."""

_NUMBERS = struct.Struct("=4q6d")
_NAMES = (*COUNTS[1:], *EXTREMES, *POWER_SUMS)


Request = tuple[int, int, int, int, int, int, int]
"""A tensor to measure; it must be held until it is.

It is contiguous, not empty and in CPU memory. The numbers are the address of its first element, how
many elements there are, its dtype (see :data:`DTYPES`); how many units its shape ``[outer, units,
inner]`` has (0 for no extremes of units) and ``inner``; how many elements there are between the
starts of two runs of the sample (0 to count all); and of which powers there are sums: 2 or 4.
"""


def measure(request: Request) -> Pending:
    """Read a tensor now. Returns a function that gives its record."""
    return partial(_record, _native.measure(request), request)


def measure_one(tensor: Tensor, unit_axis: int | None, powers: int) -> Pending | None:
    """Read a dense tensor of floats in CPU memory now; None, and nothing done, for any other.

    No operation of PyTorch's is called; only torch-function modes see that something is asked.
    """
    # What stands for the negative of its memory is not as that says.
    if TENSORS is None or type(tensor) not in _TYPES or tensor.is_neg():
        return None
    (found,) = _native.measure_tensors([tensor], unit_axis, _TYPES, TENSORS, sample_step, powers)
    return None if found is None else partial(_record, *found)


def measure_all(tensors: Sequence[Tensor], powers: int) -> list[Pending | None]:
    """Read many tensors without units in one call; see :func:`measure_one`."""
    if TENSORS is None:
        return [None] * len(tensors)
    plain = [t if type(t) in _TYPES and not t.is_neg() else None for t in tensors]
    found = _native.measure_tensors(plain, None, _TYPES, TENSORS, sample_step, powers)
    return [None if one is None else partial(_record, *one) for one in found]


def _record(found: bytearray, request: Request) -> TensorRecord:
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


def place_of_sample(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """Where the values of a tensor are, or of a :func:`~telemetry.measure.block_sample` of it.

    For :func:`copy_sample` and :func:`compare_sample`. None for what the extension does not read:
    it is on another device, has gaps, or the like.
    """
    if not tensor.is_cpu or tensor.dtype not in DTYPES:
        return None
    tensor = tensor if tensor.is_contiguous() else in_memory_order(tensor, None).tensor
    if not tensor.is_contiguous():
        return None
    count = tensor.numel()
    return tensor.data_ptr(), count, DTYPES[tensor.dtype], sample_step(count)

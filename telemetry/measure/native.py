"""Measures tensors in CPU memory with the C extension, in a single read, or with NumPy."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import nan
from multiprocessing import parent_process
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.measure.tensors import (
    SERIAL_ELEMENTS,
    Values,
    pieces,
    sample_step,
    unit_shape,
    working,
)
from telemetry.records.moments import POWER_SUMS
from telemetry.records.rows import HEAD, NO_VALUES, PAIR, Rows
from telemetry.records.sketch import sketch_array

log = logging.getLogger("telemetry")

available = False
"""Whether the extension is installed and not switched off by ``TELEMETRY_NATIVE=0``."""

native = "NumPy, because TELEMETRY_NATIVE is 0"
"""Description of the code that measures tensors in CPU memory."""

if os.environ.get("TELEMETRY_NATIVE") != "0":
    try:
        # Unlike "from ... import", this distinguishes a missing file from a circular import.
        import telemetry.measure._native as _native
    except ImportError as error:
        was_built = getattr(error, "name", None) != "telemetry.measure._native" or error.path
        reason = str(error) if was_built else "it was not built"
        native = f"NumPy, because the C extension cannot be loaded: {reason}"
        if parent_process() is None:  # else the parent process has logged it
            log.warning(
                "telemetry: the C extension cannot be loaded (%s), so measuring tensors in CPU "
                "memory takes 5 to 80 times as long. Install telemetry again where there is a C "
                "compiler, with pip's option --no-cache-dir (in a checkout: python setup.py "
                "build_ext --inplace), or set TELEMETRY_NATIVE=0 to silence this message",
                reason,
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

# Describes PyTorch's tensors to the extension; None if this PyTorch or the extension cannot.
TENSORS: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if available else None

# The classes whose objects the extension reads.
TYPES = (torch.Tensor, torch.nn.Parameter)


class HostRows:
    """Rows of tensors, in the bytes that :meth:`telemetry.records.rows.Rows.decode` reads.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self.heads, self.pairs, self.units = bytearray(), bytearray(), bytearray()
        self.numbers: list[int] = []  # index of the tensor of each row

    def __len__(self) -> int:
        return len(self.heads) // HEAD.itemsize

    def send(self) -> int:
        """Return the number of bytes; they are on the host already."""
        return len(self.heads) + len(self.pairs) + len(self.units)

    def decode(self) -> Rows:
        return Rows.decode(self.heads, self.pairs, self.units)

    def add(self, values: Values, powers: int) -> None:
        """Read a non-empty tensor in CPU memory now; each piece of one with gaps has a row."""
        tensor, axis, _ = values
        if tensor.dtype in DTYPES and tensor.is_contiguous():
            self._add_contiguous(tensor, axis, powers)
            return
        tensor, axis, _ = values.collapsed()
        for index in pieces(tensor.shape, SERIAL_ELEMENTS):
            piece = _rows_of_piece(working(tensor[index]).contiguous(), axis, powers)
            if axis is not None:  # neutral values for units outside of the piece
                units = np.tile(NO_VALUES, (tensor.shape[axis], 1))
                units[index[axis]] = piece.units
                piece = piece.having(units, unit_count=len(units))
            heads, pairs, extremes = piece.encode()
            self.heads += heads
            self.pairs += pairs
            self.units += extremes

    def add_zeros(self, count: int) -> None:
        """Append a row of zeros, as a sample: the count of a pair has only 32 bits."""
        head = np.zeros(1, HEAD)
        head["count"] = head["zero_count"] = count
        head["min"] = head["max"] = 0.0 if count else nan
        head["bucket_count"] = some = min(count, 1)
        self.heads += head.tobytes()
        self.pairs += np.zeros(some, PAIR).tobytes()

    def _add_contiguous(self, tensor: Tensor, axis: int | None, powers: int) -> None:
        count, units, inner = tensor.numel(), 0, 1
        if axis is not None:
            _, units, inner = unit_shape(tensor.shape, axis)
        dtype, step = DTYPES[tensor.dtype], sample_step(count)
        request = tensor.data_ptr(), count, dtype, units, inner, step, powers
        _native.measure(request, self.heads, self.pairs, self.units)


def rows_of(values: Iterable[tuple[Values, int]]) -> Rows:
    """Return the rows of non-empty tensors in CPU memory, each with its number of powers."""
    host, number = HostRows(), -1
    for number, (tensor, powers) in enumerate(values):
        host.add(tensor, powers)
        host.numbers += [number] * (len(host) - len(host.numbers))
    return host.decode().merged(np.array(host.numbers, np.int64), number + 1).having(calls=1)


def _rows_of_piece(piece: Tensor, axis: int | None, powers: int) -> Rows:
    """One row."""
    if piece.dtype in DTYPES:
        alone = HostRows()
        alone._add_contiguous(piece, axis, powers)
        return alone.decode()
    array, extremes = piece.numpy(), None
    if axis is not None:
        units = array.reshape(unit_shape(array.shape, axis))
        with np.errstate(over="ignore", invalid="ignore"):  # of signaling NaN
            extremes = np.stack([units.min((0, 2)), units.max((0, 2))], axis=1).astype(np.float32)
    sketch = sketch_array(array)
    unknown: dict[str, Any] = dict.fromkeys(POWER_SUMS[powers:], nan)
    return Rows.of([replace(sketch, **unknown)], units=[extremes])


def squared_norms(tensors: Sequence[Tensor]) -> NDArray[np.float64]:
    """Return the sum of the squares of each tensor's elements, ``[tensors]``.

    NaN or infinite if an element is.

    Args:
        tensors: Contiguous or dense, in CPU memory and of one of :data:`DTYPES`.
    """
    addresses, counts, dtypes = [], [], bytearray()
    for tensor in tensors:
        addresses.append(tensor.data_ptr())
        counts.append(tensor.numel())
        dtypes.append(DTYPES[tensor.dtype])
    return np.frombuffer(_native.squared_norms(addresses, counts, bytes(dtypes)), np.float64)

"""Parts of several steps as bytes: a compressed pickle that holds nothing but our own values.

Arrays are what takes room, so they are written byte by byte of all their numbers: first all lowest
bytes, then all second ones. Counts and buckets are small whole numbers, and most of their bytes are
zero, of which compression leaves almost nothing.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.columns import Table
from telemetry.ranks.measured import Addend, Check, Measured, MeasuredParameters, Row
from telemetry.records import Layout, Module, Parameter
from telemetry.records.rows import COLUMNS, Rows

# What the bytes begin with; another version has another number.
FORMAT = b"telemetry-ranks-10\n"

# Of parts that are not compressed. 20,000 modules with four tensors each take about 200 MB.
MAX_BYTES = 1 << 30

_LEVEL = 1  # higher ones take several times as long for a tenth less

# What zlib and pickle raise for bytes that are not theirs.
_DAMAGE = (
    *(zlib.error, pickle.UnpicklingError, ArithmeticError, AttributeError),
    *(EOFError, LookupError, TypeError, ValueError),
)


def _value(cls: type, given: dict[str, Any]) -> Any:
    return cls(**given)


def _array(planes: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    kind = COLUMNS if dtype == "rows" else np.dtype(dtype)
    raw = np.frombuffer(planes, np.uint8).reshape(kind.itemsize, -1).T
    array: NDArray[Any] = np.ascontiguousarray(raw).reshape(-1).view(kind).reshape(shape)
    return array


def _of_value(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return _value, (type(value), {f.name: getattr(value, f.name) for f in fields(value)})


def _of_array(array: NDArray[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    planes = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T
    dtype = "rows" if array.dtype == COLUMNS else array.dtype.str
    return _array, (planes.tobytes(), dtype, array.shape)


_VALUES: tuple[type, ...] = (Measured, MeasuredParameters, Table, Rows, Layout, Module, Parameter)
_RESTORED: tuple[Any, ...] = (*_VALUES, Row, Addend, Check, _value, _array, range)
_KNOWN = {(known.__module__, known.__qualname__): known for known in _RESTORED}
_REDUCED = {np.ndarray: _of_array, **dict.fromkeys(_VALUES, _of_value)}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Nothing but what :func:`encode` writes, for a pickle may name any function to call."""
        return _KNOWN[module, name]


def encode(parts: Sequence[Measured]) -> bytes:
    """Parts as bytes, for :func:`decode`."""
    body = io.BytesIO()
    pickler = pickle.Pickler(body, protocol=5)
    pickler.dispatch_table = _REDUCED
    pickler.dump(tuple(parts))
    return FORMAT + zlib.compress(body.getbuffer(), _LEVEL)


def decode(data: bytes) -> tuple[Measured, ...]:
    """The parts that :func:`encode` made these bytes of.

    Raises:
        ValueError: They are of another version of this package, damaged, or too many.
    """
    if not data.startswith(FORMAT):
        ours, theirs = FORMAT.decode().strip(), data[: len(FORMAT)].split(b"\n")[0]
        raise ValueError(
            f"these measurements are in the format {theirs!r} and not {ours!r}; "
            "install the same version of telemetry on every host"
        )
    unpack = zlib.decompressobj()
    try:
        body = unpack.decompress(data[len(FORMAT) :], MAX_BYTES)
        if not unpack.eof:
            raise ValueError(f"incomplete, or larger than {MAX_BYTES >> 20} MiB")
        parts: tuple[Measured, ...] = _Unpickler(io.BytesIO(body)).load()
        if not all(isinstance(part, Measured) for part in parts):
            raise ValueError("not parts of steps")
    except _DAMAGE as error:
        raise ValueError(f"measurements of another rank are damaged: {error}") from None
    return parts

"""Parts of several steps as bytes: a heading in JSON and columns of numbers, compressed.

The columns are what takes room, so they are written byte by byte of all their numbers:
first all lowest bytes, then all second ones. Counts and buckets are small whole numbers, and most
of their bytes are zero, of which compression leaves almost nothing.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.columns import Table
from telemetry.ranks.measured import Addend, Check, Measured, MeasuredParameters, Row
from telemetry.records import Layout, Module, Parameter
from telemetry.records.rows import COLUMNS, Rows

# What the bytes begin with; another version has another number.
FORMAT = b"telemetry-ranks-9\n"

# Of parts that are not compressed. 20,000 modules with four tensors each take about 200 MB.
MAX_BYTES = 1 << 30

_DATACLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (Measured, MeasuredParameters, Table, Rows, Layout, Module, Parameter)
}
_NAMED_TUPLES: dict[str, Any] = {cls.__name__: cls for cls in (Row, Addend, Check)}
_TUPLE, _SET, _MAPPING, _ARRAY, _RANGE = "()", "{}", "{:}", "[]", ".."

_DTYPES = {name: np.dtype(name) for name in ("<f8", "<f4", "<i8", "<i4", "<i2", "|b1")}
_DTYPES["rows"] = COLUMNS
_LEVEL = 1  # higher ones take several times as long for a tenth less


def encode(parts: Sequence[Measured]) -> bytes:
    """Parts as bytes, for :func:`decode`."""
    columns: list[bytes] = []
    heading = json.dumps(_plain(list(parts), columns), separators=(",", ":")).encode()
    body = len(heading).to_bytes(8, "little") + heading + b"".join(columns)
    return FORMAT + zlib.compress(body, _LEVEL)


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
    try:
        unpack = zlib.decompressobj()
        body = unpack.decompress(data[len(FORMAT) :], MAX_BYTES)
        if not unpack.eof:
            raise ValueError(f"incomplete, or larger than {MAX_BYTES >> 20} MiB")
        size = int.from_bytes(body[:8], "little")
        parts = _restored(json.loads(body[8 : 8 + size]), memoryview(body)[8 + size :])
        if not all(isinstance(part, Measured) for part in parts):
            raise ValueError("not parts of steps")
        return tuple(parts)
    except (zlib.error, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"measurements of another rank are damaged: {error}") from None


def _plain(value: Any, columns: list[bytes]) -> Any:
    """Numbers, names and lists of them; arrays go to ``columns``.

    A list begins with its kind: of a dataclass, the name of the class, and then the fields that do
    not have their default. Named tuples in a tuple are written field by field.
    """
    if isinstance(value, np.ndarray):
        dtype = "rows" if value.dtype == COLUMNS else value.dtype.newbyteorder("<").str
        raw = np.ascontiguousarray(value, _DTYPES[dtype])
        at = sum(map(len, columns))
        columns.append(raw.reshape(-1).view(np.uint8).reshape(-1, raw.itemsize).T.tobytes())
        return [_ARRAY, at, dtype, list(value.shape)]
    if isinstance(value, range):
        return [_RANGE, len(value)]
    if is_dataclass(value):
        given = {f.name: getattr(value, f.name) for f in fields(value)}
        some = {f.name: given[f.name] for f in fields(value) if given[f.name] is not f.default}
        return [type(value).__name__, {n: _plain(v, columns) for n, v in some.items()}]
    if isinstance(value, Mapping):
        kind, items = _MAPPING, [tuple(value), [*value.values()]]
    elif isinstance(value, frozenset):
        kind, items = _SET, sorted(value)
    elif not isinstance(value, tuple | list):
        return value
    elif value and hasattr(value[0], "_fields"):
        kind, items = type(value[0]).__name__, [*zip(*value, strict=True)]
    else:
        kind, items = _TUPLE, [*value]
    return [kind, *(_plain(item, columns) for item in items)]


def _restored(plain: Any, body: memoryview) -> Any:
    """The inverse of :func:`_plain`."""
    if not isinstance(plain, list):
        return plain
    kind, *items = plain
    if kind == _ARRAY:
        return _array(body, *items)
    if kind == _RANGE:
        return range(*items)
    if kind in _DATACLASSES:
        return _DATACLASSES[kind](**{name: _restored(v, body) for name, v in items[0].items()})
    restored = [_restored(o, body) if isinstance(o, list) else o for o in items]
    if kind in _NAMED_TUPLES:
        return tuple(map(_NAMED_TUPLES[kind], *restored))
    if kind == _MAPPING:
        return dict(zip(*restored, strict=True))
    return frozenset(restored) if kind == _SET else tuple(restored)


def _array(body: memoryview, at: int, dtype: str, shape: list[int]) -> NDArray[Any]:
    if dtype not in _DTYPES:
        raise ValueError(f"an array of {dtype!r}")
    kind = _DTYPES[dtype]
    count = math.prod(shape)
    if count < 0 or at < 0 or at + count * kind.itemsize > len(body):
        raise ValueError("an array lies outside of the data")
    planes = np.frombuffer(body, np.uint8, count * kind.itemsize, at)
    raw = np.ascontiguousarray(planes.reshape(kind.itemsize, count).T)
    array: NDArray[Any] = raw.reshape(-1).view(kind).reshape(shape)
    return array

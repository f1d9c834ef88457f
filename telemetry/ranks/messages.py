"""What ranks send to each other, as bytes: pickles that hold nothing but our own values.

Arrays are what takes room, so they are written byte by byte of all their numbers: first all lowest
bytes, then all second ones. Counts and buckets are small whole numbers, and most of their bytes are
zero, of which compression leaves almost nothing.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.columns import Table
from telemetry.ranks.measured import Addend, Check, Measured, MeasuredParameters, Row
from telemetry.records import Layout, Module, Parameter
from telemetry.records.rows import COLUMNS, Rows

T = TypeVar("T")

# What the bytes begin with; another version has another number.
FORMAT = b"telemetry-ranks-12\n"

END = 2**62  # past the place of all that is ever measured
BLOCK_BYTES = 2**20

_LEVEL = 1  # higher ones take several times as long for a tenth less


@dataclass(frozen=True, kw_only=True)
class Message:
    """Something from some of the ranks, on its way to the first."""

    ranks: frozenset[int]  # from whom it is
    places: tuple[int, ...] = ()  # of what it holds; END: there will be nothing else
    held: int | None = None  # the step whose end they will not pass, if they were asked
    payload: bytes = b""  # what they measured, compressed; nothing in a notice

    @staticmethod
    def of(block: Sequence[Measured]) -> Message:
        """What the same ranks measured at several steps."""
        return Message(
            ranks=block[0].ranks,
            places=tuple([part.place for part in block]),
            payload=zlib.compress(encode(tuple(block)), _LEVEL),
        )

    def part(self, n: int) -> Measured:
        """What was measured at one of the places."""
        return self.parts[n]

    @cached_property
    def parts(self) -> tuple[Measured, ...]:
        """What was measured at each of the places; decoded only when it is needed."""
        return decode(tuple, zlib.decompress(self.payload))


@dataclass(frozen=True, kw_only=True)
class News:
    """What the first rank tells all others; each version replaces the former."""

    first_step: int | None = None  # at which the first rank began; None before it has told
    full_step: int = -1  # the latest that is measured in full though the schedule does not name it
    message: str = ""  # what all are about to raise: none passes the end of its step before ...
    raise_at: int | None = None  # ... it knows the step at whose end they do


def blocks(parts: Iterable[Measured]) -> Iterator[list[Measured]]:
    """What travels together: small parts of the same ranks that follow each other."""
    block: list[Measured] = []
    nbytes = 0
    for part in parts:
        nbytes += part.nbytes
        if block and (part.ranks != block[0].ranks or nbytes > BLOCK_BYTES):
            yield block
            block, nbytes = [], part.nbytes
        block.append(part)
    if block:
        yield block


def encode(value: object) -> bytes:
    """One of our values, or a tuple of them, as bytes for :func:`decode`."""
    body = io.BytesIO()
    body.write(FORMAT)
    pickler = pickle.Pickler(body, protocol=5)
    pickler.dispatch_table = _REDUCED
    pickler.dump(value)
    return body.getvalue()


def decode(kind: type[T], data: bytes) -> T:
    """The value of this kind that :func:`encode` made these bytes of.

    Raises:
        ValueError: They are of another version of this package, of another kind, or damaged.
    """
    if not data.startswith(FORMAT):
        ours, theirs = FORMAT.decode().strip(), data[: len(FORMAT)].split(b"\n")[0]
        raise ValueError(
            f"a message of another rank is in the format {theirs!r} and not {ours!r}; "
            "install the same version of telemetry on every host"
        )
    try:
        value = _Unpickler(io.BytesIO(data[len(FORMAT) :])).load()
    except _DAMAGE as error:
        raise ValueError(f"a message of another rank is damaged: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"a message of another rank is damaged: {type(value)} is no {kind}")
    return value


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


_OF_STEPS = (Measured, MeasuredParameters, Table, Rows, Layout, Module, Parameter)
_VALUES: tuple[type, ...] = (Message, News, *_OF_STEPS)
_RESTORED: tuple[Any, ...] = (*_VALUES, Row, Addend, Check, _value, _array, range)
_KNOWN = {(known.__module__, known.__qualname__): known for known in _RESTORED}
_REDUCED = {np.ndarray: _of_array, **dict.fromkeys(_VALUES, _of_value)}

# What pickle raises for bytes that are not its own.
_DAMAGE = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError),
    *(EOFError, LookupError, TypeError, ValueError),
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Nothing but what :func:`encode` writes, for a pickle may name any function to call."""
        return _KNOWN[module, name]

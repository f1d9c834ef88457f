"""Values as bytes: a JSON header and raw arrays behind it, checked before they are used.

The types of the fields say what a header may hold; nothing else is created from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.partial_record import Row
from telemetry.records import Layout
from telemetry.records.rows import COLUMNS
from telemetry.untrusted import flag, integer, number

Array: TypeAlias = NDArray[Any]
Read: TypeAlias = Callable[[Any, "_Arrays"], Any]

# Version of what :func:`encode` writes; ranks with different ones do not exchange records.
FORMAT = "telemetry-ranks-13"

_SIZE_BYTES = 4
# Numbers without a fraction mostly fit into one or two bytes.
_NARROW = tuple(map(np.dtype, ("|u1", "<u2", "<u4", "<f4")))
# Ranks send the same ones again and again: a text inside the header, parsed once.
_REPEATED = (Layout, tuple[Row, ...])
_REPEATED_KEPT = 2048


def encode(value: object) -> bytes:
    """Bytes for :func:`decode`."""
    arrays: list[Array] = []
    header = json.dumps(_plain(value, arrays), separators=(",", ":")).encode()
    raw = [np.ascontiguousarray(array).tobytes() for array in arrays]
    return b"".join([len(header).to_bytes(_SIZE_BYTES, "big"), header, *raw])


def decode(kind: Any, data: bytes) -> Any:
    """The value of this type that :func:`encode` made these bytes of.

    Raises:
        ValueError: The bytes are damaged, or of a value of another type.
    """
    behind = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big")
    arrays = _Arrays(data, behind)
    try:
        value = _reader(kind)(json.loads(data[_SIZE_BYTES:behind]), arrays)
        if arrays.at != len(data):
            raise ValueError("its length is wrong")
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"a message of another rank is damaged: {error}") from None
    return value


class _Arrays:
    """Takes arrays from the bytes behind a header, one after the other."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def take(self, described: Any, dtype: np.dtype[Any]) -> Array:
        """An array of this type, described by the type that its bytes have and its shape."""
        name, *shape = described
        kinds = [dtype, *_NARROW] if dtype.kind in "if" else [dtype]
        kind = next((kind for kind in kinds if _name(kind) == name), None)
        if kind is None or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("an array has another type or shape")
        array: Array = np.frombuffer(self._data, kind, math.prod(shape), self.at).reshape(shape)
        self.at += array.nbytes
        # A small array must not keep all bytes in memory; a large one is not copied.
        return array.astype(dtype, copy=4 * array.nbytes < len(self._data))


def _name(kind: np.dtype[Any]) -> str:
    return "columns" if kind == COLUMNS else kind.str


def _narrow(array: Array) -> Array:
    """The same numbers in the fewest bytes that hold them exactly."""
    if array.dtype.kind in "if" and array.dtype.itemsize == 8:
        with np.errstate(all="ignore"):
            for kind in _NARROW if array.dtype.kind == "f" else _NARROW[:-1]:
                if ((narrow := array.astype(kind)) == array).all():
                    return narrow
    return array


def _plain(value: Any, arrays: list[Array]) -> Any:
    """A value as JSON has it, and its arrays behind the others."""
    if isinstance(value, np.ndarray):
        arrays.append(narrow := _narrow(value))
        return [_name(narrow.dtype), *narrow.shape]
    if isinstance(value, Mapping):
        return [[_plain(key, arrays), _plain(item, arrays)] for key, item in value.items()]
    items: Any = value
    if is_dataclass(value):
        items = [getattr(value, field.name) for field in fields(value)]
    elif not isinstance(value, tuple):
        return value
    plain = [_plain(item, arrays) for item in items]
    repeated = isinstance(value, Layout) or (items and type(items[0]) is Row)
    return json.dumps(plain, separators=(",", ":")) if repeated else plain


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("a list is missing")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("a text is missing")
    return value


_SCALARS: dict[Any, Callable[[Any], Any]] = {int: integer, float: number, bool: flag, str: _text}


@cache
def _reader(hint: Any) -> Read:
    """Checks a value of a header and makes one of this type of it."""
    read = _built(hint)
    if hint not in _REPEATED:
        return read

    @lru_cache(maxsize=_REPEATED_KEPT)
    def parse(value: str) -> Any:
        return read(json.loads(value), _Arrays(b"", 0))

    return lambda value, arrays: parse(_text(value)) if value else ()


def _built(hint: Any) -> Read:
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        check = _SCALARS[hint]
        return lambda value, arrays: check(value)
    if origin in (Union, UnionType):
        read_some = _reader(next(arg for arg in args if arg is not NoneType))
        return lambda value, arrays: None if value is None else read_some(value, arrays)
    if origin is np.ndarray:
        (of,) = get_args(args[1])
        dtype = COLUMNS if of is Any else np.dtype(of)
        return lambda value, arrays: arrays.take(value, dtype)
    if origin is tuple:  # of any length
        read_item = _reader(args[0])
        return lambda value, arrays: tuple([read_item(item, arrays) for item in _list(value)])
    if origin is Mapping:
        read_pair = _row(lambda *pair: pair, args)
        return lambda value, arrays: dict([read_pair(pair, arrays) for pair in _list(value)])
    hints = get_type_hints(hint)  # of a NamedTuple or a dataclass
    names = [field.name for field in fields(hint)] if is_dataclass(hint) else list(hints)
    create: Any = hint
    return _row(
        lambda *items: create(**dict(zip(names, items, strict=True))), [hints[n] for n in names]
    )


def _row(create: Callable[..., Any], hints: Sequence[Any]) -> Read:
    """A list with one item for each of the types."""
    readers = [_reader(hint) for hint in hints]

    def read(value: Any, arrays: _Arrays) -> Any:
        items = zip(readers, _list(value), strict=True)
        return create(*[read_item(item, arrays) for read_item, item in items])

    return read

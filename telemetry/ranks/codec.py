"""Codec of messages between ranks: a JSON header, and raw arrays behind it.

The header is checked against the types of a class's fields; nothing else is created from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from types import UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.partial_record import Row
from telemetry.records import Layout
from telemetry.records.batches import BatchId
from telemetry.records.rows import COLUMNS

Reader: TypeAlias = Callable[[Any, "_Arrays"], Any]

# Version of the messages; ranks with different ones do not connect.
FORMAT = "18"

_SIZE_BYTES = 4
_SCALARS: dict[Any, tuple[type, ...]] = {
    int: (int,), float: (int, float), bool: (bool,), str: (str,),
}  # fmt: skip
# Ranks send the same ones again and again: a text inside the header, parsed once.
_REPEATED = (Layout, tuple[Row, ...])
_REPEATED_KEPT = 2048


def encode(value: object) -> bytes:
    """Return bytes for :func:`decode`."""
    raw: list[bytes] = []
    header = _dumps(_plain(value, raw)).encode()
    return b"".join([len(header).to_bytes(_SIZE_BYTES, "big"), header, *raw])


def decode(kind: Any, data: bytes) -> Any:
    """Return the value of this type that :func:`encode` made these bytes of.

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
    """Reads arrays from the bytes behind a header, one after the other."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def read(self, described: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        name, *shape = described
        if name != dtype.str or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("an array has another type or shape")
        array = np.frombuffer(self._data, dtype, math.prod(shape), self.at).reshape(shape)
        self.at += array.nbytes
        # A small array must not keep all bytes in memory; a large one is not copied.
        return array.copy() if 4 * array.nbytes < len(self._data) else array


def _dumps(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"))


def _plain(value: Any, raw: list[bytes]) -> Any:
    """Return a value for JSON; append the bytes of its arrays to ``raw``."""
    if isinstance(value, np.ndarray):
        raw.append(value.tobytes())
        return [value.dtype.str, *value.shape]
    if isinstance(value, Mapping):
        return [[_plain(key, raw), _plain(item, raw)] for key, item in value.items()]
    items: Any = value
    if is_dataclass(value):
        items = [getattr(value, field.name) for field in fields(value)]
    elif not isinstance(value, tuple):
        return value
    plain = [_plain(item, raw) for item in items]
    is_repeated = isinstance(value, Layout) or (items and type(items[0]) is Row)
    return _dumps(plain) if is_repeated else plain


def _checked(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise ValueError(f"{types[0].__name__} is missing")
    return value


@cache
def _reader(hint: Any) -> Reader:
    """Return a function that checks a header's value and makes a value of this type of it."""
    if hint not in _REPEATED:
        return _plain_reader(hint)
    read = _plain_reader(hint)
    parse = lru_cache(_REPEATED_KEPT)(lambda text: read(json.loads(text), _Arrays(b"", 0)))
    return lambda value, arrays: parse(_checked(value, str))


def _plain_reader(hint: Any) -> Reader:
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return lambda value, arrays: hint(_checked(value, *_SCALARS[hint]))
    if hint == BatchId:
        return lambda value, arrays: _checked(value, int, str)
    if origin in (Union, UnionType):  # with None
        read_some = _reader(args[0])
        return lambda value, arrays: None if value is None else read_some(value, arrays)
    if origin is np.ndarray:
        (of,) = get_args(args[1])
        dtype = COLUMNS if of is Any else np.dtype(of)
        return lambda value, arrays: arrays.read(_checked(value, list), dtype)
    if origin is tuple:  # of any length
        read_item = _reader(args[0])
        return lambda value, arrays: tuple([read_item(o, arrays) for o in _checked(value, list)])
    if origin is Mapping:
        read_pair = _list_reader(args)
        return lambda value, arrays: dict([read_pair(o, arrays) for o in _checked(value, list)])
    hints = get_type_hints(hint)  # of a NamedTuple or a dataclass
    read_fields = _list_reader(hints.values())
    return lambda value, arrays: hint(**dict(zip(hints, read_fields(value, arrays), strict=True)))


def _list_reader(hints: Iterable[Any]) -> Reader:
    """Return a function that reads a list with one item of each type."""
    readers = [_reader(hint) for hint in hints]

    def read(value: Any, arrays: _Arrays) -> list[Any]:
        items = zip(readers, _checked(value, list), strict=True)
        return [read_item(item, arrays) for read_item, item in items]

    return read

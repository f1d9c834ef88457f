"""Validate files and JSON texts from untrusted sources.

:func:`check_of` makes a function that returns a JSON value as a type, or raises
:class:`ValueError` with the path and what is expected there::

    check_of({"step": int, "loss": [float | None], "alerts": [Alert]})(json_value)

Strings are not changed and may hold control characters and lone surrogates; use
:func:`telemetry.plain_text.printable` to show them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import FunctionType
from typing import (
    Annotated,
    Any,
    BinaryIO,
    Literal,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

Check: TypeAlias = Callable[[Any], Any]

# Python's objects take up to twenty times the size of their text, so this stays below 1 GB. A
# layout of 20,000 modules has 2 MB, and so has a large flight file.
MAX_JSON_BYTES = 32 << 20

# JavaScript represents every integer up to here exactly.
MAX_INTEGER = 2**53

# Characters of a name; a request URL can still hold such a name.
MAX_NAME = 10_000

# Characters of a message for people; longer ones are truncated.
MAX_TEXT = 8000

_NOT_FINITE = {"nan", "inf", "-inf"}
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file or a link to one; OSError: another one, which may block or be endless."""
    _require_regular(path, os.stat(path))
    # The file may have become a pipe; opening it must not block until there is a writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AT_ONCE))  # noqa: SIM115
    try:
        _require_regular(path, os.fstat(file.fileno()))
    except OSError:
        file.close()
        raise
    return file


def _require_regular(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def parse_json(text: bytes) -> Any:
    """Parse a JSON text; raise ValueError if it is none, too large, or nested too deeply."""
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not a text") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


# --- single values -----------------------------------------------------------------------------


def _that_fits(what: str, fits: Callable[[Any], bool]) -> Check:
    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"must be {what}")
        return value

    return check


def _number(value: Any) -> float:
    if type(value) in (int, float) or (type(value) is str and value in _NOT_FINITE):
        with suppress(OverflowError):  # an integer may be larger than any float
            return float(value)
    raise ValueError("must be a number")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("must be a text")
    return value[:MAX_TEXT]


_SIMPLE: dict[Any, Check] = {
    int: _that_fits(
        "an integer from 0 to 2**53", lambda n: type(n) is int and 0 <= n <= MAX_INTEGER
    ),
    float: _number,
    bool: _that_fits("true or false", lambda flag: type(flag) is bool),
    str: _text,
    int | str: lambda value: value if type(value) is int else _text(value),
}

# Seed of torch: signed or unsigned 64 bits.
seed = _that_fits("an integer of 64 bits", lambda n: type(n) is int and -(2**63) <= n < 2**64)

# Name of a module, a parameter or a class, which is not truncated.
name = _that_fits(
    f"a name of at most {MAX_NAME} characters", lambda n: type(n) is str and len(n) <= MAX_NAME
)


# --- lists and objects -------------------------------------------------------------------------


@dataclass(frozen=True)
class Most:
    """List of at most ``count`` items of a kind."""

    count: int
    kind: Any


def check_of(kind: Any) -> Check:
    """Return a function that checks a JSON value and returns it as a kind.

    ==========================  ================================================================
    ``int``, ``float``          a step, size or index; a number, ``"nan"``, ``"inf"``, ``"-inf"``
    ``str``, ``int | str``      a text, which is truncated if it is long; an id
    ``X | None``                null, or an X
    a ``Literal``               one of its texts; the first for any other text
    a dataclass                 an object with a value for each field without a default
    a NamedTuple                a list of its fields
    ``NDArray[X]``              an array of this type
    ``Mapping[str, X]``         an object whose values are each an X
    ``Annotated[X, function]``  the value that the function returns
    ``{"name": X}``             an object with these fields; other fields are dropped
    ``[X]``, ``Most(n, X)``     a list of X; at most n
    ``tuple[X, ...]``           the same, as a tuple
    ``(X, Y)``                  a list of an X and a Y
    a function                  the value that it returns, or a ValueError
    ==========================  ================================================================
    """
    origin, args = get_origin(kind), get_args(kind)
    if isinstance(kind, dict):
        return _object(kind, kind)
    if is_dataclass(kind) and isinstance(kind, type):
        required = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
        check = _object(get_type_hints(kind, include_extras=True), required)
        return lambda value: kind(**check(value))
    if isinstance(kind, list):
        return _list(*kind)
    if isinstance(kind, Most):
        return _list(kind.kind, kind.count)
    if isinstance(kind, tuple):
        return _fixed_list(kind)
    if isinstance(kind, FunctionType):
        return kind
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if origin is Literal:
        return lambda value: value if _text(value) in args else args[0]
    if origin is tuple:
        check_items = _list(args[0])
        return lambda value: tuple(check_items(value))
    if origin is Annotated:
        return args[1]  # type: ignore[no-any-return]
    if origin is np.ndarray:
        (dtype,) = get_args(args[1])
        return _that_fits(
            f"an array of {dtype}",
            lambda value: isinstance(value, np.ndarray) and dtype in (Any, value.dtype.type),
        )
    if origin is Mapping:
        check_item = check_of(args[1])
        return lambda value: {
            key: _at(f".{key}", check_item, item) for key, item in _is_object(value).items()
        }
    if origin is None:
        check_fields = _fixed_list([*get_type_hints(kind).values()])
        return lambda value: kind(*check_fields(value))
    return optional(args[0])  # a union


def optional(kind: Any) -> Check:
    check = check_of(kind)
    return lambda value: None if value is None else check(value)


def _list(kind: Any, most: float = math.inf) -> Check:
    check = check_of(kind)

    def check_all(value: Any) -> list[Any]:
        if type(value) is not list or len(value) > most:
            raise ValueError("must be a list" + f" of at most {most} items" * (most < math.inf))
        return [_at(f"[{i}]", check, item) for i, item in enumerate(value)]

    return check_all


def _fixed_list(kinds: Sequence[Any]) -> Check:
    checks = [check_of(kind) for kind in kinds]

    def check_each(value: Any) -> list[Any]:
        if type(value) is not list or len(value) != len(checks):
            raise ValueError(f"must be a list of {len(checks)} items")
        return [_at(f"[{i}]", checks[i], item) for i, item in enumerate(value)]

    return check_each


def _is_object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError("must be an object")
    return value


def _object(kinds: dict[str, Any], required: Collection[str]) -> Check:
    checks = {key: check_of(kind) for key, kind in kinds.items()}

    def check_fields(value: Any) -> dict[str, Any]:
        value = _is_object(value)
        if missing := [key for key in required if key not in value]:
            raise ValueError(f"{missing[0]} is missing")
        found = [key for key in checks if key in value]
        return {key: _at(f".{key}", checks[key], value[key]) for key in found}

    return check_fields


def _at(path: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        below, problem = error.args if isinstance(error, _InvalidValueError) else ("", str(error))
        raise _InvalidValueError(path + below, problem) from None


class _InvalidValueError(ValueError):
    """Path in the value, and the problem there: ``steps.loss[3]: must be a number``."""

    def __str__(self) -> str:
        path, problem = self.args
        return f"{path.removeprefix('.')}: {problem}"

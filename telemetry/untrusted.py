"""Checks files and JSON texts that somebody else may have made.

A check takes a value of any type and returns it, or raises :class:`ValueError` with the place and
what is expected there. Checks of single values combine to checks of lists and objects::

    fields(step=whole, names=listed(name))(json_value)

Texts are not changed and may hold control characters and lone surrogates; use
:func:`telemetry.plain_text.printable` to show them.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

Checked = TypeVar("Checked")
Check = Callable[[Any], Checked]

# Python's objects take up to twenty times the size of their text, so this stays below 1 GB. A
# layout of 20,000 modules has 2 MB, and so has a large flight file.
MAX_JSON_BYTES = 32 << 20

# Largest whole number that JavaScript holds exactly.
MAX_WHOLE = 2**53

# Characters of a name; a link with such a name still fits into a request.
MAX_NAME = 10_000

# Characters of a message for people; longer ones are cut off.
MAX_TEXT = 8000

_NOT_FINITE = {"nan", "inf", "-inf"}
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading.

    Other files may be endless (``/dev/zero``), block forever (a pipe), or have side effects.

    Raises:
        OSError: It is not a regular file, or cannot be opened.
    """
    _require_regular(path, os.stat(path))
    # If it becomes a pipe at this moment, opening still does not wait for a writer.
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
    """The value of a JSON text.

    Raises:
        ValueError: It is not JSON, too large, or nested too deeply for Python.
    """
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not a text") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


# --- single values -----------------------------------------------------------------------------


def whole(value: Any) -> int:
    """A step, a size or an index: 0 or more."""
    if type(value) is not int or not 0 <= value <= MAX_WHOLE:
        raise ValueError("must be a whole number from 0 to 2**53")
    return value


def integer(value: Any) -> int:
    """Any number that torch accepts as a seed."""
    if type(value) is not int or not -(2**63) <= value < 2**64:
        raise ValueError("must be a whole number of 64 bits")
    return value


def number(value: Any) -> float:
    """A number, or the name of one that JSON lacks, such as ``"nan"`` or ``"-inf"``."""
    if type(value) in (int, float) or (type(value) is str and value in _NOT_FINITE):
        with suppress(OverflowError):  # an integer may be larger than any float
            return float(value)
    raise ValueError("must be a number")


def flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def name(value: Any) -> str:
    """The name of a module, a parameter or a class."""
    if type(value) is not str or len(value) > MAX_NAME:
        raise ValueError(f"must be a name of at most {MAX_NAME} characters")
    return value


def text(value: Any) -> str:
    """A text for people; a long one is cut off."""
    if type(value) is not str:
        raise ValueError("must be a text")
    return value[:MAX_TEXT]


# --- lists and objects -------------------------------------------------------------------------


def optional(check: Check[Checked]) -> Check[Checked | None]:
    """A value that passes the check, or null."""
    return lambda value: None if value is None else check(value)


def listed(check: Check[Checked], *, most: int | None = None) -> Check[list[Checked]]:
    """A list of at most ``most`` values that pass the check."""

    def check_all(value: Any) -> list[Checked]:
        if type(value) is not list:
            raise ValueError("must be a list")
        if most is not None and len(value) > most:
            raise ValueError(f"must have at most {most} items, not {len(value)}")
        return [_at(f"[{place}]", check, item) for place, item in enumerate(value)]

    return check_all


def row(*checks: Check[Any]) -> Check[list[Any]]:
    """A list with one item for each check."""

    def check_row(value: Any) -> list[Any]:
        if type(value) is not list or len(value) != len(checks):
            raise ValueError(f"must be a list of {len(checks)} items")
        return [_at(f"[{i}]", checks[i], item) for i, item in enumerate(value)]

    return check_row


def fields(**checks: Check[Any]) -> Check[dict[str, Any]]:
    """An object with these fields; other fields are dropped."""

    def check_fields(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise ValueError("must be an object")
        missing = [key for key in checks if key not in value]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        return {key: _at(f".{key}", check, value[key]) for key, check in checks.items()}

    return check_fields


def _at(place: str, check: Check[Checked], value: Any) -> Checked:
    try:
        return check(value)
    except ValueError as error:
        below, problem = error.args if isinstance(error, _MisplacedError) else ("", str(error))
        raise _MisplacedError(place + below, problem) from None


class _MisplacedError(ValueError):
    """A place in the value, and the problem there: ``steps.loss[3]: must be a number``."""

    def __str__(self) -> str:
        place, problem = self.args
        return f"{place.removeprefix('.')}: {problem}"

"""Validate files and JSON texts from untrusted sources.

A check takes a value of any type and returns it, or raises :class:`ValueError` with the path and
the expected type. Checks of single values combine to checks of lists and objects::

    fields(step=non_negative_int, names=list_of(name))(json_value)

Strings are not changed and may hold control characters and lone surrogates; use
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

# JavaScript represents every integer up to here exactly.
MAX_INTEGER = 2**53

# Characters of a name; a request URL can still hold such a name.
MAX_NAME = 10_000

# Characters of a message for people; longer ones are truncated.
MAX_TEXT = 8000

_NOT_FINITE = {"nan", "inf", "-inf"}
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Other files may be endless (``/dev/zero``), block forever (a pipe), or have side effects.

    Raises:
        OSError: It is not a regular file, or cannot be opened.
    """
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
    """Parse a JSON text.

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


def non_negative_int(value: Any) -> int:
    """Check a step, a size or an index."""
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise ValueError("must be an integer from 0 to 2**53")
    return value


def integer(value: Any) -> int:
    """Check a seed of torch: signed or unsigned 64 bits."""
    if type(value) is not int or not -(2**63) <= value < 2**64:
        raise ValueError("must be an integer of 64 bits")
    return value


def number(value: Any) -> float:
    """Check a number, or ``"nan"``, ``"inf"`` or ``"-inf"``, which JSON has no numbers for."""
    if type(value) in (int, float) or (type(value) is str and value in _NOT_FINITE):
        with suppress(OverflowError):  # an integer may be larger than any float
            return float(value)
    raise ValueError("must be a number")


def flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def name(value: Any) -> str:
    """Check the name of a module, a parameter or a class."""
    if type(value) is not str or len(value) > MAX_NAME:
        raise ValueError(f"must be a name of at most {MAX_NAME} characters")
    return value


def text(value: Any) -> str:
    """Check a text for people; a long one is truncated."""
    if type(value) is not str:
        raise ValueError("must be a text")
    return value[:MAX_TEXT]


def text_or_int(value: Any) -> str | int:
    """Check an id; a long text is truncated."""
    return value if type(value) is int else text(value)


# --- lists and objects -------------------------------------------------------------------------


def optional(check: Check[Checked]) -> Check[Checked | None]:
    """Accept null and any value that passes the check."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check[Checked], *, most: int | None = None) -> Check[list[Checked]]:
    """Check a list of at most ``most`` items."""

    def check_all(value: Any) -> list[Checked]:
        if type(value) is not list:
            raise ValueError("must be a list")
        if most is not None and len(value) > most:
            raise ValueError(f"must have at most {most} items, not {len(value)}")
        return [_at(f"[{i}]", check, item) for i, item in enumerate(value)]

    return check_all


def fixed_array(*checks: Check[Any]) -> Check[list[Any]]:
    """Check a list with one item per check."""

    def check_array(value: Any) -> list[Any]:
        if type(value) is not list or len(value) != len(checks):
            raise ValueError(f"must be a list of {len(checks)} items")
        return [_at(f"[{i}]", checks[i], item) for i, item in enumerate(value)]

    return check_array


def fields(**checks: Check[Any]) -> Check[dict[str, Any]]:
    """Check an object with these fields; other fields are dropped."""

    def check_fields(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise ValueError("must be an object")
        missing = [key for key in checks if key not in value]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        return {key: _at(f".{key}", check, value[key]) for key, check in checks.items()}

    return check_fields


def _at(path: str, check: Check[Checked], value: Any) -> Checked:
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

"""Safe text for logs, terminals and tags: a module may be called ``"fc\\nERROR all is lost"``."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCKS = "▁▂▃▄▅▆▇█"


def printable(text: str) -> str:
    r"""Escape unprintable characters, as ``\n``, ``\x1b`` or ``\ud800``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Escape text line by line; later lines are indented, so they belong to the same message."""
    return "\n  ".join(map(printable, text.split("\n")))


def called(module_name: str) -> str:
    """Return a module's name for messages; ``named_modules()`` has no name for the model."""
    name = f"module {module_name}" if module_name.isdecimal() else module_name
    return printable(name) or "the model"


def called_owner(module_name: str) -> str:
    """Return the name of a module that owns parameters for messages about these."""
    return called(module_name) if module_name else "the model's own parameters"


def called_all(module_names: Sequence[str], most: int) -> str:
    """Return at most ``most`` names of modules for messages, and the number of others."""
    return listed([*map(called, module_names)], most)


def listed(names: Sequence[str], most: int) -> str:
    """Return at most ``most`` of the names, escaped, and the number of others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more


def closest(name: object, known: Iterable[str]) -> str:
    """Return the known names that resemble a name, or some of all, as the end of a sentence."""
    known = [*known]
    close = get_close_matches(str(name), known, n=3, cutoff=0.5)
    return f"{'the closest' if close else 'there'} are {listed(close or known, 10) or 'none'}"


def figure(value: float, digits: int = 3) -> str:
    """Return a number as people write it: ``0.0021``, ``3,700``, ``2e27``."""
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    if 1 <= abs(value) < 1e6:
        return f"{float(text):,.0f}"
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}"


def type_of(value: object) -> str:
    """Return the name of a value's type for messages."""
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"the class {name}" if kind is value else name


def steps_in_words(count: int) -> str:
    """Return ``one step``, or ``12 steps``."""
    return "one step" if count == 1 else f"{count} steps"


def ranks_in_words(ranks: Collection[int]) -> str:
    """Return ranks for a message: ``rank 7``, ``ranks 0-3,7``."""
    runs = []
    for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {','.join(runs)}"


def natural_key(text: str) -> list[str | int]:
    """Return a sort key that puts ``run10`` behind ``run9``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def json_plain(value: Any) -> Any:
    """Return a value for JSON, with NaN and infinities as texts that ``float`` reads."""
    if is_dataclass(value):
        return {field.name: json_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: json_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Return a table of names and values for notebooks; values may have several lines."""
    left = 'style="text-align:left;white-space:pre-line"'
    cells = "".join(
        f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"


def check_text(what: str, text: object) -> None:
    """Raise TypeError or ValueError if it is not a text that UTF-8 can encode, about ``what``."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{what} must have bytes in UTF-8, and half of a surrogate pair has none; "
            "text.encode(errors='replace').decode() makes it a question mark"
        ) from None


def sparkline(values: Sequence[float] | NDArray[np.float64], *, width: int, log: bool) -> str:
    """Draw a curve as at most ``width`` block characters, each the largest of several values.

    There must be at least one value. ``!`` is a value that is not finite. With ``log``, heights are
    logarithmic, no value may be negative, and a zero is blank.
    """
    array = np.asarray(values, dtype=np.float64)
    pieces = np.array_split(array, min(width, array.size))
    largest = np.array([piece.max() for piece in pieces])
    with np.errstate(divide="ignore", invalid="ignore"):
        heights = np.log10(largest) if log else largest
    drawable = heights[np.isfinite(heights)] / 2  # halved, so that the span is finite
    low, span = (drawable.min(), np.ptp(drawable)) if drawable.size else (0.0, 0.0)
    return "".join(
        " " if log and value == 0 else _block(height, float(low), float(span))
        for value, height in zip(largest, heights, strict=True)
    )


def _block(height: float, low: float, span: float) -> str:
    if not np.isfinite(height):
        return "!"
    return _BLOCKS[int((height / 2 - low) / span * (len(_BLOCKS) - 1) + 0.5) if span else 0]

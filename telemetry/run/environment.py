"""Environment variables that set arguments of ``HookLogger`` for one run.

An argument given in the code has precedence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any


def _interval(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _share(text: str) -> float:
    share = float(text)
    if not (0 < share <= 1 or share == float("inf")):
        raise ValueError
    return share


def _reaction(text: str) -> str:
    if text not in ("raise", "stop"):
        raise ValueError
    return text


def _switch(text: str) -> bool:
    switches = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
    try:
        return switches[text.lower()]
    except KeyError:
        raise ValueError from None


# What reads each variable, and its valid values.
_VARIABLES: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "TELEMETRY_DISABLED": (_switch, "0 or 1"),
    "TELEMETRY_EVERY_N_STEPS": (_interval, "an int of at least 1"),
    "TELEMETRY_LOG_DIR": (str, "a directory or URL"),
    "TELEMETRY_LOSS_TAG": (str, "the tag of a logged scalar"),
    "TELEMETRY_MAX_OVERHEAD": (_share, "a number above 0 and at most 1, or inf"),
    "TELEMETRY_ON_ALERT": (_reaction, "raise or stop"),
}


def setting(argument: str, given: Any = None, default: Any = None) -> Any:
    """Return an argument: as given, else as its environment variable has it, else the default.

    Raises:
        ValueError: The value of the variable is invalid; the message names it.
    """
    if given is not None:
        return given
    variable = f"TELEMETRY_{argument.upper()}"
    read, valid = _VARIABLES[variable]
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        return read(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r}: must be {valid}") from None

"""Checks that a flight file holds what :mod:`telemetry.flight.document` describes."""

from __future__ import annotations

import os
from typing import Any, get_args

from telemetry import untrusted
from telemetry.alert import parse_alert
from telemetry.flight.document import COLUMNS, MAX_ALERTS, MAX_MODULES, When
from telemetry.flight.file import read_flight

_VALUE = untrusted.optional(untrusted.number)
_MEASURED = untrusted.listed(_VALUE)
_NAMES = untrusted.listed(untrusted.name, most=MAX_MODULES)
_FIELDS = untrusted.fields(
    complete=untrusted.flag,
    step=untrusted.whole,
    batch=untrusted.whole,
    first_bad_module=untrusted.optional(untrusted.name),
    alerts=untrusted.listed(parse_alert, most=MAX_ALERTS),
    exception=untrusted.optional(
        untrusted.fields(type=untrusted.name, message=untrusted.text, traceback=untrusted.text)
    ),
    random=untrusted.fields(
        seed=untrusted.optional(untrusted.integer), step=untrusted.optional(untrusted.whole)
    ),
    steps=untrusted.fields(
        step=untrusted.listed(untrusted.whole),
        loss=_MEASURED,
        grad_norm=_MEASURED,
        learning_rates=untrusted.listed(_MEASURED),
    ),
    modules=untrusted.fields(name=_NAMES, type=_NAMES, left_out=untrusted.whole),
    grad_norms=untrusted.listed(untrusted.listed(_VALUE, most=MAX_MODULES)),
    profiles=untrusted.listed(lambda content: _profile(content), most=len(get_args(When))),
)
_PROFILE = untrusted.fields(
    when=untrusted.name, step=untrusted.whole, **dict.fromkeys(COLUMNS, _MEASURED)
)


def _profile(content: Any) -> dict[str, Any]:
    """A profile; statistics that another version of telemetry did not have are empty lists."""
    defaults: dict[str, list[float]] = {column: [] for column in COLUMNS}
    return _PROFILE({**defaults, **content} if type(content) is dict else content)


def read_checked(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a flight file that :mod:`telemetry.flight.explaining` uses.

    Returns:
        The fields, with each alert as an :class:`~telemetry.alert.Alert`, and numbers as floats.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a flight file, or a field is missing or has a wrong value; the message
            names it.
    """
    contents = read_flight(path)
    try:
        return _check(contents)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _check(contents: Any) -> dict[str, Any]:
    known: dict[str, Any] = _FIELDS(contents)
    modules, steps = known["modules"], known["steps"]
    if len(modules["name"]) != len(modules["type"]):
        raise ValueError("modules: has not as many names as types")
    if len(set(map(len, steps.values()))) > 1:
        raise ValueError("steps: the lists differ in length")
    if [*map(len, known["grad_norms"])] != [len(modules["name"])] * len(steps["step"]):
        raise ValueError("grad_norms: does not fit the steps and modules")
    for profile in known["profiles"]:
        for column in COLUMNS:
            profile[column] = profile[column] or [None] * len(modules["name"])
            if len(profile[column]) != len(modules["name"]):
                raise ValueError("profiles: a list is not as long as the list of modules")
    return known

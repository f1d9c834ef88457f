"""Report of a flight file for a terminal: text and small plots."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from telemetry.flight.file import earliest_onsets, flight_files, read_flight
from telemetry.layers.onset import Onset
from telemetry.plain_text import called, printable, sparkline

# Four times the files of one run.
MAX_FILES = 32
MAX_ROWS = 30
MAX_POINTS = 60

NO_FLIGHT = "has no flight file: no alert of severity error, no loss spike and no exception"

_NAME_WIDTH = 24
_CELL_WIDTH = 7  # "1.2e-05"
_AROUND = 60  # characters around a curve
_ANY_WIDTH = 1 << 20
_MANY_DEAD = 0.5
_SHOWN = {"activation_rms": "output rms", "grad_norm": "gradient norm", "update_ratio": "update"}


class Explanation(NamedTuple):
    """Report of flight files, and the kinds of alerts in it."""

    text: str
    kinds: tuple[str, ...] = ()


def explanation_of(path_or_run: str | os.PathLike[str], width: int = _ANY_WIDTH) -> Explanation:
    """Return the report of a flight file, or of those in a run's directory, earliest fault first.

    An unreadable file in a directory is reported in one line.

    Args:
        path_or_run: The file or the directory.
        width: Characters of a line, by default unlimited; only a name or a path may be longer.
            Table columns that do not fit are omitted.

    Raises:
        OSError: The path does not exist.
        ValueError: The file is not a flight file.
    """
    path = Path(path_or_run)
    if not path.exists():
        raise FileNotFoundError(f"file or directory not found: {os.fspath(path)}")
    if not path.is_dir():
        return _explain_file(path, width)
    files = flight_files(path)
    if not files:
        return Explanation(f"{path}: {NO_FLIGHT}\n")
    more = len(files) - MAX_FILES
    omitted = [f"and {more} more flight files\n"] if more > 0 else []
    parts = [_explain_or_skip(file, width) for file in files[:MAX_FILES]]
    text = "\n".join([*(part.text for part in parts), *omitted])
    return Explanation(text, tuple([kind for part in parts for kind in part.kinds]))


def _explain_or_skip(path: Path, width: int) -> Explanation:
    try:
        return _explain_file(path, width)
    except OSError as error:
        return Explanation(f"skipped {path}: {error.strerror}\n")
    except ValueError as error:
        return Explanation(f"skipped {error}\n")


def _explain_file(path: Path, width: int) -> Explanation:
    flight = read_flight(path)
    story = (part for line in _story(flight) for part in _wrapped(line, width))
    lines = [f"{path}", *story, *_curves(flight, width), *_table(flight, width)]
    return Explanation("\n".join(lines) + "\n", tuple([a.kind for a in flight["alerts"]]))


def _wrapped(line: str, width: int) -> list[str]:
    """Wrap a line, and indent each part like the line."""
    indent = line[: len(line) - len(line.lstrip(" "))]
    head, text = line.split("\n", 1) if line.startswith("\n") else (None, line)
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [*([] if head is None else [head]), *lines]


def _story(flight: Mapping[str, Any]) -> Iterator[str]:
    """Yield the origin, the alerts, the exception, and the batch."""
    module = flight["first_bad_module"]
    where = "" if module is None else f"; first bad module: {called(module)}"
    complete = flight["complete"]
    missing = "" if complete else " (not complete: the run is still going on or was killed)"
    exception, what = flight["exception"], "Something went wrong"
    if exception is not None and not flight["alerts"]:
        what = f"{exception['type']} ended the training"
    yield f"{what} at step {flight['step']}{where}{missing}"
    modules = flight["modules"]
    code = dict(zip(modules["name"], modules["code"], strict=True)).get(module)
    if code and not any(
        alert.location for alert in flight["alerts"] if alert.module_name == module
    ):
        yield f"In the code: {code}"
    for alert in flight["alerts"]:
        stage = "" if alert.stage == "started" else f", {alert.stage}"
        yield f"\n{alert.severity}: {alert.kind}{alert.where} at step {alert.step}{stage}"
        yield from (f"  {line}" for line in alert.message.splitlines())
    if exception is not None:
        yield f"\nThe training ended in {exception['type']}: {exception['message']}"
        yield from (f"  {line}" for line in exception["traceback"].splitlines())
    seed, step = flight["random"]["seed"], flight["random"]["step"]
    seeded = "" if seed is None else f"; torch was seeded with {seed}"
    state = "" if step is None else f"; the file holds the random state at step {step}"
    yield f"\nBatch {flight['batch']} of a loop with one batch per step{seeded}{state}"
    yield from map(str, flight["batches"])


def _curves(flight: Mapping[str, Any], width: int) -> Iterator[str]:
    steps = flight["steps"]
    if not steps["step"]:
        return
    yield f"\nSteps {steps['step'][0]} to {steps['step'][-1]}"
    rates = [groups[0] if groups else None for groups in steps["learning_rates"]]
    columns = {"loss": steps["loss"], "gradient norm": steps["grad_norm"], "learning rate": rates}
    for name, column in columns.items():
        values = [value for value in column if value is not None]
        if values:
            log = min(filter(math.isfinite, values), default=0) > 0
            curve = sparkline(values, width=min(MAX_POINTS, max(width - _AROUND, 8)), log=log)
            ends = f"from {values[0]:.3g} to {values[-1]:.3g}"
            highest = max(filter(math.isfinite, values), default=math.nan)
            most = f", at most {highest:.3g}" if highest > max(values[0], values[-1]) else ""
            yield f"  {name:14}{curve}  {ends}{most}"


def _table(flight: Mapping[str, Any], room: int) -> Iterator[str]:
    """Yield the depth profiles in columns, one row per module."""
    profiles, modules = flight["profiles"], flight["modules"]
    shown = [key for key in _SHOWN if any(v is not None for p in profiles for v in p[key])]
    if not shown:
        return
    moments = " → ".join(f"{p['when']} (step {p['step']})" for p in profiles)
    width = (_CELL_WIDTH + 3) * len(profiles)
    marked = "; » is the first bad module" if flight["first_bad_module"] in modules["name"] else ""
    yield from _wrapped(f"\nBy depth, {moments}; – was not measured{marked}", room)
    names, culprit = modules["name"], flight["first_bad_module"]
    steps = flight["steps"]["step"]
    moved = {m.name: m for m in earliest_onsets(names, steps, flight["grad_norms"], flight["step"])}
    center = culprit if culprit in names else next(iter(moved), names[0])
    rows = _rows(names.index(center), len(names), [names.index(name) for name in moved])
    called_so = {row: printable(names[row] or modules["type"][row])[-_NAME_WIDTH:] for row in rows}
    names_width = max(map(len, ["module", *called_so.values()]))
    fits = max(1, (room - names_width - 3) // width)
    shown, hidden = shown[:fits], [_SHOWN[key] for key in shown[fits:]]
    titles = "".join(f"{_SHOWN[key]:{width}}" for key in shown)
    yield f"  {'module':{names_width}} {titles}".rstrip()
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if row > before + 1:
            yield "  …"
        mark = "»" if names[row] == culprit else " "
        cells = "".join(f"{_cells(profiles, key, row):{width}}" for key in shown)
        notes = ", ".join(_notes(profiles, row, moved.get(names[row])))
        line = f"{mark} {called_so[row]:{names_width}} {cells}".rstrip()
        if len(line) + len(notes) + 2 <= room:
            notes, line = "", f"{line}  {notes}".rstrip()
        yield line
        yield from _wrapped(f"    {notes}", room) if notes else ()
    left_out = modules["left_out"] + len(names) - len(rows)
    if left_out:
        yield f"  and {left_out} more modules"
    if hidden:
        yield f"  no room for: {', '.join(hidden)}"


def _rows(center: int, count: int, always: Sequence[int]) -> list[int]:
    """Return the rows around ``center``, and those to show always."""
    most = MAX_ROWS - len(always)
    first = max(0, min(center - most // 2, count - most))
    return sorted({*range(first, min(count, first + most)), *always})


def _cells(profiles: Sequence[Mapping[str, Any]], key: str, row: int) -> str:
    values = [profile[key][row] for profile in profiles]
    shown = ["–" if value is None else f"{value:.2g}" for value in values]
    return " → ".join(f"{text:>{_CELL_WIDTH}}" for text in shown)


def _notes(profiles: Sequence[Mapping[str, Any]], row: int, moved: Onset | None) -> Iterator[str]:
    """Yield notes about a module, each with its first value."""
    if moved is not None:
        yield f"gradient norm unusual from step {moved.step} on"
    counts = [profile["nonfinite"][row] or 0 for profile in profiles]
    yield from [f"{count:.0f} values not finite" for count in counts if count][:1]
    shares = [profile["dead_units"][row] or 0 for profile in profiles]
    yield from [f"{share:.0%} of units dead" for share in shares if share >= _MANY_DEAD][:1]

"""``telemetry explain``: the flight records around faults, as text, curves and tables."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from telemetry.commands import output
from telemetry.commands.alerts import help_line
from telemetry.events import list_event_files
from telemetry.flight import flight_files, read_flight
from telemetry.flight.file import earliest_onsets
from telemetry.layers import STATISTICS
from telemetry.layers.onset import Onset
from telemetry.plain_text import called, called_all, printable, sparkline

# Four times the files of one run.
MAX_FILES = 32
MAX_ROWS = 30
MAX_POINTS = 60

NO_FLIGHT = "no flight file: no alert of severity error, no loss spike and no exception"

_CELL_WIDTH = 7  # "1.2e-05"
_AROUND = 60  # characters around a curve
_MANY_DEAD = 0.5
_MOST_NAMES = 5
_SHOWN = {"activation_rms": "output rms", "grad_norm": "gradient norm", "update_ratio": "update"}
_RECORD = (
    "file", "complete", "step", "batch", "batches", "first_bad_module", "alerts", "exception",
    "random", "steps", "modules", "profiles",
)  # fmt: skip
_STATISTICS = tuple([statistic.name for statistic in STATISTICS])
_ROW = ("file", "fault_step", "when", "step", "module_name", "type_name", "code", *_STATISTICS)


def explain_faults(args: argparse.Namespace, console: Console) -> int:
    files = [path for path in args.runs if path.exists() and not path.is_dir()]
    others = [path for path in args.runs if path not in files]
    runs = output.LogDirs(others, lambda path: list_event_files(path) or flight_files(path))
    paths = [*files, *(path for path in runs.found if flight_files(path))]
    healthy = [path for path in runs.found if path not in paths and runs.open(path) is not None]
    if healthy:
        output.report_problems([f"{called_all([*map(str, healthy)], _MOST_NAMES)}: {NO_FLIGHT}"])
    if args.form == "csv":
        rows = (row for flight in _flights(paths, runs) for row in _profile_rows(flight))
        output.print_records("csv", _ROW, rows)
    elif args.form == "json":
        output.print_records("json", _RECORD, _flights(paths, runs))
    else:
        kinds: list[str] = []
        for path in paths:
            try:
                kinds += print_faults(path, console)
            except (OSError, ValueError) as error:
                runs.fail(error)
        if (line_of_help := help_line(kinds)) is not None:
            console.print(line_of_help)
    return runs.status if paths else 2


def _flights(paths: list[Path], runs: output.LogDirs) -> Iterator[dict[str, Any]]:
    for path in paths:
        for file in flight_files(path) if path.is_dir() else [path]:
            try:
                flight = read_flight(file)
            except (OSError, ValueError) as error:
                runs.fail(error)
            else:
                yield {**flight, "file": str(file)}


def _profile_rows(flight: dict[str, Any]) -> Iterator[dict[str, Any]]:
    modules = flight["modules"]
    for profile in flight["profiles"]:
        for place, module_name in enumerate(modules["name"]):
            yield {
                "file": flight["file"],
                "fault_step": flight["step"],
                "when": profile["when"],
                "step": profile["step"],
                "module_name": module_name,
                "type_name": modules["type"][place],
                "code": modules["code"][place],
                **{name: profile[name][place] for name in _STATISTICS},
            }


# --- text ----------------------------------------------------------------------------------------


def print_faults(path: Path, console: Console) -> list[str]:
    """Print a flight file, or those of a directory; return the kinds of their alerts.

    An unreadable file in a directory is reported; one that was given raises OSError or ValueError.
    """
    if not path.is_dir():
        return _print_fault(path, console)
    files, kinds = flight_files(path), list[str]()
    for number, file in enumerate(files[:MAX_FILES]):
        if number:
            console.print()
        try:
            kinds += _print_fault(file, console)
        except (OSError, ValueError) as error:
            console.print(printable(f"skipped {output.reason(error)}"))
    if len(files) > MAX_FILES:
        console.print(f"\nand {len(files) - MAX_FILES} more flight files")
    return kinds


def _print_fault(path: Path, console: Console) -> list[str]:
    flight = read_flight(path)
    console.print(printable(str(path)))
    _print_lines([*_story(flight), *_curves(flight, console.width)], console)
    _print_table(flight, console)
    return [alert.kind for alert in flight["alerts"]]


def _print_lines(lines: Iterable[str], console: Console) -> None:
    """Print lines; those that are too long continue with the same indentation."""
    for line in lines:
        text = line.lstrip(" ")
        indented = Padding.indent(Text(printable(text)), len(line) - len(text))
        console.print(indented if text else "", soft_wrap=False)


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
        yield ""
        yield f"{alert.severity}: {alert.kind}{alert.where} at step {alert.step}{stage}"
        yield from (f"  {line}" for line in alert.message.splitlines())
    if exception is not None:
        yield ""
        yield f"The training ended in {exception['type']}: {exception['message']}"
        yield from (f"  {line}" for line in exception["traceback"].splitlines())
    seed, step = flight["random"]["seed"], flight["random"]["step"]
    seeded = "" if seed is None else f"; torch was seeded with {seed}"
    state = "" if step is None else f"; the file holds the random state at step {step}"
    yield ""
    yield f"Batch {flight['batch']} of a loop with one batch per step{seeded}{state}"
    yield from map(str, flight["batches"])


def _curves(flight: Mapping[str, Any], width: int) -> Iterator[str]:
    steps = flight["steps"]
    if not steps["step"]:
        return
    yield ""
    yield f"Steps {steps['step'][0]} to {steps['step'][-1]}"
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


def _print_table(flight: Mapping[str, Any], console: Console) -> None:
    """Print the depth profiles in columns, one row per module, and what is unusual in modules."""
    profiles, modules = flight["profiles"], flight["modules"]
    shown = [key for key in _SHOWN if any(v is not None for p in profiles for v in p[key])]
    if not shown:
        return
    moments = " → ".join(f"{p['when']} (step {p['step']})" for p in profiles)
    names, culprit = modules["name"], flight["first_bad_module"]
    marked = "; » is the first bad module" if culprit in names else ""
    _print_lines(["", f"By depth, {moments}; – was not measured{marked}"], console)
    steps = flight["steps"]["step"]
    moved = {m.name: m for m in earliest_onsets(names, steps, flight["grad_norms"], flight["step"])}
    center = culprit if culprit in names else next(iter(moved), names[0])
    rows = _rows(names.index(center), len(names), [names.index(name) for name in moved])
    labels: list[str] = []
    cells: dict[str, list[Text]] = {key: [] for key in shown}
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if row > before + 1:
            labels.append("  …")
            for column in cells.values():
                column.append(Text())
        mark = "»" if names[row] == culprit else " "
        labels.append(f"{mark} {printable(names[row] or modules['type'][row])}")
        for key, column in cells.items():
            values = [profile[key][row] for profile in profiles]
            found = ["–" if value is None else f"{value:.2g}" for value in values]
            column.append(Text(" → ".join(f"{text:>{_CELL_WIDTH}}" for text in found)))
    columns = [output.Column(_SHOWN[key], cells[key], -place) for place, key in enumerate(shown)]
    output.print_table(console, "  module", labels, columns)
    notes: dict[str, list[str]] = {}
    for row in rows:
        for note in _notes(profiles, row, moved.get(names[row])):
            notes.setdefault(note, []).append(names[row])
    of_note = {note: called_all(those, _MOST_NAMES) for note, those in notes.items()}
    _print_lines([f"  {note}: {those}" for note, those in of_note.items()], console)
    if left_out := modules["left_out"] + len(names) - len(rows):
        console.print(f"  and {left_out} more modules")


def _rows(center: int, count: int, always: Sequence[int]) -> list[int]:
    """Return the rows around ``center``, and those to show always."""
    most = MAX_ROWS - len(always)
    first = max(0, min(center - most // 2, count - most))
    return sorted({*range(first, min(count, first + most)), *always})


def _notes(profiles: Sequence[Mapping[str, Any]], row: int, moved: Onset | None) -> Iterator[str]:
    """Yield notes about a module, each with its first value."""
    if moved is not None:
        yield f"gradient norm unusual from step {moved.step} on"
    counts = [profile["nonfinite"][row] or 0 for profile in profiles]
    yield from [f"{count:.0f} values not finite" for count in counts if count][:1]
    shares = [profile["dead_units"][row] or 0 for profile in profiles]
    yield from [f"{share:.0%} of units dead" for share in shares if share >= _MANY_DEAD][:1]

"""``telemetry explain``: what happened around faults, as text, curves and tables."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from telemetry.commands import output
from telemetry.commands.alerts import help_line
from telemetry.layers import PAGE_STATISTICS
from telemetry.layers.onset import Onset
from telemetry.plain_text import called, called_all, printable, sparkline
from telemetry.reading.faults import earliest_onsets, faults_of
from telemetry.reading.run_data import RunData
from telemetry.tables import Column, print_table

MAX_ROWS = 30
MAX_POINTS = 60

NO_FAULT = "no fault: no alert of severity error, no loss spike and no exception"

_CELL_WIDTH = 7  # "1.2e-05"
_AROUND = 60  # characters around a curve
_MANY_DEAD = 0.5
_MOST_NAMES = 5
_SHOWN = {"activation_rms": "output rms", "grad_norm": "gradient norm", "update_ratio": "update"}
_RECORD = (
    "run", "complete", "step", "batches", "first_bad_module", "alerts", "exception", "random",
    "steps", "modules", "profiles",
)  # fmt: skip
_STATISTICS = tuple([statistic.name for statistic in PAGE_STATISTICS])
_ROW = ("run", "fault_step", "when", "step", "module_name", "type_name", "code", *_STATISTICS)


def explain_faults(args: argparse.Namespace, console: Console) -> int:
    runs = output.LogDirs(args.runs)
    found = [(str(log_dir), run, [*faults_of(run)]) for log_dir, run in runs.opened()]
    if healthy := [name for name, _, faults in found if not faults]:
        output.report_problems([f"{called_all(healthy, _MOST_NAMES)}: {NO_FAULT}"])
    records = ({**fault, "run": name} for name, _, faults in found for fault in faults)
    if args.form == "csv":
        rows = (row for fault in records for row in _profile_rows(fault))
        output.print_records("csv", _ROW, rows)
    elif args.form == "json":
        output.print_records("json", _RECORD, records)
    else:
        kinds = [
            kind
            for name, run, faults in found
            for kind in print_faults(run, faults, console, name if len(found) > 1 else "")
        ]
        if (line_of_help := help_line(kinds)) is not None:
            console.print(line_of_help)
    return runs.status if any(faults for *_, faults in found) else 2


def _profile_rows(fault: dict[str, Any]) -> Iterator[dict[str, Any]]:
    modules = fault["modules"]
    for profile in fault["profiles"]:
        for place, module_name in enumerate(modules["name"]):
            yield {
                "run": fault["run"],
                "fault_step": fault["step"],
                "when": profile["when"],
                "step": profile["step"],
                "module_name": module_name,
                "type_name": modules["type"][place],
                "code": modules["code"][place],
                **{name: profile[name][place] for name in _STATISTICS},
            }


# --- text ----------------------------------------------------------------------------------------


def print_faults(
    run: RunData, faults: Sequence[Mapping[str, Any]], console: Console, name: str = ""
) -> list[str]:
    """Print the faults of a run, below its name; return the kinds of their alerts."""
    for number, fault in enumerate(faults):
        if number:
            console.print()
        if name:
            console.print(printable(name))
        _print_lines([*_story(fault), *_curves(fault, console.width)], console)
        _print_table(fault, earliest_onsets(run, fault), console)
    return [alert.kind for fault in faults for alert in fault["alerts"]]


def _print_lines(lines: Iterable[str], console: Console) -> None:
    """Print lines; those that are too long continue with the same indentation."""
    for line in lines:
        text = line.lstrip(" ")
        indented = Padding.indent(Text(printable(text)), len(line) - len(text))
        console.print(indented if text else "", soft_wrap=False)


def _story(fault: Mapping[str, Any]) -> Iterator[str]:
    """Yield the origin, the alerts, the exception, and the batch."""
    module = fault["first_bad_module"]
    where = "" if module is None else f"; first bad module: {called(module)}"
    complete = fault["complete"]
    missing = "" if complete else " (not complete: the run is still going on or was killed)"
    exception, what = fault["exception"], "Something went wrong"
    if exception is not None and not fault["alerts"]:
        what = f"{exception['type']} ended the training"
    yield f"{what} at step {fault['step']}{where}{missing}"
    modules = fault["modules"]
    code = dict(zip(modules["name"], modules["code"], strict=True)).get(module)
    if code and not any(alert.location for alert in fault["alerts"] if alert.module_name == module):
        yield f"In the code: {code}"
    told = set[str]()
    for alert in fault["alerts"]:
        yield ""
        yield f"{alert.severity}: {alert.title}"
        text = alert.news if alert.kind in told else alert.message
        yield from (f"  {line}" for line in text.splitlines())
        told.add(alert.kind)
    if exception is not None:
        yield ""
        yield f"The training ended in {exception['type']}: {exception['message']}"
        yield from (f"  {line}" for line in exception["traceback"].splitlines())
    seed, step = fault["random"]["seed"], fault["random"]["step"]
    seeded = "" if seed is None else f"; torch was seeded with {seed}"
    state = "" if step is None else f"; explain --json has the random state at step {step}"
    yield ""
    yield f"Batch {fault['step']} of a loop with one batch per step{seeded}{state}"
    yield from map(str, fault["batches"])


def _curves(fault: Mapping[str, Any], width: int) -> Iterator[str]:
    steps = fault["steps"]
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


def _print_table(fault: Mapping[str, Any], onsets: Sequence[Onset], console: Console) -> None:
    """Print the depth profiles in columns, one row per module, and what is unusual in modules."""
    profiles, modules = fault["profiles"], fault["modules"]
    shown = [key for key in _SHOWN if any(v is not None for p in profiles for v in p[key])]
    if not shown:
        return
    moments = " → ".join(f"{p['when']} (step {p['step']})" for p in profiles)
    names, culprit = modules["name"], fault["first_bad_module"]
    marked = "; » is the first bad module" if culprit in names else ""
    _print_lines(["", f"By depth, {moments}; – was not measured{marked}"], console)
    moved = {onset.name: onset for onset in onsets}
    center = culprit if culprit in names else next(iter(moved), names[0])
    rows = _rows(names.index(center), len(names), [names.index(name) for name in moved])
    lines: list[tuple[str, list[str]]] = []
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if row > before + 1:
            lines.append(("  …", [""] * len(shown)))
        mark = "»" if names[row] == culprit else " "
        label = f"{mark} {printable(names[row] or modules['type'][row])}"
        lines.append((label, [_moments(p[key][row] for p in profiles) for key in shown]))
    columns = [
        Column(_SHOWN[key], [Text(cells[place]) for _, cells in lines], -place)
        for place, key in enumerate(shown)
    ]
    print_table(console, "  module", [label for label, _ in lines], columns)
    notes: dict[str, list[str]] = {}
    for row in rows:
        for note in _notes(profiles, row, moved.get(names[row])):
            notes.setdefault(note, []).append(names[row])
    of_note = {note: called_all(those, _MOST_NAMES) for note, those in notes.items()}
    _print_lines([f"  {note}: {those}" for note, those in of_note.items()], console)
    if left_out := len(names) - len(rows):
        console.print(f"  and {left_out} more modules")


def _moments(values: Iterable[float | None]) -> str:
    found = ["–" if value is None else f"{value:.2g}" for value in values]
    return " → ".join(f"{text:>{_CELL_WIDTH}}" for text in found)


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

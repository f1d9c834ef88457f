"""``telemetry explain``: the flight records around faults."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from telemetry.alert import alert_fields
from telemetry.commands.help import help_line
from telemetry.commands.output import LogDirs, print_records, report_problems
from telemetry.flight import NO_FLIGHT, explanation_of, flight_files, read_flight
from telemetry.layers import STATISTICS
from telemetry.plain_text import printable
from telemetry.reading.run import has_event_files

_RECORD = (
    "file", "complete", "step", "batch", "batches", "first_bad_module", "alerts", "exception",
    "random", "steps", "modules", "profiles",
)  # fmt: skip
_STATISTICS = tuple([statistic.name for statistic in STATISTICS])
_ROW = ("file", "fault_step", "when", "step", "module_name", "type_name", "code", *_STATISTICS)


def explain_faults(args: argparse.Namespace, console: Console) -> int:
    files = [path for path in args.runs if path.exists() and not path.is_dir()]
    others = [path for path in args.runs if path not in files]
    runs = LogDirs(others, lambda path: has_event_files(path) or bool(flight_files(path)))
    paths = [*files, *(path for path in runs.found if flight_files(path))]
    healthy = [path for path in runs.found if path not in paths and runs.open(path) is not None]
    report_problems(f"{path}: {NO_FLIGHT}" for path in healthy)
    if args.form == "csv":
        rows = (row for flight in _flights(paths, runs) for row in _rows(flight))
        print_records("csv", _ROW, rows)
    elif args.form == "json":
        print_records("json", _RECORD, _flights(paths, runs))
    else:
        kinds: list[str] = []
        for path in paths:
            try:
                explained = explanation_of(path, console.width)
            except (OSError, ValueError) as error:
                runs.fail(error)
                continue
            kinds += explained.kinds
            for line in explained.text.splitlines():
                console.print(printable(line))
        if (line_of_help := help_line(kinds)) is not None:
            console.print(line_of_help)
    return runs.status if paths else 2


def _flights(paths: list[Path], runs: LogDirs) -> Iterator[dict[str, Any]]:
    """Yield the contents of all flight files."""
    for path in paths:
        for file in flight_files(path) if path.is_dir() else [path]:
            try:
                flight = read_flight(file)
            except (OSError, ValueError) as error:
                runs.fail(error)
            else:
                alerts = [alert_fields(alert) for alert in flight["alerts"]]
                batches = [asdict(batch) for batch in flight["batches"]]
                yield {**flight, "file": str(file), "alerts": alerts, "batches": batches}


def _rows(flight: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each profile and module."""
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

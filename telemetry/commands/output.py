"""Runs of a command's arguments, and its output: records as JSON or CSV, problems."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from telemetry.plain_text import json_plain, listed, printable
from telemetry.reading.run import NoTelemetryError, find_log_dirs, open_run, split_run
from telemetry.reading.run_data import RunData

_MOST_NAMES = 5


def print_records(form: str, columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
    """Print records as ``json``, where NaN and infinities are texts, or as ``csv``."""
    if form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        for record in records:
            writer.writerow([_cell(json_plain(record[column])) for column in columns])
        return
    texts = [as_json(columns, record) for record in records]
    print("\n".join(["[", ",\n".join(texts), "]"]) if texts else "[]")


def as_json(columns: Sequence[str], record: Mapping[str, Any]) -> str:
    return json.dumps({name: json_plain(record[name]) for name in columns})


def as_number(value: object) -> float | None:
    """Return a number or the text of one; None for an empty cell and everything else."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        return None


def report_problems(problems: Iterable[str]) -> None:
    for problem in problems:
        print(f"telemetry: {printable(problem)}", file=sys.stderr)


def reason(error: OSError | ValueError) -> str:
    """Return the message of an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _cell(value: Any) -> str:
    """Return a text without line breaks and control characters."""
    if isinstance(value, Mapping):
        return " ".join(_cell(item) for item in value.values() if item is not None)
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_cell, value))
    return "" if value is None else printable(str(value))


class LogDirs:
    """Directories of runs at and below the given paths; problems are reported on stderr."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.found: list[Path] = []  # each once
        self.status = 0  # for the shell: 2 if a path or a run could not be read
        self._given = paths
        for path in paths:
            if split_run(path)[1]:  # an earlier run of a directory
                self.found.append(path)
                continue
            try:
                below = list(find_log_dirs(path, skipped=report_skipped))
            except OSError as error:
                self.fail(error)
                continue
            if not below:
                self.fail(FileNotFoundError(f"neither a run log nor event files in {path}"))
            self.found += [log_dir for log_dir in below if log_dir not in self.found]

    def opened(self) -> Iterator[tuple[Path, RunData]]:
        """Yield each run with its directory; those without a run log are skipped, in one line."""
        opened, skipped = False, list[str]()
        for log_dir in self.found:
            try:
                run = open_run(log_dir)
            except (OSError, ValueError) as error:
                if isinstance(error, NoTelemetryError) and log_dir not in self._given:
                    skipped.append(str(log_dir))
                else:
                    self.fail(error)
                continue
            opened = True
            yield log_dir, run
            report_problems(run.problems)
        if skipped:
            names = listed(skipped, _MOST_NAMES)
            report_problems([f"skipped {names}: {NoTelemetryError.REASON}"])
        self.status = self.status if opened else 2

    def fail(self, error: OSError | ValueError) -> None:
        report_problems([reason(error)])
        self.status = 2


def report_skipped(error: OSError | ValueError) -> None:
    report_problems([f"skipped {reason(error)}"])

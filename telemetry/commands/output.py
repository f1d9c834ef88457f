"""Runs of a command's arguments, and its output: tables, records as JSON or CSV, problems."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from telemetry.plain_text import json_plain, printable
from telemetry.reading.run import NoTelemetryError, find_log_dirs, has_event_files, open_run
from telemetry.reading.run_data import RunData

_GAP = "  "
_NARROWEST = 24  # cells of the first column, unless it needs less


@dataclass(frozen=True)
class Column:
    """Column of a table for terminals."""

    title: str
    cells: Sequence[Text]
    weight: int  # columns of the smallest weights are hidden on a narrow terminal
    is_number: bool = False  # aligned to the right

    @cached_property
    def width(self) -> int:
        return max(cell_len(self.title), *(text.cell_len for text in self.cells))


def new_console() -> Console:
    """Return a console without markup; only a terminal limits the width."""
    console = partial(Console, highlight=False, emoji=False, markup=False, soft_wrap=True)
    return found if (found := console()).is_terminal else console(width=1 << 20)


def print_table(
    console: Console, title: str, names: Sequence[str], others: Sequence[Column]
) -> None:
    """Print a column of names, the other columns that fit, and the titles of those that do not.

    Names are never truncated: a long name continues on the next line.
    """
    widest = max(map(cell_len, [title, *names]))
    shown = list(others)
    while shown and min(widest, _NARROWEST) + _width(shown) > console.width:
        shown.remove(min(shown, key=lambda column: column.weight))
    width = max(1, min(widest, console.width - _width(shown)))
    heads = [Text(column.title) for column in shown]
    for row, name in enumerate(map(Text, [title, *names])):
        cells = heads if row == 0 else [column.cells[row - 1].copy() for column in shown]
        for column, cell in zip(shown, cells, strict=True):
            cell.align("right" if column.is_number else "left", column.width)
        fits = name.cell_len <= width
        first, *further = [name] if fits else name.wrap(console, width, overflow="fold")
        first.pad_right(width - first.cell_len)
        for line in (Text(_GAP).join([first, *cells]), *further):
            line.rstrip()
            console.print(line, style=None if row else "bold")
    if hidden := [column.title or "note" for column in others if column not in shown]:
        console.print(f"no room for: {', '.join(hidden)}", style="italic", soft_wrap=False)


def _width(columns: Sequence[Column]) -> int:
    return sum(len(_GAP) + column.width for column in columns)


def print_records(form: str, columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
    """Print records for programs; ``form`` is ``json`` or ``csv``.

    JSON has no NaN and infinities: they are ``"nan"``, ``"inf"`` and ``"-inf"``.
    """
    if form == "csv":
        rows = ([_cell(record[column]) for column in columns] for record in records)
        write_csv(sys.stdout, columns, rows)
        return
    before = "["
    for record in records:
        text = json.dumps({column: json_plain(record[column]) for column in columns})
        print(f"{before}\n{text}", end="")
        before = ","
    print("\n]" if before == "," else "[]")


def write_csv(file: TextIO, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)


def number(value: float) -> Text:
    return Text(f"{value:.3g}", style="" if math.isfinite(value) else "bold red")


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
    """Directories of runs at and below the given paths; problems are reported on stderr.

    Attributes:
        found: The directories, each once.
        status: For the shell: 2 if a path or a run could not be read, else 0.
    """

    def __init__(
        self, paths: Sequence[Path], is_log_dir: Callable[[Path], bool] = has_event_files
    ) -> None:
        self.found: list[Path] = []
        self.status = 0
        self._given = paths
        for path in paths:
            try:
                below = list(find_log_dirs(path, is_log_dir=is_log_dir, skipped=report_skipped))
            except OSError as error:
                self.fail(error)
                continue
            if not below:
                self.fail(FileNotFoundError(f"no event files in {path}"))
            self.found += [log_dir for log_dir in below if log_dir not in self.found]

    def opened(self) -> Iterator[tuple[Path, RunData]]:
        """Yield each run with its directory; directories of other programs are skipped."""
        opened = False
        for log_dir in self.found:
            run = self.open(log_dir)
            if run is not None:
                opened = True
                yield log_dir, run
                report_problems(run.source.problems)
        self.status = self.status if opened else 2

    def open(self, log_dir: Path) -> RunData | None:
        """Open the run in a found directory; None if that is impossible."""
        try:
            return open_run(log_dir)
        except (OSError, ValueError) as error:
            if isinstance(error, NoTelemetryError) and log_dir not in self._given:
                report_skipped(error)
            else:
                self.fail(error)
        return None

    def fail(self, error: OSError | ValueError) -> None:
        report_problems([reason(error)])
        self.status = 2


def report_skipped(error: OSError | ValueError) -> None:
    report_problems([f"skipped {reason(error)}"])

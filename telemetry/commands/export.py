"""``telemetry export``: all numbers of the page as CSV."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from telemetry.commands.arguments import STATISTICS, Commands, add_command, add_runs
from telemetry.commands.opening import LogDirs
from telemetry.commands.output import write_csv
from telemetry.plain_text import printable
from telemetry.reading.cells import cells


def add_export(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        does="write all numbers of the page as CSV: a row per layer and step",
        example="telemetry export runs/mnist -o mnist.csv --statistic grad_norm",
    )
    add_runs(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="the file to write (default: stdout)"
    )
    parser.add_argument(
        "--statistic",
        action="append",
        choices=STATISTICS,
        metavar="NAME",
        help=f"a column; may be repeated (default: all): {', '.join(STATISTICS)}",
    )


def _export(args: argparse.Namespace, console: Console) -> int:
    runs = LogDirs(args.runs)
    statistics = args.statistic or STATISTICS
    columns = ("run", "step", "module_name", "type_name", *statistics)

    def rows() -> Iterator[list[str]]:
        for log_dir, run in runs.opened():
            name = printable(str(log_dir))
            for step, module_name, type_name, *numbers in cells(run, statistics):
                yield [name, step, printable(module_name), printable(type_name), *numbers]

    if not runs.found:
        return runs.status
    if args.output is None:
        write_csv(sys.stdout, columns, rows())
    else:
        with open(args.output, "w", encoding="utf-8", newline="") as file:
            write_csv(file, columns, rows())
    return runs.status

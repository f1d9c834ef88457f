"""``telemetry export``: all numbers of the page as CSV, or its picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console

from telemetry.commands.arguments import STATISTICS, Commands, add_command, add_runs
from telemetry.commands.opening import LogDirs
from telemetry.commands.output import write_csv
from telemetry.heat_map import heat_map
from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.plain_text import printable
from telemetry.reading.cells import cells
from telemetry.reading.matrix import thin

_MOST_ROWS, _MOST_COLUMNS = 512, 1024
_NOT_WRITTEN = (".pdf", ".jpg", ".jpeg", ".webp", ".gif", ".html", ".json", ".parquet", ".gz")
"""Endings that ask for what would not be in the file."""


def add_export(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        does="write all numbers of the page as CSV, a row per layer and step, or its picture",
        example="telemetry export runs/mnist -o mnist.csv --statistic grad_norm\n"
        "  telemetry export runs/mnist -o mnist.svg",
    )
    add_runs(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write (default: stdout); .png and .svg are pictures of one run",
    )
    parser.add_argument(
        "--statistic",
        action="append",
        choices=STATISTICS,
        metavar="NAME",
        help="a column, or what the picture shows; may be repeated (default: all, or grad_norm): "
        + ", ".join(STATISTICS),
    )


def _export(args: argparse.Namespace, console: Console) -> int:
    ending = args.output.suffix.lower() if args.output is not None else ""
    if ending in (".png", ".svg"):
        return _export_picture(args)
    if ending in _NOT_WRITTEN:
        raise ValueError(f"-o {args.output}: pictures are .png or .svg, numbers .csv")
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


def _export_picture(args: argparse.Namespace) -> int:
    names = args.statistic or ["grad_norm"]
    runs = LogDirs(args.runs)
    if len(names) > 1 or len(runs.found) > 1:
        raise ValueError(
            f"-o {args.output}: a picture shows one statistic of one run; "
            f"give one --statistic (here: {len(names)}) and one RUN (here: {len(runs.found)})"
        )
    [statistic] = [known for known in PAGE_STATISTICS if known.name in names]
    for _, run in runs.opened():
        whole = run.matrix(statistic.name)
        most_cells = min(_MOST_ROWS, whole.values.shape[1]) * _MOST_COLUMNS
        matrix = thin(whole, max_layers=_MOST_ROWS, max_cells=most_cells)
        layers = run.overview().layers[:: matrix.layer_factor]
        known = np.flatnonzero((matrix.values != MISSING).any(axis=0))
        if not known.size:
            raise ValueError(f"{args.runs[0]}: no layer has {statistic.name}")
        drawn = heat_map(
            matrix.values[:, known].T,
            [printable(layers[row].name or layers[row].type_name) for row in known],
            matrix.steps.tolist(),
            title=statistic.title,
            log=statistic.log,
            least_width=_MOST_COLUMNS,
            text_height=16,
        )
        if args.output.suffix.lower() == ".svg":
            args.output.write_text(drawn.svg(), encoding="utf-8")
        else:
            Image.fromarray(drawn.pixels()).save(args.output)
    return runs.status

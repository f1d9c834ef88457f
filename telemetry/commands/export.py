"""``telemetry export`` and ``report``: runs as CSV, heat map, or one HTML file."""

from __future__ import annotations

import argparse
import html
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console

from telemetry.commands.explain import print_faults
from telemetry.commands.output import LogDirs, new_console, report_problems, write_csv
from telemetry.flight import flight_files
from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.layers.heat_map import heat_map
from telemetry.plain_text import printable
from telemetry.reading.matrix import thin
from telemetry.reading.run_data import RunData, windows
from telemetry.reading.run_entry import read_row
from telemetry.tensorboard_plugin.report import MAX_RUNS, report_html

_MOST_ROWS, _MOST_COLUMNS = 512, 1024


def export(args: argparse.Namespace, console: Console) -> int:
    ending = args.output.suffix.lower() if args.output is not None else ""
    if ending in (".png", ".svg"):
        return _export_picture(args)
    if ending not in ("", ".csv"):
        raise ValueError(f"-o {args.output}: pictures are .png or .svg, numbers .csv")
    runs = LogDirs(args.runs)
    statistics = args.statistic or [statistic.name for statistic in PAGE_STATISTICS]
    columns = ("run", "step", "module_name", "type_name", *statistics)
    rows = (
        [printable(str(log_dir)), *row]
        for log_dir, run in runs.opened()
        for row in cells(run, statistics)
    )
    if not runs.found:
        return runs.status
    if args.output is None:
        write_csv(sys.stdout, columns, rows)
    else:
        with open(args.output, "w", encoding="utf-8", newline="") as file:
            write_csv(file, columns, rows)
    return runs.status


def cells(run: RunData, statistics: Sequence[str]) -> Iterator[list[str]]:
    """Yield step, layer, class and one text per statistic, by step and then in forward order.

    Numbers have the digits of float32, or are empty. Rows without any number are omitted.
    """
    layers = run.overview().layers
    names = [[printable(layer.name), printable(layer.type_name)] for layer in layers]
    nothing = np.full(len(layers), MISSING, np.float32)
    for [matrices] in windows([run], statistics):
        rows_of = [dict(zip(m.steps.tolist(), m.values, strict=True)) for m in matrices]
        for step in sorted(set().union(*rows_of)):
            values = np.stack([rows.get(step, nothing) for rows in rows_of], axis=1)
            texts = np.where(values == MISSING, "", values.astype(str))
            for place in np.flatnonzero((values != MISSING).any(axis=1)):
                yield [str(step), *names[place], *texts[place].tolist()]


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


def report(args: argparse.Namespace, console: Console) -> int:
    found = LogDirs(args.runs)
    runs = dict(found.opened())
    if runs:
        report_problems(write_report(runs, args.output))
        size = args.output.stat().st_size
        console.print(printable(f"{args.output} ({size / 1e6:.1f} MB)"))
    return found.status


def write_report(runs: Mapping[Path, RunData], path: str | os.PathLike[str]) -> list[str]:
    """Write the report of runs into an HTML file; return problems of pictures."""
    if len(runs) > MAX_RUNS:
        raise ValueError(f"a report is of at most {MAX_RUNS} runs, not of {len(runs)}")
    base = os.path.commonpath([log_dir.resolve().parent for log_dir in runs])
    names = {log_dir: os.path.relpath(log_dir.resolve(), base) for log_dir in runs}
    known = {run: set(run.source.problems) for run in runs.values()}
    rows = [read_row(log_dir, name, time.time()) for log_dir, name in names.items()]
    named = {names[log_dir]: run for log_dir, run in runs.items()}
    page = report_html(
        named, [row for row in rows if row], "".join(_faults(*item) for item in names.items())
    )
    # The directory's name may not be valid UTF-8.
    Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
    return [line for run, old in known.items() for line in run.source.problems if line not in old]


def _faults(log_dir: Path, name: str) -> str:
    """Return the section of the flight files; empty without any."""
    if not flight_files(log_dir):
        return ""
    print_faults(log_dir, new_console(text := io.StringIO()))
    return (
        '<section class="faults" aria-label="Flight records"><h2>Around alerts and exceptions'
        f" of {html.escape(name)}</h2><pre>{html.escape(text.getvalue())}</pre></section>"
    )

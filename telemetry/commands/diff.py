"""``telemetry diff``: the first step and layer where two runs diverge."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.text import Text

from telemetry.commands.output import Column, number, print_records, print_table, report_skipped
from telemetry.layers import PAGE_STATISTICS
from telemetry.plain_text import called, called_all, printable
from telemetry.reading.comparison import Comparison, compare
from telemetry.reading.run import only_log_dir, open_run

_RECORD = ("statistic", "step", "module_name", "first", "second", "layer_count")
_MAX_NAMES = 5


def diff(args: argparse.Namespace, console: Console) -> int:
    runs = [only_log_dir(path, report_skipped) for path in (args.first, args.second)]
    comparison = compare(*map(open_run, runs), tolerance=args.tolerance)
    if not comparison.step_count or not comparison.layer_count:
        raise ValueError(f"{runs[0]} and {runs[1]} have no layer or no step in common")
    if args.form:
        print_records(args.form, _RECORD, map(vars, comparison.differences))
        return bool(comparison.differences)
    _print(comparison, console)
    for run, names in zip(runs, (comparison.only_first, comparison.only_second), strict=True):
        if names:
            console.print(f"only in {printable(str(run))}: {called_all(names, _MAX_NAMES)}")
    return bool(comparison.differences)


def _print(comparison: Comparison, console: Console) -> None:
    common = f"{comparison.layer_count} layers and {comparison.step_count} steps in common"
    found = comparison.differences
    if not found:
        console.print(f"{common}: no difference")
        return
    titles = {statistic.name: statistic.title for statistic in PAGE_STATISTICS}
    names = ["" if d.module_name is None else called(d.module_name) for d in found]
    diverged = [
        f"step {d.step} in {name or d.statistic}" for d, name in zip(found, names, strict=True)
    ]
    layer = next((place for place, name in enumerate(names) if name), 0)
    also = f", the layers at {diverged[layer]}" if layer else ""
    console.print(f"{common}; the runs diverge at {diverged[0]}{also}\n", style="bold")
    print_table(
        console,
        "first difference in",
        names,
        [
            Column("of", [Text(titles.get(d.statistic, d.statistic)) for d in found], 4),
            Column("step", [Text(str(d.step)) for d in found], 5, True),
            Column("first run", [number(d.first) for d in found], 2, True),
            Column("second run", [number(d.second) for d in found], 1, True),
            Column("layers", [Text(str(d.layer_count or "")) for d in found], 0, True),
        ],
    )

"""``telemetry summary``: a table of all layers."""

from __future__ import annotations

import argparse
import math

from rich.console import Console
from rich.text import Text

from telemetry.commands.arguments import STATISTICS, Commands, add_command, add_form, add_runs
from telemetry.commands.opening import LogDirs
from telemetry.commands.output import Column, number, print_records, print_table
from telemetry.layers import PAGE_STATISTICS, Statistic
from telemetry.plain_text import printable
from telemetry.reading.run_data import RunData
from telemetry.reading.run_summary import summarize

_STEADY = 1.25  # a trend by a smaller factor counts as steady
_RECORD = (
    "run", "statistic", "module_name", "type_name", "last", "median", "trend", "alert_count",
)  # fmt: skip


def add_summary(commands: Commands) -> None:
    parser = add_command(
        commands,
        "summary",
        _summary,
        does="print a table of all layers",
        example="telemetry summary runs/mnist --statistic dead_units",
    )
    add_runs(parser)
    parser.add_argument(
        "--statistic",
        choices=STATISTICS,
        default=STATISTICS[0],
        metavar="NAME",
        help=f"what to show of each layer (default: %(default)s): {', '.join(STATISTICS)}",
    )
    add_form(parser)


def _summary(args: argparse.Namespace, console: Console) -> int:
    runs = LogDirs(args.runs)
    statistic = next(known for known in PAGE_STATISTICS if known.name == args.statistic)
    if args.form:
        records = (
            {"run": str(log_dir), "statistic": statistic.name, **vars(layer)}
            for log_dir, run in runs.opened()
            for layer in summarize(run, statistic)
        )
        print_records(args.form, _RECORD, records)
        return runs.status
    for log_dir, run in runs.opened():
        head = f"{printable(str(log_dir))}: " if runs.several else ""
        _print_run(head, run, statistic, console)
        if runs.several:
            console.print()
    return runs.status


def _print_run(head: str, run: RunData, statistic: Statistic, console: Console) -> None:
    found, layers = run.overview(), summarize(run, statistic)
    counts = f"{len(found.layers)} layers, steps {found.first_step} to {found.last_step}"
    alerts = f"alerts: {len(found.alerts) or 'none'}"
    console.print(Text(f"{head}{counts}, {alerts}"), soft_wrap=True)
    if not layers:
        console.print(Text(f"{statistic.title}: not measured in this run"), soft_wrap=True)
        return
    console.print(Text(f"\n{statistic.title}", style="italic"), soft_wrap=True)
    print_table(
        console,
        "layer",
        [Text(printable(layer.module_name) or "(the model)") for layer in layers],
        [
            Column("class", [Text(printable(layer.type_name)) for layer in layers], 0),
            Column("last", [number(layer.last) for layer in layers], 5, True),
            Column("median", [number(layer.median) for layer in layers], 1, True),
            Column("trend", [_trend(layer.trend) for layer in layers], 2, True),
            Column("over time", [Text(layer.curve, "cyan") for layer in layers], 3),
            Column("alerts", [_count(layer.alert_count) for layer in layers], 4, True),
        ],
    )


def _trend(ratio: float) -> Text:
    if math.isnan(ratio):
        return Text()
    arrow = "↗" if ratio > _STEADY else "↘" if ratio < 1 / _STEADY else "→"
    return Text(f"{arrow} ×{ratio:.2g}")


def _count(alerts: int) -> Text:
    return Text(str(alerts or ""), style="bold red")

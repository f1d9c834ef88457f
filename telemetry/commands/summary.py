"""``telemetry summary``: last value, median, trend and curve of a statistic for each layer."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from telemetry.commands.opening import LogDirs
from telemetry.commands.output import Column, number, print_records, print_table
from telemetry.layers import MISSING, PAGE_STATISTICS, Statistic
from telemetry.reading.run_data import RunData
from telemetry.shared.plain_text import printable
from telemetry.shared.sparkline import sparkline

_CURVE_WIDTH = 16
_STEADY = 1.25  # a trend by a smaller factor counts as steady
_RECORD = (
    "run", "statistic", "module_name", "type_name", "last", "median", "trend", "alert_count",
)  # fmt: skip


def summary(args: argparse.Namespace, console: Console) -> int:
    runs = LogDirs(args.runs)
    [statistic] = [known for known in PAGE_STATISTICS if known.name == args.statistic]
    if args.form:
        records = (
            {"run": str(log_dir), "statistic": statistic.name, **layer}
            for log_dir, run in runs.opened()
            for layer in summarize(run, statistic)
        )
        print_records(args.form, _RECORD, records)
        return runs.status
    several = len(runs.found) > 1
    for log_dir, run in runs.opened():
        _print_run(f"{printable(str(log_dir))}: " if several else "", run, statistic, console)
        if several:
            console.print()
    return runs.status


def summarize(run: RunData, statistic: Statistic) -> Iterator[dict[str, Any]]:
    """The layers that have the statistic, in forward order.

    ``last`` may be NaN or infinite, ``median`` is that of the finite values. ``trend`` is the
    median of the last quarter of the values over that of the first. NaN: there are none.
    """
    layers, matrix = run.overview().layers, run.matrix(statistic.name)
    alerts = Counter(alert.module_name for alert in run.overview().alerts)
    for row in np.flatnonzero((matrix.values != MISSING).any(axis=0)):
        of_layer = matrix.values[:, row]
        values = of_layer[of_layer != MISSING].astype(np.float64)
        finite = values[np.isfinite(values)]
        yield {
            "module_name": layers[row].name,
            "type_name": layers[row].type_name,
            "last": float(values[-1]),
            "median": float(np.median(finite)) if finite.size else math.nan,
            "trend": _trend(finite),
            "curve": sparkline(values, width=_CURVE_WIDTH, log=statistic.log),
            "alert_count": alerts[layers[row].name],
        }


def _trend(finite: NDArray[np.float64]) -> float:
    quarter = finite.size // 4
    if not quarter:
        return math.nan
    first, last = np.median(finite[:quarter]), np.median(finite[-quarter:])
    return float(last / first) if first > 0 else math.nan


def _print_run(head: str, run: RunData, statistic: Statistic, console: Console) -> None:
    found, layers = run.overview(), list(summarize(run, statistic))
    counts = f"{len(found.layers)} layers, steps {found.first_step} to {found.last_step}"
    console.print(f"{head}{counts}, alerts: {len(found.alerts) or 'none'}")
    if not layers:
        console.print(f"{statistic.title}: not measured in this run")
        return
    console.print(f"\n{statistic.title}", style="italic")
    print_table(
        console,
        "layer",
        [printable(layer["module_name"]) or "(the model)" for layer in layers],
        [
            Column("class", [Text(printable(layer["type_name"])) for layer in layers], 0),
            Column("last", [number(layer["last"]) for layer in layers], 5, True),
            Column("median", [number(layer["median"]) for layer in layers], 1, True),
            Column("trend", [_arrow(layer["trend"]) for layer in layers], 2, True),
            Column("over time", [Text(layer["curve"], "cyan") for layer in layers], 3),
            Column("alerts", [_count(layer["alert_count"]) for layer in layers], 4, True),
        ],
    )


def _arrow(ratio: float) -> Text:
    if math.isnan(ratio):
        return Text()
    arrow = "↗" if ratio > _STEADY else "↘" if ratio < 1 / _STEADY else "→"
    return Text(f"{arrow} ×{ratio:.2g}")


def _count(alerts: int) -> Text:
    return Text(str(alerts or ""), style="bold red")

"""``telemetry summary``: last value, median, trend and curve of a statistic for each layer."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from telemetry.commands.opening import LogDirs
from telemetry.commands.output import Column, number, print_records, print_table
from telemetry.layers import MISSING, PAGE_STATISTICS, Statistic
from telemetry.reading.run_data import Overview, RunData
from telemetry.shared.plain_text import printable
from telemetry.shared.sparkline import sparkline

_CURVE_WIDTH = 16
_STEADY = 1.25  # a trend by a smaller factor counts as steady
_RECORD = (
    "run", "statistic", "module_name", "type_name", "last", "median", "trend", "alert_count",
)  # fmt: skip


def summary(args: argparse.Namespace, console: Console) -> int:
    if args.top is not None and args.top < 1:
        raise ValueError(f"--top {args.top}: must be at least 1")
    runs = LogDirs(args.runs)
    known = {statistic.name: statistic for statistic in PAGE_STATISTICS}
    statistic = known[args.statistic or args.sort or PAGE_STATISTICS[0].name]

    def shown(run: RunData) -> list[dict[str, Any]]:
        layers = list(summarize(run, statistic))
        if args.sort is not None:
            lasts = {of["module_name"]: of["last"] for of in summarize(run, known[args.sort])}
            layers = _sorted(layers, lasts, args.reverse)
        return layers[: args.top]

    if args.form:
        records = (
            {"run": str(log_dir), "statistic": statistic.name, **layer}
            for log_dir, run in runs.opened()
            for layer in shown(run)
        )
        print_records(args.form, _RECORD, records)
        return runs.status
    several = len(runs.found) > 1
    for log_dir, run in runs.opened():
        head = f"{printable(str(log_dir))}: " if several else ""
        _print_run(head, run.overview(), shown(run), statistic, console)
        if several:
            console.print()
    return runs.status


def _sorted(
    layers: list[dict[str, Any]], lasts: Mapping[str, float], is_reversed: bool
) -> list[dict[str, Any]]:
    """The largest first, NaN as larger than all; layers without a value come last."""

    def key(layer: Mapping[str, Any]) -> tuple[bool, float]:
        last = lasts[layer["module_name"]]
        return math.isnan(last), last

    has_value = [layer for layer in layers if layer["module_name"] in lasts]
    has_none = [layer for layer in layers if layer["module_name"] not in lasts]
    return [*sorted(has_value, key=key, reverse=not is_reversed), *has_none]


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


def _print_run(
    head: str,
    found: Overview,
    layers: Sequence[Mapping[str, Any]],
    statistic: Statistic,
    console: Console,
) -> None:
    counts = f"{len(found.layers)} layers, steps {found.first_step} to {found.last_step}"
    console.print(f"{head}{counts}, alerts: {len(found.alerts) or 'none'}")
    if not layers:
        console.print(f"{statistic.title}: not measured in this run")
        return
    few = len(layers) < len(found.layers)
    which = f", {len(layers)} of {len(found.layers)} layers" if few else ""
    console.print(f"\n{statistic.title}{which}", style="italic")
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

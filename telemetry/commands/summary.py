"""``telemetry summary``: a table of all layers."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from telemetry.commands.output import LogDirs, print_records
from telemetry.layers import MISSING, PAGE_STATISTICS, Statistic
from telemetry.plain_text import printable, sparkline
from telemetry.reading.run_data import RunData, trained_share
from telemetry.records.step import INPUT, is_inside
from telemetry.tables import Column, number, print_table
from telemetry.tag_names import MEMORY, TIMES

_CURVE_WIDTH = 16
_STEADY = 1.25  # a trend by a smaller factor counts as steady
# A value above this multiple of the medians of both ends is shown as a peak. Chosen manually:
# healthy CNNs have up to 2.6, and 58 or more where the learning rate jumps 300-fold.
_PEAK = 10
_RECORD = (
    "run", "statistic", "module_name", "type_name", "state", "last", "median", "trend", "largest",
    "largest_step", "alert_count",
)  # fmt: skip


def summary(args: argparse.Namespace, console: Console) -> int:
    if args.top is not None and args.top < 1:
        raise ValueError(f"--top {args.top}: must be at least 1")
    runs = LogDirs(args.runs)
    known = {statistic.name: statistic for statistic in PAGE_STATISTICS}
    statistic = known[args.statistic or args.sort or PAGE_STATISTICS[0].name]
    is_sorted = args.sort or args.reverse or args.top is not None
    sort = known[args.sort] if args.sort else statistic

    def shown(run: RunData) -> list[dict[str, Any]]:
        layers = list(summarize(run, statistic))
        if is_sorted:
            by = layers if sort is statistic else summarize(run, sort)
            lasts = {of["module_name"]: of["last"] for of in by}
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
        console.print(f"{head}{run.extent}, alerts: {len(run.alerts) or 'none'}")
        for fact in _facts(run):
            console.print(fact)
        _print_layers(shown(run), run.layer_count, statistic, console)
        if several:
            console.print()
    return runs.status


def _sorted(
    layers: list[dict[str, Any]], lasts: Mapping[str, float], is_reversed: bool
) -> list[dict[str, Any]]:
    """Sort the largest first, NaN before all numbers, and layers without a value last."""

    sign = 1 if is_reversed else -1

    def key(layer: Mapping[str, Any]) -> tuple[float, ...]:
        last = lasts.get(layer["module_name"])
        return (1,) if last is None else (0, sign * math.isnan(last), sign * last)

    return sorted(layers, key=key)


def summarize(run: RunData, statistic: Statistic) -> Iterator[dict[str, Any]]:
    """Yield the layers that have the statistic or parameters, in forward order.

    Without a value, ``last``, ``median``, ``largest`` and ``largest_step`` are None.
    ``last`` may be NaN or infinite; ``median`` is so if most values are. ``trend`` is the
    median of the last quarter of the values divided by that of the first: infinite if the last
    values are not finite, NaN with fewer than four values or if the first median is 0 or infinite.
    ``largest`` and ``largest_step`` are of the first NaN or infinity, else of the largest value.
    """
    layers, matrix = run.layers, run.matrix(statistic.name)
    found, states = run.alerts, run.training_states()
    alerts = Counter(name for alert in found for name in {alert.module_name, alert.observed_in})
    has_value = (matrix.values != MISSING).any(axis=0)
    for row in np.flatnonzero(has_value | np.array([bool(x.parameters) for x in layers], bool)):
        known: dict[str, Any] = {
            "module_name": layers[row].name,
            "type_name": layers[row].type_name,
            "state": states[row],
            "alert_count": alerts[layers[row].name],
            **dict.fromkeys(("last", "median", "largest", "largest_step")),
            "trend": math.nan,
            "is_peak": False,
            "curve": "",
        }
        if not has_value[row]:
            yield known
            continue
        is_known = matrix.values[:, row] != MISSING
        values = matrix.values[is_known, row].astype(np.float64)
        sizes = np.where(np.isnan(values), math.inf, values)
        largest, middle = int(sizes.argmax()), float(np.median(sizes))
        quarter = max(1, sizes.size // 4)
        first, last = float(np.median(sizes[:quarter])), float(np.median(sizes[-quarter:]))
        yield known | {
            "last": float(values[-1]),
            "median": middle if math.isfinite(middle) else float(values[largest]),
            "trend": last / first if sizes.size >= 4 and 0 < first < math.inf else math.nan,
            "largest": float(values[largest]),
            "largest_step": int(matrix.steps[is_known][largest]),
            "is_peak": bool(sizes[largest] > _PEAK * max(first, last)),
            "curve": sparkline(values, width=_CURVE_WIDTH, log=statistic.log),
        }


def _facts(run: RunData) -> Iterator[str]:
    """Yield sentences about the run, as far as its files have the numbers."""
    share = trained_share(run.layers, run.training_states())
    if share not in (None, 1.0):
        yield f"{share:.1%} of the parameters are in layers that train"
    if (end := run.end()) is not None:
        scheduled, requested = end.full_steps
        yield f"full steps: {scheduled} scheduled, {requested} more requested by rules"
    found = {tag: [value for _, value in points] for tag, points in run.costs().items()}
    usual = {tag: median_low(found[tag]) for tag in TIMES if tag in found}
    parts = []
    if (total_s := sum(usual.values())) > 0:
        shares = [f"{_PARTS[tag]} {value / total_s:.0%}" for tag, value in usual.items()]
        parts.append(f"a step takes {total_s:.3g} s: {', '.join(shares)}")
    for tag, name in MEMORY.items():
        if tag in found:
            parts.append(f"{name} {found[tag][-1] / 2**20:,.0f} MiB")
    if parts:
        yield "; ".join(parts)


_PARTS = dict(zip(TIMES, ("waiting for data", "forward", "backward", "optimizer"), strict=True))


def _print_layers(
    layers: Sequence[Mapping[str, Any]], count: int, statistic: Statistic, console: Console
) -> None:
    """Print a table of some of ``count`` layers."""
    if not any(layer["curve"] for layer in layers):
        console.print(f"{statistic.title}: not measured in this run")
    if not layers:
        return
    shown = sum(not is_inside(layer["module_name"], INPUT) for layer in layers)
    which = f", {shown} of {count} layers" if shown < count else ""
    console.print(f"\n{statistic.title}{which}", style="italic")

    def texts(key: str, style: str = "") -> list[Text]:
        return [Text(printable(str(layer[key] or "")), style) for layer in layers]

    def numbers(key: str) -> list[Text]:
        return [number(layer[key]) for layer in layers]

    print_table(
        console,
        "layer",
        [printable(layer["module_name"]) or "(the model)" for layer in layers],
        [
            Column("class", texts("type_name"), 0),
            Column("state", texts("state"), 4),
            Column("last", numbers("last"), 6, True),
            Column("median", numbers("median"), 1, True),
            Column("trend", [_arrow(layer) for layer in layers], 2, True),
            Column("over time", texts("curve", "cyan"), 3),
            Column("alerts", texts("alert_count", "bold red"), 5, True),
        ],
    )


def _arrow(layer: Mapping[str, Any]) -> Text:
    """Return the trend after a peak: without it, an explosion that ended seems a decay.

    Where most values of an end are not finite, return the first step with one instead.
    """
    ratio, peak = layer["trend"], layer["largest"]
    if peak is None:
        return Text("")
    arrow = "↗" if ratio > _STEADY else "↘" if ratio < 1 / _STEADY else "→"
    text = Text("" if math.isnan(ratio) else f"{arrow} ×{ratio:.2g}")
    if layer["is_peak"]:
        return Text.assemble("peak ", number(peak), f" at {layer['largest_step']}, then ", text)
    if math.isfinite(peak):
        return text
    return Text.assemble("first ", number(peak), f" at step {layer['largest_step']}")

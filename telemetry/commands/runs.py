"""``telemetry runs`` and ``diff``: a table of runs; the first step and layer where two diverge."""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.text import Text

from telemetry.commands import output
from telemetry.layers import PAGE_STATISTICS
from telemetry.plain_text import called, called_all, natural_key, printable
from telemetry.reading.comparison import Comparison, Difference, compare
from telemetry.reading.run import only_log_dir, open_run, split_run
from telemetry.reading.run_data import RunData
from telemetry.reading.run_entry import row_of
from telemetry.tables import ALWAYS, Column, number, print_table

_COLUMNS = ("run", "status", "started", "last_step", "last_loss", "best_loss", "worst_alert")
_MOST_WANTED = ("status", "worst_alert", "last_loss", "last_step")
_STYLES = {"live": "green", "died": "bold red"}


def runs(args: argparse.Namespace, console: Console) -> int:
    found = output.LogDirs(args.runs)
    terms = (args.filter or "").lower().split()
    for term in terms:
        if term.endswith(("<", ">", "=")):
            raise ValueError(f"--filter {term}: needs a value, such as lr<1e-3")
    rows = list(_rows(found, args.runs))
    found.status = found.status if rows else 2
    rows = [row for row in rows if all(_matches(_record(row), term) for term in terms)]
    columns = [*_COLUMNS, *_differing([*map(_hparams, rows)])]
    records = [dict.fromkeys(columns) | _record(row) for row in rows]
    if args.sort not in columns:
        raise ValueError(f"--sort {args.sort}: must be one of {', '.join(columns)}")
    records = _sorted(records, args.sort, args.reverse)
    if args.form:
        output.print_records(args.form, columns, records)
    elif records:
        shown = [title for title in columns if any(r[title] not in (None, "") for r in records)]
        # On a narrow terminal, the last hyperparameters are hidden first.
        order = [*_MOST_WANTED, *columns]
        table = [_column(title, records, -order.index(title)) for title in shown]
        print_table(console, "run", [printable(r["run"]) for r in records], table[1:])
    elif found.found and terms:
        console.print(f"no run matches --filter {printable(args.filter)!r}")
    return found.status


def _rows(found: output.LogDirs, given: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all runs, also of earlier ones in the same directory."""
    now_s = time.time()
    for log_dir, newest in found.opened():
        is_below = len(given) == 1 and log_dir != given[0]
        name = os.path.relpath(log_dir, given[0]) if is_below else str(log_dir)
        yield row_of(newest, name, now_s)
        earlier = () if split_run(log_dir)[1] else newest.directory.runs
        for run in earlier:
            if run != newest.run:
                yield row_of(RunData(newest.directory, run), f"{name}@{run}", now_s)


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters, and the columns that all runs have; None without a value."""
    loss, started = row["loss"] or {}, datetime.fromtimestamp(row["started"], timezone.utc)
    return _hparams(row) | {
        "run": row["name"],
        "status": row["status"],
        "started": started.strftime("%Y-%m-%d %H:%M:%SZ"),
        "last_step": row["lastStep"],
        "last_loss": loss.get("last"),
        "best_loss": loss.get("best"),
        "worst_alert": _alert(row["alert"]),
    }


def _hparams(row: Mapping[str, Any]) -> dict[str, Any]:
    return {f"hparams/{n}" if n in _COLUMNS else n: value for n, value in row["hparams"].items()}


def _differing(hparams: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values differ between runs; a missing one counts as a value."""
    names = dict.fromkeys(name for of_run in hparams for name in of_run)
    return [name for name in names if len({str(of_run.get(name)) for of_run in hparams}) > 1]


def _alert(alert: Mapping[str, Any] | None) -> str | None:
    if alert is None:
        return None
    where = f" in {called(alert['module_name'])}" if alert["module_name"] else ""
    return f"{alert['kind']}{where}, step {alert['step']}"


_TERM = re.compile(r"([^<>=!]+)(<=|>=|!=|=|<|>)(.*)")


def _matches(record: Mapping[str, Any], term: str) -> bool:
    """Return whether a run matches a lower-case word, or a comparison such as ``lr<1e-3``."""
    if (found := _TERM.fullmatch(term)) is None:
        pairs = [f"{n}={_text(value)}" for n, value in record.items() if n not in _COLUMNS]
        texts = [record["run"], record["status"], record["worst_alert"] or "", *pairs]
        return term in " ".join(texts).lower()
    name, operator, wanted = found.groups()
    value = {key.lower(): value for key, value in record.items()}.get(name)
    if value is None or value != value:
        return operator == "!="
    number = None if isinstance(value, str | bool) else output.as_number(wanted)
    if number is None:
        is_same = str(value).lower() == wanted
    else:
        is_same = math.isclose(value, number, rel_tol=1e-6)
    if operator in ("=", "!="):
        return is_same == (operator == "=")
    if number is None or is_same:
        return number is not None and operator.endswith("=")
    return bool(value < number if operator.startswith("<") else value > number)


def _sorted(records: list[dict[str, Any]], column: str, is_reversed: bool) -> list[dict[str, Any]]:
    """Sort numbers before texts, the newest run first, and missing values last."""

    def key(record: Mapping[str, Any]) -> tuple[bool, Any]:
        value = record[column]
        return isinstance(value, str), natural_key(value) if isinstance(value, str) else value

    missing = [r for r in records if r[column] is None or r[column] != r[column]]
    known = [record for record in records if record not in missing]
    return sorted(known, key=key, reverse=is_reversed != (column == "started")) + missing


def _column(title: str, records: Sequence[Mapping[str, Any]], weight: int) -> Column:
    values = [record[title] for record in records]
    if title in ("last_loss", "best_loss"):
        cells = [*map(number, values)]
    else:
        cells = [Text(printable(_text(value)), _STYLES.get(value, "")) for value in values]
    is_number = not any(isinstance(value, str | bool) for value in values)
    return Column(printable(title).replace("_", " "), cells, weight, is_number)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:g}"
    return str(value)


_RECORD = ("statistic", "step", "module_name", "first", "second", "layer_count")
_MAX_NAMES = 5


def diff(args: argparse.Namespace, console: Console) -> int:
    if not args.tolerance >= 0:
        raise ValueError(f"--tolerance {args.tolerance:g}: must be at least 0")
    runs = [only_log_dir(path, output.report_skipped) for path in (args.first, args.second)]
    comparison = compare(*map(open_run, runs), tolerance=args.tolerance)
    if not comparison.step_count or not comparison.layer_count:
        raise ValueError(f"{runs[0]} and {runs[1]} have no layer or no step in common")
    if args.form:
        output.print_records(args.form, _RECORD, map(vars, comparison.differences))
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
    places = [_place(difference) for difference in found]
    diverged = [f"step {d.step} in {place}" for d, place in zip(found, places, strict=True)]
    layer = next((n for n, d in enumerate(found) if d.module_name is not None), 0)
    also = f", the layers at {diverged[layer]}" if layer else ""
    console.print(f"{common}; the runs diverge at {diverged[0]}{also}\n", style="bold")
    values = [_values(difference) for difference in found]
    print_table(
        console,
        "first difference in",
        [
            place if d.module_name is None else f"{titles[d.statistic]} of {place}"
            for d, place in zip(found, places, strict=True)
        ],
        [
            Column("step", [Text(str(d.step)) for d in found], ALWAYS, True),
            Column("first", [first for first, _ in values], ALWAYS, True),
            Column("second", [second for _, second in values], ALWAYS, True),
            Column("layers", [Text(str(d.layer_count or "")) for d in found], 0, True),
        ],
    )


def _place(difference: Difference) -> str:
    """Return ``layer 2``, ``the model``, or the tag of a curve."""
    if difference.module_name:
        return f"layer {printable(difference.module_name)}"
    return printable(difference.statistic) if difference.module_name is None else called("")


def _values(difference: Difference) -> tuple[Text, Text]:
    """Return both values, with the digits of float32 if fewer do not tell them apart."""
    both = difference.first, difference.second
    first, second = map(number, both)
    if first.plain == second.plain:
        first, second = (number(value, 9) for value in both)
    return first, second

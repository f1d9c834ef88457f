"""``telemetry units``: the extremes of each unit of a layer at one step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from telemetry.commands.output import Column, number, print_records, print_table, report_problems
from telemetry.layers.units import ranges
from telemetry.plain_text import called
from telemetry.reading.run import read

_RECORD = ("step", "unit", "min", "max", "dead", "saturated", "omitted")


def units(args: argparse.Namespace, console: Console) -> int:
    run = read(args.run)
    try:
        found = run.units(args.layer)
    except KeyError as error:
        raise ValueError(f"{args.run}: {error.args[0]}") from None
    finally:
        report_problems(run.problems)
    steps = found.steps.tolist()
    if not steps:
        report_problems([f"{called(args.layer)}: no units recorded"])
    elif args.step not in (None, *steps):
        near = sorted(sorted(steps, key=lambda step: abs(step - args.step))[:3])
        raise ValueError(f"--step {args.step}: no units recorded; the nearest steps are {near}")
    place = slice(-1, None) if args.step is None else found.steps == args.step
    columns = [found.min, found.max, found.dead, found.saturated, found.omitted]
    columns = [column[place].reshape(-1) for column in columns]
    if args.form:
        each = zip(*(column.tolist() for column in columns), strict=True)
        step = steps[-1] if args.step is None and steps else args.step
        records = ((step, unit, *values) for unit, values in enumerate(each))
        print_records(args.form, _RECORD, (dict(zip(_RECORD, r, strict=True)) for r in records))
    elif steps:
        below_zero = ranges(found.below_zero[place][0], most=len(columns[0]))
        _print(
            f"{called(args.layer)} at step {found.steps[place][0]}", columns, below_zero, console
        )
    return 0


def _print(head: str, columns: Sequence[NDArray[Any]], below_zero: str, console: Console) -> None:
    low, high, dead, saturated, omitted = columns
    more = f", {omitted.sum()} of them omitted" if omitted.any() else ""
    console.print(f"{head}: {len(low)} units{more}")
    for name, which in ("dead", dead), ("saturated", saturated):
        console.print(f"{name}: {ranges(which, len(which)) or 'none'}")
    if below_zero:
        console.print(f"always below zero, zero after a ReLU: {below_zero}")
    shown = np.flatnonzero(~(dead | omitted)).tolist()
    if shown:
        console.print()
        print_table(
            console,
            "unit",
            [str(unit) for unit in shown],
            [
                Column("smallest", [number(low[unit]) for unit in shown], 1, True),
                Column("largest", [number(high[unit]) for unit in shown], 1, True),
                Column("", [Text("saturated" if saturated[unit] else "") for unit in shown], 0),
            ],
        )

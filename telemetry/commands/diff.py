"""``telemetry diff``: the first step and layer where two runs part."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from telemetry.commands.arguments import Commands, add_command, add_form, add_run
from telemetry.commands.opening import only_log_dir
from telemetry.commands.output import Column, number, print_records, print_table
from telemetry.layers import PAGE_STATISTICS
from telemetry.plain_text import called, printable
from telemetry.reading.difference import Comparison, compare
from telemetry.reading.log_dirs import open_run

_RECORD = ("statistic", "step", "module_name", "first", "second", "layer_count")
_MAX_NAMES = 5


def add_diff(commands: Commands) -> None:
    parser = add_command(
        commands,
        "diff",
        _diff,
        does="print the first step and layer where two runs part; exit with 1 if they do",
        example="telemetry diff runs/before runs/after --tolerance 1e-3",
    )
    add_run(parser, "first")
    add_run(parser, "second")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="two numbers are the same up to this share of the larger one (default: %(default)s)",
    )
    add_form(parser)


def _diff(args: argparse.Namespace, console: Console) -> int:
    """Returns 0 if the runs are the same, 1 if they part."""
    runs = [only_log_dir(path) for path in (args.first, args.second)]
    comparison = compare(open_run(runs[0]), open_run(runs[1]), tolerance=args.tolerance)
    if not comparison.step_count or not comparison.layer_count:
        raise ValueError(f"{runs[0]} and {runs[1]} have no layer or no step in common")
    if args.form:
        print_records(args.form, _RECORD, map(vars, comparison.differences))
    else:
        _print(comparison, console)
        _tell_others(str(runs[0]), comparison.only_first, console)
        _tell_others(str(runs[1]), comparison.only_second, console)
    return bool(comparison.differences)


def _print(comparison: Comparison, console: Console) -> None:
    common = f"{comparison.layer_count} layers and {comparison.step_count} steps in common"
    found = comparison.differences
    if not found:
        console.print(Text(f"{common}: no difference"), soft_wrap=True)
        return
    titles = {statistic.name: statistic.title for statistic in PAGE_STATISTICS}
    names = [Text("" if d.module_name is None else called(d.module_name)) for d in found]
    parted = [
        f"step {d.step} in {name or d.statistic}" for d, name in zip(found, names, strict=True)
    ]
    layer = next((place for place, name in enumerate(names) if name), 0)
    also = f", the layers at {parted[layer]}" if layer else ""
    console.print(Text(f"{common}; the runs part at {parted[0]}{also}\n", "bold"), soft_wrap=True)
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


def _tell_others(run: str, names: Sequence[str], console: Console) -> None:
    if names:
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        shown = ", ".join(map(called, names[:_MAX_NAMES]))
        console.print(Text(f"only in {printable(run)}: {shown}{more}"), soft_wrap=True)

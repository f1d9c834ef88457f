"""What the commands accept: a parser for each, and the arguments that several have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from telemetry.layers import PAGE_STATISTICS

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

STATISTICS = tuple(statistic.name for statistic in PAGE_STATISTICS)


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace, Console], int],
    *,
    does: str,
    example: str,
) -> argparse.ArgumentParser:
    """A parser for a command.

    Args:
        commands: Of the whole program.
        name: The command's name.
        run: What runs, with the arguments; returns the exit status.
        does: For the help, without a capital letter or a full stop.
        example: For the help, in one or more lines.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def add_run(parser: argparse.ArgumentParser, name: str = "run") -> None:
    parser.add_argument(
        name,
        type=Path,
        metavar="RUN",
        help="directory of a run, or of a single one somewhere below",
    )


def add_runs(parser: argparse.ArgumentParser, *, or_file: str = "") -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help=f"directory of a run, or of many at any depth, such as runs/{or_file}",
    )


def add_form(parser: argparse.ArgumentParser) -> None:
    forms = parser.add_mutually_exclusive_group()
    for form, what in (("json", "a list of objects"), ("csv", "a table with a heading")):
        forms.add_argument(
            f"--{form}", dest="form", action="store_const", const=form, help=f"print {what}"
        )

"""Tables on a terminal: a column of names, and the other columns that fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_NARROWEST = 24  # cells of the first column, unless it needs less
ALWAYS = 100  # weight of a column that is never hidden; the first one becomes narrower instead


@dataclass(frozen=True)
class Column:
    title: str
    cells: Sequence[Text]
    weight: int  # columns of the smallest weights are hidden on a narrow terminal
    is_number: bool = False  # aligned to the right


def new_console(file: TextIO | None = None) -> Console:
    """Return a console without markup, by default on stdout; only a terminal limits the width."""
    console = partial(
        Console, file=file, highlight=False, emoji=False, markup=False, soft_wrap=True
    )
    return found if (found := console()).is_terminal else console(width=1 << 20)


def print_table(
    console: Console, title: str, names: Sequence[str], others: Sequence[Column]
) -> None:
    """Print a column of names, the other columns that fit, and the titles of those that do not."""
    shown, unlimited = list(others), console.options.update_width(1 << 20)
    while shown:
        narrow = _table(title, names, shown, name_width=_NARROWEST)
        if Measurement.get(console, unlimited, narrow).maximum <= console.width:
            break
        least = min(shown, key=lambda column: column.weight)
        if least.weight == ALWAYS:
            break
        shown.remove(least)
    console.print(_table(title, names, shown), soft_wrap=False)
    if hidden := [column.title or "note" for column in others if column not in shown]:
        console.print(f"no room for: {', '.join(hidden)}", style="italic", soft_wrap=False)


def _table(
    title: str, names: Sequence[str], columns: Sequence[Column], name_width: int | None = None
) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(title, overflow="fold", max_width=name_width)
    for column in columns:
        justify: JustifyMethod = "right" if column.is_number else "left"
        table.add_column(Text(column.title), justify=justify, no_wrap=True)
    for row in zip(map(Text, names), *(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table


def number(value: float | None, digits: int = 3) -> Text:
    """Return a number; NaN and infinity stand out, and None is empty."""
    if value is None:
        return Text("")
    return Text(f"{value:.{digits}g}", style="" if math.isfinite(value) else "bold red")

"""Merging of the ranks' measurements of one step: each column has one reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.partial_record import (
    Addend,
    Floats,
    ParameterPart,
    PartialRecord,
    Row,
    TensorTable,
)
from telemetry.records import Spread
from telemetry.records.moments import rms_of
from telemetry.records.rows import Rows

NOWHERE = np.iinfo(np.int64).max
"""Number of the copy where a rank has none."""

# Tables of tensors that are merged at once: more are faster, and take more memory.
_TABLES_AT_ONCE = 8

Array: TypeAlias = NDArray[Any]


def _norm(values: Array, counts: Array) -> Array:
    """Roots of the sums of squares; NaN where any value is NaN, also next to infinity."""
    nan = (np.isnan(values) & counts).any(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(nan, np.nan, np.hypot.reduce(values, axis=0, where=counts, initial=0.0))


def _logical(ufunc: np.ufunc) -> Callable[[Array, Array], Array]:
    return lambda values, counts: ufunc.reduce(values, axis=0, where=counts)


# Columns of ParameterPart by their copies: the reduction of each, ``[parts, parameters]`` to
# ``[parameters]``, and the value of a parameter that no rank has.
_Reductions: TypeAlias = Mapping[str, tuple[Callable[[Array, Array], Array], Any]]
_COLUMNS: Sequence[tuple[str, _Reductions]] = (
    ("copies", {"norms": (_norm, np.nan), "present": (_logical(np.logical_or), False)}),
    ("copies", {"finite": (_logical(np.logical_and), True)}),
    ("copies", {"before": (_norm, np.nan)}),
    ("held_copies", {"moved": (_norm, np.nan), "sizes": (_norm, np.nan)}),
)


def merge_parameters(
    stages: Sequence[tuple[Sequence[ParameterPart], NDArray[np.intp]]], count: int
) -> dict[str, Array]:
    """Columns of all parameters by name; without those that no rank measured.

    Args:
        stages: The parts of each pipeline stage, and the positions of its parameters in the whole.
        count: Number of parameters in the whole.
    """
    merged: dict[str, Array] = {}
    for copies, columns in _COLUMNS:
        placed = []
        for parts, at in stages:
            some = [vars(part) for part in parts if getattr(part, next(iter(columns))) is not None]
            if some:
                whole = {name: np.full(count, missing) for name, (_, missing) in columns.items()}
                whole[copies] = np.full(count, NOWHERE)
                for name, column in _merge(some, copies, columns).items():
                    whole[name][at] = column
                placed.append(whole)
        if placed:
            merged |= _merge(placed, copies, columns)
    return merged


def _merge(parts: Sequence[dict[str, Any]], copies: str, columns: _Reductions) -> dict[str, Array]:
    """The lowest copies, and the columns reduced over the parts that have them."""
    numbers = np.stack([part[copies] for part in parts])
    lowest = numbers.min(axis=0)
    counts = (numbers == lowest) & (numbers < NOWHERE)
    known = counts.any(axis=0)
    return {copies: lowest} | {
        name: np.where(known, reduction(np.stack([part[name] for part in parts]), counts), missing)
        for name, (reduction, missing) in columns.items()
    }


def merge_tensors(tables: Sequence[TensorTable]) -> TensorTable:
    """Merge tables, in any order, into the one of a rank that had all tensors."""
    if len(tables) == 1:
        return tables[0]
    index: dict[Row, int] = {}
    for table in tables:
        for row in table.rows:
            index.setdefault(row, len(index))
    at = [np.array([index[row] for row in table.rows], np.int64) for table in tables]
    copies, calls = np.full(len(index), NOWHERE), np.zeros(len(index), np.int64)
    for table, places in zip(tables, at, strict=True):
        copies[places] = np.minimum(copies[places], table.copies)
    for n, (table, places) in enumerate(zip(tables, at, strict=True)):
        counts = table.copies == copies[places]
        calls[places] = np.maximum(calls[places], np.where(counts, table.calls, 0))
        at[n] = np.where(counts, places, -1)
    content = Rows.concatenate([table.content for table in tables])
    return TensorTable(
        rows=tuple(index),
        copies=copies,
        calls=calls,
        content=content.merged(np.concatenate(at), len(index)),
    )


def sum_addends(parts: Iterable[tuple[ParameterPart, NDArray[np.intp]]]) -> dict[int, Floats]:
    """Sums of addends by the position of the parameter; of several copies the lowest counts."""
    found: dict[Addend, list[Floats]] = {}
    for part, at in parts:
        for addend, values in part.addends.items():
            key = addend._replace(parameter=int(at[addend.parameter]))
            found.setdefault(key, []).append(values)
    lowest = {addend.parameter: addend for addend in sorted(found, reverse=True)}
    return {index: reduce(np.add, found[addend]) for index, addend in lowest.items()}


def spreads(values: Array, ranks: Sequence[int]) -> list[Spread | None]:
    """The smallest and the largest value of each column, ``[ranks, columns]``; None: all are NaN.

    Of equal values the lowest rank's counts; ``ranks`` ascend.
    """
    known: Any = ~np.isnan(values).all(axis=0)
    least = values.argsort(axis=0, kind="stable")[0]  # NaN comes last
    most = (-values).argsort(axis=0, kind="stable")[0]
    return [
        Spread(low=float(own[a]), low_rank=ranks[a], high=float(own[b]), high_rank=ranks[b])
        if is_known
        else None
        for is_known, a, b, own in zip(known, least, most, values.T, strict=True)
    ]


class MergedStep:
    """Measurements of several ranks at one step, or in one phase of it.

    Tensors are merged as they arrive; everything else is small and is kept as it is.

    Attributes:
        parts: Of the ranks, without tensors.
        rms: Of each table of tensors the rank, the rows and their root mean squares.
        nbytes: Bytes of the large arrays.
    """

    def __init__(self, first: PartialRecord) -> None:
        self.step, self.phase, self.sequence = first.step, first.phase, first.sequence
        self.parts: list[PartialRecord] = []
        self.rms: list[tuple[int, tuple[Row, ...], Floats]] = []
        self._tables: list[TensorTable] = []
        self._ranks: set[int] = set()
        self.nbytes = 0
        self.add(first)

    def add(self, part: PartialRecord) -> None:
        """Add the measurements of another rank.

        Raises:
            ValueError: They are of another step, or this rank has sent it before.
        """
        if (part.step, part.phase) != (self.step, self.phase) or part.rank in self._ranks:
            raise ValueError(f"rank {part.rank} sent step {part.step} out of order")
        self._ranks.add(part.rank)
        self.nbytes += part.nbytes
        self.parts.append(replace(part, tensors=None))
        if part.tensors is not None:
            self.rms.append((part.rank, part.tensors.rows, rms_of(part.tensors.content)))
            self._tables.append(part.tensors)
        if len(self._tables) == _TABLES_AT_ONCE:
            self.nbytes -= sum(table.nbytes for table in self._tables)
            self._tables = [merge_tensors(self._tables)]
            self.nbytes += self._tables[0].nbytes

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks whose measurements are here."""
        return frozenset(self._ranks)

    @property
    def wall_time(self) -> float:
        """Time at which the last rank ended the step."""
        return max(part.wall_time for part in self.parts)

    @property
    def measured(self) -> frozenset[int]:
        """Ranks that measured the step in full."""
        return frozenset([part.rank for part in self.parts if part.full])

    def tensors(self) -> TensorTable | None:
        """All tensors, merged; None: no rank has measured any."""
        return merge_tensors(self._tables) if self._tables else None

    def scalars(self) -> tuple[dict[str, float], dict[str, Spread]]:
        """Means of logged scalars over the ranks that logged them, and their spreads."""
        parts = sorted(self.parts, key=lambda part: part.rank)
        names = list(dict.fromkeys([name for part in parts for name in part.scalars]))
        logged = np.array([[name in part.scalars for name in names] for part in parts])
        values = np.array([[part.scalars.get(name, np.nan) for name in names] for part in parts])
        if not names:
            return {}, {}
        means = np.add.reduce(values, axis=0, where=logged) / logged.sum(axis=0)
        found = spreads(values, [part.rank for part in parts])
        return dict(zip(names, means.tolist(), strict=True)), {
            name: spread for name, spread in zip(names, found, strict=True) if spread is not None
        }

"""How what several ranks have becomes one: each field and each column has one reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, TypeAlias, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from telemetry.records import Spread
from telemetry.records.rows import Rows

T = TypeVar("T")
Array: TypeAlias = NDArray[Any]


def merge_all(parts: Sequence[T]) -> T:
    """One dataclass of several; each field is ``Annotated`` with what makes one value of many."""
    if len(parts) == 1:
        return parts[0]
    cls: Any = type(parts[0])
    merged: T = cls(
        **{n: one_of([getattr(part, n) for part in parts]) for n, one_of in _reductions(cls)}
    )
    return merged


@cache
def _reductions(cls: type) -> list[tuple[str, Callable[[list[Any]], Any]]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(name, hint.__metadata__[0]) for name, hint in hints.items()]


def same(values: Sequence[T]) -> T:
    return values[0]


def union(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    return frozenset().union(*sets)


def sums(arrays: Sequence[Array]) -> Array:
    return reduce(np.add, arrays)


def by_key(one_of: Callable[[list[Any]], Any]) -> Callable[[Iterable[Mapping[Any, Any]]], Any]:
    """A reduction of mappings, from that of the values of one key."""

    def merged(mappings: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
        found: dict[Any, list[Any]] = {}
        for mapping in mappings:
            for key, value in mapping.items():
                found.setdefault(key, []).append(value)
        return {key: one_of(values) for key, values in found.items()}

    return merged


def _norm(one: Array, other: Array) -> Array:
    """Root of the sum of squares; NaN where one is, also beside infinity."""
    nan: Array = np.isnan(one) | np.isnan(other)
    return np.where(nan, np.nan, np.hypot(one, other))


def _lowest(one: Array, other: Array) -> Array:
    """Of figures and whose they are, ``[k, 2]``, the lower; of equal ones, the lower rank's."""
    (value, rank), (new, new_rank) = one.T, other.T
    unknown = np.isnan(value) & ~np.isnan(new)
    lower = unknown | (new < value) | ((new == value) & (new_rank < rank))
    return np.where(lower[:, None], other, one)


# By the name of a column how those of two ranks become one, and what a row has before the first.
#
# ``low`` and ``high`` hold a figure, ``high`` its negative, and whose it is: float64 ``[rows, 2]``.
REDUCTIONS: Mapping[str, tuple[Callable[[Array, Array], Array], Any]] = {
    **dict.fromkeys(("total", "ranks"), (np.add, 0.0)),
    "calls": (np.maximum, 0),
    "holders": (np.add, 0),
    "lowest": (np.minimum, np.iinfo(np.int64).max),
    **dict.fromkeys(("low", "high"), (_lowest, (math.nan, -1.0))),
    **dict.fromkeys(("norm", "before", "moved", "size"), (_norm, 0.0)),
    "present": (np.logical_or, False),
    "finite": (np.logical_and, True),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Columns of numbers; merging takes a handful of NumPy calls."""

    rows: Sequence[Any]  # what they are about, each once; a tuple or a range
    copies: NDArray[np.int64]  # [rows], which copy was read: of several only the lowest counts
    columns: Mapping[str, Array]  # [rows, ...], by their names in REDUCTIONS
    content: Rows | None = None  # if the rows are tensors, what is in them

    def __post_init__(self) -> None:
        sizes, content = {len(self.rows), len(self.copies)}, self.content
        fits = sizes.union(map(len, self.columns.values())) == {len(self.rows)}
        if content is not None:
            fits &= len(content) == len(self.rows) and len(content.units) == sum(content.unit_count)
            fits &= len(content.buckets) == len(content.counts) == sum(content.bucket_count)
        if not fits:
            raise ValueError("its columns do not fit together")

    @staticmethod
    def of(rows: Sequence[Any], copies: Array | None = None, **columns: Array) -> Table:
        copies = np.zeros(len(rows), np.int64) if copies is None else copies
        rows = rows if isinstance(rows, range) else tuple(rows)
        return Table(rows=rows, copies=copies, columns=columns)

    @staticmethod
    def of_figures(rank: int, figures: Mapping[str, float]) -> Table:
        """Numbers that each rank has of its own, by name."""
        values = np.array(list(figures.values()), np.float64)
        ones = np.ones(len(values))
        return Table.of(tuple(figures), total=values, ranks=ones, **spreads(rank, values))

    @staticmethod
    def merge_all(tables: Iterable[Table]) -> Table:
        """As if one rank had held what all did; the order does not matter."""
        some = [table for table in tables if len(table.rows)]
        if len(some) < 2:
            return some[0] if some else NO_ROWS
        rows, places = _union([table.rows for table in some])
        copies = np.full(len(rows), np.iinfo(np.int64).max)
        for table, at in zip(some, places, strict=True):
            copies[at] = np.minimum(copies[at], table.copies)
        counting = [t.copies == copies[at] for t, at in zip(some, places, strict=True)]
        columns: dict[str, Array] = {}
        for name, like in some[0].columns.items():
            merge, nothing = REDUCTIONS[name]
            merged = columns[name] = np.empty((len(rows), *like.shape[1:]), like.dtype)
            merged[:] = nothing
            for table, at, counts in zip(some, places, counting, strict=True):
                with np.errstate(over="ignore", invalid="ignore"):
                    merged[at[counts]] = merge(merged[at[counts]], table.columns[name][counts])
        content = None
        if contents := [table.content for table in some if table.content is not None]:
            kept = [np.where(counts, at, -1) for at, counts in zip(places, counting, strict=True)]
            content = Rows.concatenate(contents).merged(np.concatenate(kept), len(rows))
        return Table(rows=rows, copies=copies, columns=columns, content=content)

    def means(self) -> dict[Any, float]:
        """Of the figures of several ranks."""
        means = self["total"] / self["ranks"]
        return dict(zip(self.rows, means.tolist(), strict=True))

    def spreads(self) -> dict[Any, Spread]:
        """The smallest and the largest of the ranks' figures; none where all are NaN."""
        pairs = zip(self.rows, self["low"].tolist(), self["high"].tolist(), strict=True)
        return {
            row: Spread(low=low, low_rank=int(rank), high=-high, high_rank=int(high_rank))
            for row, (low, rank), (high, high_rank) in pairs
            if rank >= 0
        }

    def __getitem__(self, name: str) -> Array:
        """A column; empty if there are no rows."""
        return self.columns[name] if len(self.rows) else np.empty(0)

    def filled(self, name: str, count: int, missing: Any) -> Array:
        """A column of so many rows, by their numbers."""
        whole = np.full(count, missing)
        whole[[*self.rows]] = self[name]
        return whole


NO_ROWS = Table.of(())


def spreads(rank: int, figures: Array) -> dict[str, Array]:
    """The columns ``low`` and ``high`` of one rank."""
    ranks = np.where(np.isnan(figures), -1.0, rank)
    return {"low": np.stack([figures, ranks], 1), "high": np.stack([-figures, ranks], 1)}


def _union(lists: Sequence[Sequence[Any]]) -> tuple[Sequence[Any], list[NDArray[np.int64]]]:
    """All rows, each once, and for each list the places of its rows among them."""
    if all(rows == lists[0] for rows in lists):
        return lists[0], [np.arange(len(lists[0]))] * len(lists)
    index: dict[Any, int] = {}
    for rows in lists:
        for row in rows:
            index.setdefault(row, len(index))
    return tuple(index), [np.array([index[r] for r in rows], np.int64) for rows in lists]

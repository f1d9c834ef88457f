"""What several ranks measured of many tensors, as columns of numbers that merge at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.moments import COUNTS, EXTREMES, POWER_SUMS, Moments
from telemetry.ranks.share import Share
from telemetry.ranks.units import Units
from telemetry.records import TensorRecord
from telemetry.sketch import LAST_BUCKET, Sketch

FIGURES = (*COUNTS, *POWER_SUMS, *EXTREMES)
"""The columns of :attr:`TensorTable.figures`."""

_LOW, _HIGH = len(FIGURES) - 2, len(FIGURES) - 1
_CODES = 4096
"""More than there are buckets; a bucket of a row is one number in the order of both."""

_ROWS_AT_ONCE = 64  # their histograms without gaps take 2 MB and stay in the cache


@dataclass(frozen=True, kw_only=True, eq=False)
class Spreads:
    """Of several figures that each rank has, the smallest and the largest over all ranks.

    NaN where no rank has a number, and then the rank is -1. Of several ranks with the same number,
    the lowest.

    Attributes:
        low: Smallest, float64 ``[k]``.
        low_rank: Whose that is, int32 ``[k]``.
        high: Largest, float64 ``[k]``.
        high_rank: Whose that is, int32 ``[k]``.
    """

    low: NDArray[np.float64]
    low_rank: NDArray[np.int32]
    high: NDArray[np.float64]
    high_rank: NDArray[np.int32]

    @staticmethod
    def of(rank: int, figures: Sequence[float]) -> Spreads:
        values = np.array(figures, np.float64)
        ranks = np.where(np.isnan(values), -1, rank).astype(np.int32)
        return Spreads(low=values, low_rank=ranks, high=values, high_rank=ranks)

    @staticmethod
    def merge_all(
        parts: Sequence[Spreads], places: Sequence[NDArray[np.int64]], count: int
    ) -> Spreads:
        """Those over all ranks; each part's figures go to ``places`` among ``count``."""
        low, low_rank = _merge_lowest([(p.low, p.low_rank) for p in parts], places, count)
        negative, high_rank = _merge_lowest([(-p.high, p.high_rank) for p in parts], places, count)
        return Spreads(low=low, low_rank=low_rank, high=-negative, high_rank=high_rank)

    def at(self, some: NDArray[np.bool_]) -> Spreads:
        return Spreads(
            low=self.low[some],
            low_rank=self.low_rank[some],
            high=self.high[some],
            high_rank=self.high_rank[some],
        )


def _merge_lowest(
    parts: Sequence[tuple[NDArray[np.float64], NDArray[np.int32]]],
    places: Sequence[NDArray[np.int64]],
    count: int,
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    best, owner = np.full(count, np.nan), np.full(count, -1, np.int32)
    for (values, ranks), at in zip(parts, places, strict=True):
        have, have_rank = best[at], owner[at]
        unknown = np.isnan(have) & ~np.isnan(values)
        lower = unknown | (values < have) | ((values == have) & (ranks < have_rank))
        best[at], owner[at] = np.where(lower, values, have), np.where(lower, ranks, have_rank)
    return best, owner


class Row(NamedTuple):
    """Which tensor: the pipeline stage, the kind as in :class:`StepRecord`, and its name there."""

    stage: int
    kind: str
    name: str
    place: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorTable:
    """What was measured of many tensors; merging takes a handful of NumPy calls.

    Attributes:
        rows: Which tensors, each once.
        copies: See :class:`Share`, int64 ``[rows]``.
        calls: Number of tensors that each rank saw, the largest of all, int64 ``[rows]``.
        figures: Counts, sums and extremes, float64 ``[rows, FIGURES]``.
        bucket_sizes: How many buckets each row has, int64 ``[rows]``.
        buckets: As in :class:`Sketch`, row after row, int16.
        counts: As in :class:`Sketch`, row after row, float64.
        units: Extremes of units.
        rms: Of each rank's root mean square, the smallest and the largest.
    """

    rows: tuple[Row, ...]
    copies: NDArray[np.int64]
    calls: NDArray[np.int64]
    figures: NDArray[np.float64]
    bucket_sizes: NDArray[np.int64]
    buckets: NDArray[np.int16]
    counts: NDArray[np.float64]
    units: Units
    rms: Spreads

    def __post_init__(self) -> None:
        fits = self.figures.shape == (len(self.rows), len(FIGURES))
        if not fits or int(self.bucket_sizes.sum()) != self.buckets.size:
            raise ValueError("its columns do not fit together")

    @staticmethod
    def of(rank: int, tensors: Mapping[Row, tuple[Share, TensorRecord]]) -> TensorTable:
        shares = [share for share, _ in tensors.values()]
        records = [record for _, record in tensors.values()]
        sketches = [record.sketch for record in records]
        figures = [[getattr(s, name) for name in FIGURES] for s in sketches]
        return TensorTable(
            rows=tuple(tensors),
            copies=np.array([share.copy for share in shares], np.int64),
            calls=np.array([record.calls for record in records], np.int64),
            figures=np.array(figures, np.float64).reshape(-1, len(FIGURES)),
            bucket_sizes=np.array([s.buckets.size for s in sketches], np.int64),
            buckets=_joined([s.buckets for s in sketches], np.int16),
            counts=_shortened(_joined([s.counts for s in sketches], np.float64)),
            units=Units.of(
                [(s, r.unit_min, r.unit_max) for s, r in zip(shares, records, strict=True)]
            ),
            rms=Spreads.of(rank, [s.rms for s in sketches]),
        )

    @staticmethod
    def merge_all(tables: Sequence[TensorTable]) -> TensorTable:
        """As if one rank had held what all of them did; the order does not matter."""
        tables = [table for table in tables if table.rows]
        if len(tables) < 2:
            return tables[0] if tables else EMPTY
        rows, places = union([table.rows for table in tables])
        copies = np.full(len(rows), np.iinfo(np.int64).max)
        calls = np.zeros(len(rows), np.int64)
        for table, at in zip(tables, places, strict=True):
            copies[at] = np.minimum(copies[at], table.copies)
            calls[at] = np.maximum(calls[at], table.calls)
        counting = [t.copies == copies[at] for t, at in zip(tables, places, strict=True)]
        figures = np.zeros((len(rows), len(FIGURES)))
        figures[:, _LOW:] = np.nan
        kept: list[NDArray[np.int64]] = []
        for table, at, counts in zip(tables, places, counting, strict=True):
            some, mine = at[counts], table.figures[counts]
            with np.errstate(over="ignore", invalid="ignore"):
                figures[some, :_LOW] += mine[:, :_LOW]
            figures[some, _LOW] = np.fmin(figures[some, _LOW], mine[:, _LOW])
            figures[some, _HIGH] = np.fmax(figures[some, _HIGH], mine[:, _HIGH])
            kept.append(np.where(counts, at, -1))
        sizes, buckets, counts_ = _merge_buckets(tables, kept, len(rows))
        return TensorTable(
            rows=rows,
            copies=copies,
            calls=calls,
            figures=figures,
            bucket_sizes=sizes,
            buckets=buckets,
            counts=counts_,
            units=Units.merge_all([table.units for table in tables], kept),
            rms=Spreads.merge_all([table.rms for table in tables], places, len(rows)),
        )

    @cached_property
    def index(self) -> Mapping[Row, int]:
        return {row: index for index, row in enumerate(self.rows)}

    def records(self) -> dict[Row, TensorRecord]:
        """What was measured of each tensor as a whole."""
        ends = np.cumsum(self.bucket_sizes)
        starts = ends - self.bucket_sizes
        extremes = self.units.whole()
        records = {}
        for index, row in enumerate(self.rows):
            some = slice(starts[index], ends[index])
            low, high = extremes.get(index, (None, None))
            records[row] = TensorRecord(
                sketch=Sketch.of(self._moments(index), self.buckets[some], self.counts[some]),
                calls=int(self.calls[index]),
                unit_min=low,
                unit_max=high,
            )
        return records

    def _moments(self, index: int) -> Moments:
        figures: dict[str, Any] = dict(zip(FIGURES, self.figures[index].tolist(), strict=True))
        return Moments(**figures | {name: int(figures[name]) for name in COUNTS})


def union(
    lists: Sequence[tuple[Row, ...]],
) -> tuple[tuple[Row, ...], list[NDArray[np.int64]]]:
    """All rows, each once, and for each list the places of its rows among them."""
    if all(rows == lists[0] for rows in lists):
        return lists[0], [np.arange(len(lists[0]))] * len(lists)
    index: dict[Row, int] = {}
    for rows in lists:
        for row in rows:
            index.setdefault(row, len(index))
    return tuple(index), [np.array([index[r] for r in rows], np.int64) for rows in lists]


def _shortened(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scaled-up counts in single precision, far finer than a sample: they travel in half the room.

    Counts of all elements are whole numbers, and stay as they are.
    """
    return np.where(counts == np.floor(counts), counts, counts.astype(np.float32))


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)


def _merge_buckets(
    tables: Sequence[TensorTable], places: Sequence[NDArray[np.int64]], rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int16], NDArray[np.float64]]:
    """Sizes, buckets and counts of the merged rows; rows at place -1 are left out."""
    entries = [_in_order(table, at) for table, at in zip(tables, places, strict=True)]
    sizes = np.zeros(rows, np.int64)
    buckets, counts = [np.empty(0, np.int64)], [np.empty(0)]
    for start in range(0, rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - start)
        dense = np.zeros(count * _CODES)
        for codes, values in entries:
            some = slice(*np.searchsorted(codes, [start * _CODES, (start + count) * _CODES]))
            within = codes[some] - start * _CODES
            dense += np.bincount(within, values[some], minlength=dense.size)
        (filled,) = dense.nonzero()
        row, bucket = np.divmod(filled, _CODES)
        sizes[start : start + count] = np.bincount(row, minlength=count)
        buckets.append(bucket - LAST_BUCKET)
        counts.append(dense[filled])
    return sizes, np.concatenate(buckets).astype(np.int16), np.concatenate(counts)


def _in_order(
    table: TensorTable, at: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The row and bucket of each count as one number, ascending, and the counts."""
    row = np.repeat(at, table.bucket_sizes)
    codes, counts = row * _CODES + table.buckets + LAST_BUCKET, table.counts
    if (at < 0).any():
        codes, counts = codes[row >= 0], counts[row >= 0]
    if (codes[1:] < codes[:-1]).any():
        order = np.argsort(codes)
        codes, counts = codes[order], counts[order]
    return codes, counts


EMPTY = TensorTable.of(0, {})
"""That of a step that was not measured in full."""

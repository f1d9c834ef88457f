"""Measurements of many tensors as columns; each tensor is a row.

Processors and accelerators submit measurements in one format: the bytes that :meth:`Rows.decode`
takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.records import moments
from telemetry.records.buckets import BUCKETS_PER_OCTAVE, LAST_BUCKET
from telemetry.threads import without_locks

# Figures of :class:`~telemetry.records.sketch.Sketch` of each row, and its numbers of merged
# tensors, buckets and units.
COLUMNS = np.dtype(
    [(name, "i8") for name in moments.COUNTS]
    + [(name, "f8") for name in (*moments.EXTREMES, *moments.POWER_SUMS)]
    + [(name, "i8") for name in ("calls", "bucket_count", "unit_count", "estimated")]
)
# The same for one submitted tensor, whose counts are exact. Instead of ``calls`` it has
# ``sampled``: -1 if the pairs count all finite values; for a sample, the number of values other
# than zero that they count.
HEAD = np.dtype(
    [(name.replace("calls", "sampled"), COLUMNS[name]) for name in (COLUMNS.names or ())[:-1]]
)
_HEAD_FIELDS = len(HEAD.names or ())
# Filled bucket, see :func:`~telemetry.records.buckets.bucket_indices`, and its number of values.
# Buckets of a tensor ascend. In a sample, the zeros of the head are the count of bucket 0.
PAIR = np.dtype([("count", "u4"), ("bucket", "i2"), ("", "V2")])
# Smallest and largest value of a unit; NaN if the unit has one.
UNIT = np.dtype(("f4", 2))
# Unit without values, or omitted: the smallest is above the largest.
NO_VALUES = np.array([np.inf, -np.inf], np.float32)

Column = NDArray[Any]
_Bytes = bytes | bytearray


@without_locks
@dataclass(frozen=True, eq=False)
class Rows:
    """Measurements of some tensors.

    Each column is an attribute, int64 or float64 ``[rows]``: the figures of
    :class:`~telemetry.records.sketch.Sketch`; ``calls``, the number of merged tensors;
    ``bucket_count`` and ``unit_count``, the numbers of filled buckets and of units; ``estimated``,
    the number of merged tensors whose zeros, NaN and infinities were counted in a sample, and whose
    kurtosis is that of the sample.
    """

    columns: NDArray[Any]  # :data:`COLUMNS` ``[rows]``
    buckets: NDArray[np.int16]  # filled buckets, row after row and ascending in each
    counts: NDArray[np.float64]  # values in each; fractional if a sample was scaled up
    units: NDArray[np.float32]  # extremes of each unit, row after row, ``[..., 2]``

    def __getattr__(self, name: str) -> Column:
        if name not in (COLUMNS.names or ()):
            raise AttributeError(name)
        column: Column = self.columns[name]
        self.__dict__[name] = column  # so that Python does not call this again
        return column

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        of_rows = (self.columns, self.buckets, self.counts, self.units)
        return sum([array.nbytes for array in of_rows])

    @staticmethod
    def decode(heads: _Bytes, pairs: _Bytes, units: _Bytes) -> Rows:
        """Return the rows of :data:`HEAD`, with their :data:`PAIR` and :data:`UNIT` items."""
        head, pair = np.frombuffer(heads, HEAD), np.frombuffer(pairs, PAIR)
        columns = np.zeros(len(head), COLUMNS)
        _fields(columns)[:, :_HEAD_FIELDS] = _fields(head)
        counts, sampled = pair["count"].astype(np.float64), head["sampled"]
        columns["calls"] = 1
        buckets = np.ascontiguousarray(pair["bucket"])
        rows = Rows(columns, buckets, counts, np.frombuffer(units, UNIT))
        if (sampled >= 0).any():
            some = np.flatnonzero(sampled > 0)
            scale = np.ones(len(rows))
            scale[some] = (moments.finite_of(rows) - rows.zero_count)[some] / sampled[some]
            counts *= scale.repeat(rows.bucket_count)
            zeros = np.where(sampled >= 0, rows.zero_count, 0).repeat(rows.bucket_count)
            np.copyto(counts, zeros, where=(buckets == 0) & (zeros > 0))
        return rows

    def encode(self) -> tuple[bytes, bytes, bytes]:
        """Return the arguments of :meth:`decode`; counts must be whole numbers below 2^32."""
        head = np.ascontiguousarray(_fields(self.columns)[:, :_HEAD_FIELDS]).view(HEAD)[:, 0]
        pair = np.zeros(len(self.buckets), PAIR)
        head["sampled"] = -1
        pair["bucket"], pair["count"] = self.buckets, self.counts
        return head.tobytes(), pair.tobytes(), self.units.tobytes()

    @staticmethod
    def of(histograms: Sequence[Any], calls: Sequence[int] = (), units: Any = ()) -> Rows:
        """Return a row for each :class:`~telemetry.records.sketch.Sketch`, by default of one call.

        ``units`` holds each one's extremes, float32 ``[units, 2]``, or None.
        """
        none = np.empty((0, 2), np.float32)
        units = [none if one is None else one for one in units or [None] * len(histograms)]
        columns = np.empty(len(histograms), COLUMNS)
        for name in moments.MOMENTS:
            columns[name] = [getattr(one, name) for one in histograms]
        columns["calls"], columns["estimated"] = calls or 1, 0
        columns["bucket_count"] = [len(one.buckets) for one in histograms]
        columns["unit_count"] = [len(one) for one in units]
        return Rows(
            columns,
            np.concatenate([np.empty(0, np.int16), *(one.buckets for one in histograms)]),
            np.concatenate([np.empty(0), *(one.counts for one in histograms)]),
            np.concatenate([none, *units]),
        )

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """Return the rows of all parts; at least one part."""
        return Rows(
            # As numbers: NumPy compares the fields of structured types, which takes longer.
            np.concatenate([part.columns.view(np.int64) for part in parts]).view(COLUMNS),
            np.concatenate([part.buckets for part in parts]),
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.units for part in parts]),
        )

    def histogram(self, row: int) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
        """Return the filled buckets of a row, and the number of values in each."""
        first, end = self._bucket_ends[row] - self.bucket_count[row], self._bucket_ends[row]
        return self.buckets[first:end], self.counts[first:end]

    def units_of(self, row: int) -> NDArray[np.float32] | None:
        """Return the extremes of each unit of a row, ``[units, 2]``; None without units."""
        first, end = self._unit_ends[row] - self.unit_count[row], self._unit_ends[row]
        return self.units[first:end] if first < end else None

    @cached_property
    def _bucket_ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.bucket_count)

    @cached_property
    def _unit_ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.unit_count)

    @cached_property
    def dead_fraction(self) -> NDArray[np.float64]:
        """Share of units that were always zero; NaN without units."""
        return self._mean_of_units((self.units == 0).all(axis=1))

    @cached_property
    def variation(self) -> NDArray[np.float64]:
        """Spread of the values, without the part that is constant in each unit.

        The standard deviation; or half of each unit's range, as a root mean square over the units,
        if that is less. It bounds each unit's standard deviation (Popoviciu's inequality), so a
        unit with the same value for every input adds nothing. NaN if no value is finite.
        """
        std: NDArray[np.float64] = moments.std_of(self)
        with np.errstate(all="ignore"):
            ranges = np.subtract(self.units[:, 1], self.units[:, 0], dtype=np.float64)
            within = np.sqrt(self._mean_of_units(ranges**2)) / 2
        return np.where((self.count >= 2 * self.unit_count) & (within < std), within, std)

    def _mean_of_units(self, values: Column) -> NDArray[np.float64]:
        rows = np.arange(len(self)).repeat(self.unit_count)
        with np.errstate(invalid="ignore"):
            return np.bincount(rows, values, minlength=len(self)) / self.unit_count

    # --- other rows -------------------------------------------------------------------------------

    def take(self, rows: NDArray[np.intp]) -> Rows:
        """Return these rows, in this order."""
        if len(rows) == len(self) and (rows == np.arange(len(self))).all():
            return self
        pairs = _places(self._bucket_ends, self.bucket_count, rows)
        units = _places(self._unit_ends, self.unit_count, rows)
        return Rows(self.columns[rows], self.buckets[pairs], self.counts[pairs], self.units[units])

    def having(self, units: NDArray[np.float32] | None = None, **columns: Any) -> Rows:
        """Return a copy with other columns, or other units and their ``unit_count``."""
        units = self.units if units is None else units
        changed = Rows(self.columns.copy(), self.buckets, self.counts, units)
        for name, column in columns.items():
            changed.columns[name] = column
        return changed

    def without_units(self) -> Rows:
        return self.having(self.units[:0], unit_count=0)

    @np.errstate(over="ignore", invalid="ignore")
    def merged(self, places: NDArray[np.int64], size: int) -> Rows:
        """Merge rows, as if their tensors had been one; units only if their numbers are equal.

        ``places`` are the indices of each row's new row, ``[rows]``, negative if it is omitted.
        Each of the ``size`` new rows has a part.
        """
        kept = np.flatnonzero(places >= 0)
        order = kept[np.argsort(places[kept], kind="stable")]
        if len(order) == size:
            return self.take(order)
        groups = places[order]
        starts = np.searchsorted(groups, np.arange(size))
        pairs = slice(None) if len(kept) == len(self) else (places >= 0).repeat(self.bucket_count)
        of_group, buckets, counts = add_pairs(
            places[kept].repeat(self.bucket_count[kept]),
            self.buckets[pairs],
            self.counts[pairs],
            size,
        )
        columns = np.zeros(size, COLUMNS)
        reductions = {"min": np.fmin, "max": np.fmax}
        for name in (*moments.MOMENTS, "calls", "estimated"):
            merge = reductions.get(name, np.add)
            columns[name] = merge.reduceat(self.columns[name][order], starts)
        columns["bucket_count"] = np.bincount(of_group, minlength=size)
        columns["unit_count"], units = self._merged_units(order, groups, starts)
        return Rows(columns, buckets, counts, units)

    def _merged_units(self, order: Column, groups: Column, starts: Column) -> tuple[Column, Column]:
        """Return the numbers of units and the units of groups; none where numbers differ."""
        counts = self.unit_count[order]
        sizes = counts[starts]
        sizes = np.where(np.maximum.reduceat(counts, starts) == sizes, sizes, 0)
        sizes = np.where(np.minimum.reduceat(counts, starts) == sizes, sizes, 0)
        ends, some = np.cumsum(sizes), np.flatnonzero(sizes[groups])
        units = np.tile(NO_VALUES, (sizes.sum(), 1))
        turns = (np.arange(len(order)) - starts[groups])[some]
        for turn in range(turns.max(initial=-1) + 1):  # the first row of each group, the second ...
            rows = some[turns == turn]
            into = _places(ends, sizes, groups[rows])
            given = self.units[_places(self._unit_ends, self.unit_count, order[rows])]
            units[into, 0] = np.minimum(units[into, 0], given[:, 0])
            units[into, 1] = np.maximum(units[into, 1], given[:, 1])
        return sizes, units

    def scaled(self, factors: NDArray[np.float64]) -> Rows:
        """Return the rows of all elements times each row's positive, finite factor.

        Counts are exact if the factor is a power of two, else up to half a bucket off. Values that
        leave or enter the range of normal float32 numbers stay in the outermost buckets.
        """
        shifts = np.rint(BUCKETS_PER_OCTAVE * np.log2(factors)).astype(np.int64)
        moved = np.abs(self.buckets.astype(np.int64)) + shifts.repeat(self.bucket_count)
        moved = np.sign(self.buckets) * np.clip(moved, 1, LAST_BUCKET)
        rows = np.arange(len(self)).repeat(self.bucket_count)
        of_row, buckets, counts = add_pairs(rows, moved, self.counts, len(self))
        columns = self.columns.copy()
        columns["bucket_count"] = np.bincount(of_row, minlength=len(self))
        with np.errstate(all="ignore"):
            for name in moments.EXTREMES:
                columns[name] *= factors
            for power, name in enumerate(moments.POWER_SUMS, 1):
                columns[name] *= factors**power
            units = self.units * factors.repeat(self.unit_count).astype(np.float32)[:, None]
        return Rows(columns, buckets, counts, units)


def _fields(columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return a view ``[rows, fields]``."""
    return columns.view(np.int64).reshape(len(columns), len(columns.dtype.names or ()))


def _places(ends: Column, sizes: Column, rows: Column) -> Any:
    """Return an index of the items of these rows; row ``i`` of all has ``sizes[i]`` items."""
    taken = sizes[rows]
    begins = ends[rows] - taken
    if len(rows) and (begins[1:] == ends[rows[:-1]]).all():  # they lie side by side
        return slice(begins[0], ends[rows[-1]])
    shifts = ends[rows] - np.cumsum(taken)
    return shifts.repeat(taken) + np.arange(taken.sum())


def add_pairs(
    rows: Column, buckets: Column, counts: Column, size: int
) -> tuple[Column, Column, Column]:
    """Return row and bucket of each pair that occurs, ascending, and the sum of its counts."""
    low, high = np.full(size, LAST_BUCKET), np.full(size, -LAST_BUCKET - 1)
    buckets = buckets.astype(np.int64)
    np.minimum.at(low, rows, buckets)
    np.maximum.at(high, rows, buckets)
    ends = np.cumsum(np.maximum(high - low + 1, 0))
    begins = ends - np.maximum(high - low + 1, 0)
    totals = np.bincount((begins - low)[rows] + buckets, counts, minlength=ends[-1] if size else 0)
    filled = np.flatnonzero(totals)
    row = np.searchsorted(ends, filled, side="right")
    return row, (filled - begins[row] + low[row]).astype(np.int16), totals[filled]

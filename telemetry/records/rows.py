"""What was measured of many tensors, as columns: each tensor is a row.

The bytes that :meth:`Rows.decode` takes are the one format in which processors and accelerators
hand over what they have measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.records.buckets import BUCKETS_PER_OCTAVE, LAST_BUCKET
from telemetry.records.moments import (
    COUNTS,
    EXTREMES,
    FIGURES,
    POWER_SUMS,
    finite_of,
    merge_figures,
    std_of,
)

# Of each tensor the fields of :class:`Moments`; ``sampled``: -1 if the pairs count all finite
# values, else how many of those that are not zero they count, for a sample; how many pairs and how
# many units it has.
HEAD = np.dtype(
    [(name, "i8") for name in COUNTS]
    + [(name, "f8") for name in (*EXTREMES, *POWER_SUMS)]
    + [(name, "i8") for name in ("sampled", "bucket_count", "unit_count")]
)
# A bucket that is not empty, see :func:`~telemetry.records.buckets.bucket_indices`, and how many
# values are in it. Those of a tensor ascend. In a sample, the zeros of the head stand for bucket 0.
PAIR = np.dtype([("count", "u4"), ("bucket", "i2"), ("", "V2")])
# Smallest and largest value of a unit; NaN if it has one.
UNIT = np.dtype(("f4", 2))

# More than there are buckets.
_CODES = 2 * (LAST_BUCKET + 1)

Column = NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """What was measured of some tensors.

    Attributes:
        count, nan_count, positive_inf_count, negative_inf_count, zero_count: As in
            :class:`~telemetry.records.moments.Moments`, int64 ``[rows]``.
        min, max, sum, sum_squares, sum_cubes, sum_fourth_powers: Likewise, float64 ``[rows]``.
        calls: How many tensors each row stands for, int64 ``[rows]``.
        bucket_count: How many buckets hold anything, int64 ``[rows]``.
        buckets: These, row after row and ascending in each, int16.
        counts: Finite values in each of them, float64; fractional where a sample was scaled up.
        unit_count: How many units were told apart, int64 ``[rows]``.
        units: Smallest and largest value of each, row after row, float32 ``[..., 2]``.
    """

    count: Column
    nan_count: Column
    positive_inf_count: Column
    negative_inf_count: Column
    zero_count: Column
    min: Column
    max: Column
    sum: Column
    sum_squares: Column
    sum_cubes: Column
    sum_fourth_powers: Column
    calls: Column
    bucket_count: Column
    buckets: NDArray[np.int16]
    counts: NDArray[np.float64]
    unit_count: Column
    units: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.count)

    @staticmethod
    def decode(
        heads: bytes | bytearray, pairs: bytes | bytearray, units: bytes | bytearray
    ) -> Rows:
        """Rows of :data:`HEAD`, with their :data:`PAIR` and :data:`UNIT` one after the other."""
        head, pair = np.frombuffer(heads, HEAD), np.frombuffer(pairs, PAIR)
        rows = Rows(
            **{name: head[name] for name in (*FIGURES, "bucket_count", "unit_count")},
            calls=np.ones(len(head), np.int64),
            buckets=np.ascontiguousarray(pair["bucket"]),
            counts=pair["count"].astype(np.float64),
            units=np.frombuffer(units, UNIT),
        )
        sampled = head["sampled"]
        if (sampled >= 0).any():
            some = np.flatnonzero(sampled > 0)
            scale = np.ones(len(rows))
            scale[some] = (finite_of(rows) - rows.zero_count)[some] / sampled[some]
            rows.counts[:] *= scale.repeat(rows.bucket_count)
            zeros = np.where(sampled >= 0, rows.zero_count, 0).repeat(rows.bucket_count)
            np.copyto(rows.counts, zeros, where=(rows.buckets == 0) & (zeros > 0))
        return rows

    def encode(self) -> tuple[bytes, bytes, bytes]:
        """What :meth:`decode` takes, of rows whose counts are whole numbers below 2^32."""
        head, pair = np.empty(len(self), HEAD), np.zeros(len(self.buckets), PAIR)
        for name in (*FIGURES, "bucket_count", "unit_count"):
            head[name] = getattr(self, name)
        head["sampled"] = -1
        pair["bucket"], pair["count"] = self.buckets, self.counts
        return head.tobytes(), pair.tobytes(), self.units.tobytes()

    @staticmethod
    def of(histograms: Sequence[Any], calls: Sequence[int] = (), units: Any = ()) -> Rows:
        """Of each a :class:`~telemetry.records.sketch.Sketch`; one call and no units if not given.

        Args:
            histograms: The sketches.
            calls: Of each.
            units: Of each the extremes of its units, float32 ``[units, 2]``; None: it has none.
        """
        none = np.empty((0, 2), np.float32)
        units = [none if one is None else one for one in units or [None] * len(histograms)]
        return Rows(
            **{
                name: np.array([getattr(one, name) for one in histograms], HEAD[name])
                for name in FIGURES
            },
            calls=np.array(calls or [1] * len(histograms), np.int64),
            bucket_count=np.array([len(one.buckets) for one in histograms], np.int64),
            buckets=_joined([one.buckets for one in histograms], np.empty(0, np.int16)),
            counts=_joined([one.counts for one in histograms], np.empty(0)),
            unit_count=np.array([len(one) for one in units], np.int64),
            units=_joined(units, none),
        )

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """The rows of all, one after the other; at least one part."""
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in fields(Rows)]
        return Rows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})

    def moments(self, row: int) -> dict[str, Any]:
        """The arguments of :class:`~telemetry.records.moments.Moments` for one row."""
        return {name: getattr(self, name)[row].item() for name in FIGURES}

    def span(self, row: int) -> slice:
        """Where in :attr:`buckets` and :attr:`counts` those of one row are."""
        return slice(self._bucket_ends[row] - self.bucket_count[row], self._bucket_ends[row])

    def units_of(self, row: int) -> NDArray[np.float32] | None:
        """Smallest and largest value of each unit of a row, ``[units, 2]``; None without units."""
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
        """How far the values lie apart, and not from zero.

        The standard deviation; or half of each unit's range, as a root mean square over the units,
        where that is less. No standard deviation of a unit is more (Popoviciu's inequality). So a
        unit that has the same value for every input, however large, adds nothing. NaN if no value
        is finite.
        """
        std: NDArray[np.float64] = std_of(self)
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
        """These rows, in this order."""
        if len(rows) == len(self) and (rows == np.arange(len(self))).all():
            return self
        names = (*FIGURES, "calls", "bucket_count", "unit_count")
        pairs = _places(self._bucket_ends, self.bucket_count, rows)
        return Rows(
            **{name: getattr(self, name)[rows] for name in names},
            buckets=self.buckets[pairs],
            counts=self.counts[pairs],
            units=self.units[_places(self._unit_ends, self.unit_count, rows)],
        )

    def merged(self, places: NDArray[np.int64], size: int) -> Rows:
        """Rows as if all tensors of a place had been one; units only if each has as many.

        Args:
            places: Which of the new rows each becomes part of, ``[rows]``; left out if negative.
            size: How many there are; each has a part.
        """
        order = np.argsort(places, kind="stable")
        order = order[places[order] >= 0]
        rows = self.take(order)
        if len(order) == size:
            return rows
        starts = np.searchsorted(places[order], np.arange(size))
        groups = np.repeat(np.arange(size), np.diff(starts, append=len(order)))
        codes = groups.repeat(rows.bucket_count) * _CODES + rows.buckets + LAST_BUCKET
        of_group, buckets, counts = _added(codes, rows.counts)
        units = [rows._merged_units(first, end) for first, end in pairwise([*starts, len(order)])]
        return Rows(
            **merge_figures(vars(rows), starts),
            calls=np.add.reduceat(rows.calls, starts),
            bucket_count=np.bincount(of_group, minlength=size),
            buckets=buckets,
            counts=counts,
            unit_count=np.array([len(one) for one in units]),
            units=np.concatenate(units),
        )

    def _merged_units(self, first: int, end: int) -> NDArray[np.float32]:
        """Of neighbouring rows; empty if they have not equally many."""
        sizes = self.unit_count[first:end]
        if (sizes != sizes[0]).any():
            return self.units[:0]
        last = self._unit_ends[end - 1]
        parts = self.units[last - sizes.sum() : last].reshape(end - first, -1, 2)
        return np.stack([parts[..., 0].min(axis=0), parts[..., 1].max(axis=0)], axis=1)

    def scaled(self, factors: NDArray[np.float64]) -> Rows:
        """As if all elements of each row had been multiplied by its positive, finite factor.

        Counts are exact if a factor is a power of two, and else up to half a bucket off; values
        that leave or enter the range of normal float32 numbers stay in the outermost buckets.
        """
        powers = {name: factors**power for power, name in enumerate(POWER_SUMS, 1)}
        powers |= dict.fromkeys(EXTREMES, factors)
        shifts = np.rint(BUCKETS_PER_OCTAVE * np.log2(factors)).astype(np.int64)
        moved = np.abs(self.buckets.astype(np.int64)) + shifts.repeat(self.bucket_count)
        moved = np.sign(self.buckets) * np.clip(moved, 1, LAST_BUCKET)
        rows = np.arange(len(self)).repeat(self.bucket_count)
        of_row, buckets, counts = _added(rows * _CODES + moved + LAST_BUCKET, self.counts)
        kept = {field.name: getattr(self, field.name) for field in fields(Rows)}
        with np.errstate(all="ignore"):
            scaled = {name: kept[name] * by for name, by in powers.items()}
            units = self.units * factors.repeat(self.unit_count).astype(np.float32)[:, None]
        bucket_count = np.bincount(of_row, minlength=len(self))
        changed = {"buckets": buckets, "counts": counts, "bucket_count": bucket_count}
        return Rows(**{**kept, **scaled, **changed, "units": units})


def _joined(parts: Sequence[Any], empty: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([empty, *parts]).astype(empty.dtype, copy=False)


def _places(ends: Column, sizes: Column, rows: Column) -> NDArray[np.int64]:
    """Where the items of these rows are, of which each row has ``sizes``."""
    taken = sizes[rows]
    shifts = ends[rows] - np.cumsum(taken)
    places: NDArray[np.int64] = shifts.repeat(taken) + np.arange(taken.sum())
    return places


def _added(codes: Column, counts: Column) -> tuple[Column, Column, Column]:
    """Row and bucket of each code that occurs, ascending, and the sum of its counts."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    row, bucket = np.divmod(ordered[starts], _CODES)
    total = np.add.reduceat(counts[order], starts) if len(starts) else counts[:0]
    return row, (bucket - LAST_BUCKET).astype(np.int16), total

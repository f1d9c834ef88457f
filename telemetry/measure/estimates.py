"""Completes the rows of samples with figures of all elements; on the host, for :mod:`device`."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.records import moments
from telemetry.records.buckets import bucket_indices
from telemetry.records.rows import Rows, add_pairs

# With a root mean square below this, squares vanish in float32; those of samples are in float64.
_SMALLEST_RMS = 1e-17

_NONFINITE = moments.COUNTS[1:4]

Column = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Figures of all elements, ``[rows]``.

    Attributes:
        powers: Number of power sums to return, 2 or 4.
        norm: L2 norm, maybe added up in float32; and ``total`` the sum of the elements.
        sizes: Extremes of each row: one for each unit, or one.
        lows: Smallest values, row after row, ``[sum of sizes]``; and ``highs`` the largest. NaN
            where there is one.
    """

    count: NDArray[np.int64]
    powers: NDArray[np.int64]
    has_units: NDArray[np.bool_]
    norm: NDArray[np.float64]
    total: NDArray[np.float64]
    sizes: NDArray[np.int64]
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]


@np.errstate(all="ignore")
def completed(sample: Rows, exact: Exact) -> Rows:
    """Return the rows of tensors from those of their samples.

    Exact: whether a value is not finite. Where all are finite: the extremes, sum, norm, and whether
    all are zeros, or none. Estimates: other counts, the histogram, third and fourth powers; sum and
    norm if a value is not finite or squares leave the range of float32.
    """
    starts = np.cumsum(exact.sizes) - exact.sizes
    lows, highs = exact.lows, exact.highs
    low, high = np.minimum.reduceat(lows, starts), np.maximum.reduceat(highs, starts)
    is_finite = np.isfinite(low) & np.isfinite(high)
    # Of finite values, as far as known. Those of the sample are rounded, up to 2^-9 beyond.
    least = np.fmin.reduceat(np.where(np.isfinite(lows), lows, nan), starts)
    most = np.fmax.reduceat(np.where(np.isfinite(highs), highs, nan), starts)
    low = np.where(is_finite, low, np.fmin(least, sample.min))
    high = np.where(is_finite, high, np.fmax(most, sample.max))
    low, high = np.fmin(low, high), np.fmax(low, high)  # of a NaN and a number, the number

    columns = sample.columns.copy()
    columns["estimated"] = 1
    columns["count"], columns["min"], columns["max"] = exact.count, low, high
    number = _count_nonfinite(columns, sample, exact, starts, is_finite)
    zeros = _count_zeros(columns, sample, exact, starts, number)
    _sum_powers(columns, sample, exact, starts, number, is_finite)
    of_row, buckets, counts = _histogram(columns, sample, number, zeros)
    columns["bucket_count"] = np.bincount(of_row, minlength=len(sample))
    columns["unit_count"] = np.where(exact.has_units, exact.sizes, 0)
    is_unit = exact.has_units.repeat(exact.sizes)
    units = np.stack([lows[is_unit], highs[is_unit]], axis=1).astype(np.float32)
    return Rows(columns, buckets, counts, units)


def _units_with(marks: NDArray[np.bool_], starts: Column) -> Column:
    """Count for each row."""
    return np.add.reduceat(marks.astype(np.float64), starts)


def _some(columns: Column) -> Column:
    """Return how many values the extremes prove to be other than zero."""
    return (columns["min"] < 0).astype(np.int64) + (columns["max"] > 0)


def _count_nonfinite(
    columns: Column, sample: Rows, exact: Exact, starts: Column, is_finite: Column
) -> Column:
    """Fill in NaN and infinities, at least those that extremes prove; return the finite ones."""
    scale = exact.count / sample.count
    proved = np.isnan(exact.lows), exact.highs == np.inf, exact.lows == -np.inf
    for name, is_proved in zip(_NONFINITE, proved, strict=True):
        least = _units_with(is_proved, starts)
        columns[name] = np.where(is_finite, 0, np.maximum(np.rint(columns[name] * scale), least))
    # Estimates leave room for the finite extremes.
    needed = np.maximum(_some(columns), np.isfinite(columns["min"]))
    room = np.maximum(needed - (exact.count - sum(columns[name] for name in _NONFINITE)), 0)
    for name in _NONFINITE:
        taken = np.minimum(room, columns[name])
        columns[name] -= taken
        room -= taken
    finite: Column = exact.count - sum(columns[name] for name in _NONFINITE)
    return finite


def _count_zeros(
    columns: Column, sample: Rows, exact: Exact, starts: Column, number: Column
) -> Column:
    """Fill in and return the zeros: an estimate, unless none or all are."""
    dead = _units_with((exact.lows == 0) & (exact.highs == 0), starts)
    zeros = np.rint(np.maximum(sample.zero_count / sample.count, dead / exact.sizes) * exact.count)
    has_none = (columns["min"] > 0) | (columns["max"] < 0)
    zeros = np.where(has_none, 0, np.minimum(zeros, number - _some(columns)))
    columns["zero_count"] = zeros = np.where(_some(columns) == 0, number, zeros)
    return zeros


def _sum_powers(
    columns: Column, sample: Rows, exact: Exact, starts: Column, number: Column, is_finite: Column
) -> None:
    """Fill in the power sums.

    The shape of the distribution is the sample's, its mean and deviation are those of all elements.
    Extremes of units are elements, which bound the fourth moment from below: a few huge ones that
    the sample does not have are not overlooked.
    """
    sampled, lows, highs = moments.finite_of(sample), exact.lows, exact.highs
    share = np.where(sampled > 0, number / sampled, 0)
    is_normed = is_finite & np.isfinite(exact.norm)
    is_normed &= exact.norm >= _SMALLEST_RMS * np.sqrt(exact.count)
    least = np.where(number > 0, np.fmax(columns["min"] ** 2, columns["max"] ** 2), 0)
    squares = np.where(is_normed, exact.norm**2, np.fmax(sample.sum_squares * share, least))
    is_summed = is_finite & np.isfinite(exact.total)
    total = np.where(is_summed, exact.total, sample.sum * share)
    columns["sum"], columns["sum_squares"] = total, squares

    mean = total / number
    std = np.sqrt(np.maximum(squares / number - mean**2, 0))
    deviation = moments.std_of(sample)
    z = moments.mean_of(sample) / deviation
    skew = sample.sum_cubes / sampled / deviation**3 - 3 * z - z**3
    rows = np.arange(len(sample)).repeat(exact.sizes)
    far = np.where(np.isfinite(lows), (lows - mean[rows]) / std[rows], 0) ** 4
    is_other = np.isfinite(highs) & (highs != lows)
    far += np.where(is_other, (highs - mean[rows]) / std[rows], 0) ** 4
    kurtosis = np.fmax(moments.kurtosis_of(sample), np.add.reduceat(far, starts) / number)
    third = skew * std**3 + 3 * mean * std**2 + mean**3
    fourth = kurtosis * std**4 + 4 * mean * skew * std**3 + 6 * mean**2 * std**2 + mean**4
    columns["sum_cubes"] = np.where(exact.powers == 4, third * number, nan)
    columns["sum_fourth_powers"] = np.where(exact.powers == 4, fourth * number, nan)


def _histogram(
    columns: Column, sample: Rows, number: Column, zeros: Column
) -> tuple[Column, Column, Column]:
    """Return row, bucket and count of all pairs: the sample's, scaled up, and the extremes."""
    row = np.arange(len(sample)).repeat(sample.bucket_count)
    is_kept = (sample.buckets != 0) | (zeros[row] == 0)
    rows, buckets, weights = [row[is_kept]], [sample.buckets[is_kept]], [sample.counts[is_kept]]
    for name in moments.EXTREMES:
        rows_with = np.flatnonzero((columns[name] != 0) & (number > 0))
        rows.append(rows_with)
        buckets.append(bucket_indices(columns[name][rows_with]))
        weights.append(np.ones(len(rows_with)))
    row, weight = np.concatenate(rows), np.concatenate(weights)
    weight *= ((number - zeros) / np.bincount(row, weight, minlength=len(sample)))[row]
    with_zeros = np.flatnonzero(zeros)
    return add_pairs(
        np.concatenate([row, with_zeros]),
        np.concatenate([*buckets, np.zeros(len(with_zeros), np.int16)]),
        np.concatenate([weight, zeros[with_zeros]]),
        len(sample),
    )

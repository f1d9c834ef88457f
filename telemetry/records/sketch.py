"""Histogram over logarithmic buckets, with exact moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from telemetry.records import moments
from telemetry.records.buckets import LAST_BUCKET, bucket_indices, limits
from telemetry.records.moments import POWER_SUMS
from telemetry.records.rows import Rows

SAMPLE_ELEMENTS = 32_768  # approximately, of a tensor whose sketch is that of a sample

Number = TypeVar("Number")


def _moment(formula: Callable[[Any], Any], kind: Callable[[Any], Number]) -> Number:
    """Return a property with the value of a formula of :mod:`telemetry.records.moments`."""
    return cast("Number", property(lambda sketch: kind(formula(sketch)), doc=formula.__doc__))


@dataclass(frozen=True, kw_only=True, eq=False)
class Sketch:
    """Summary of a tensor's values; :class:`Rows` merges and scales those of several tensors.

    The sums are of the values themselves, not of their distances from the mean, so they add up.
    Formulas with their differences lose digits where the mean is far from zero.

    Attributes:
        count: Number of all elements, including NaN and infinity.
        zero_count: Number of exact zeros, of either sign.
        min: Smallest finite value; NaN without any.
        max: Largest finite value; NaN without any.
        sum: Sum of the finite values, in float64 like the other sums.
        sum_cubes: Sum of third powers; NaN if unknown.
        sum_fourth_powers: Sum of fourth powers; NaN if unknown.
        buckets: Filled buckets, ascending, int16, shape ``[k]``. Bucket ``b > 0`` holds
            ``E[b] <= x < E[b + 1]`` with ``E = edges()``, ``b < 0`` its mirror image, and 0 values
            within ``±E[1]``. The outermost include all finite values beyond them.
        counts: Finite values in each bucket, float64, shape ``[k]``; their sum is
            ``finite_count``. Fractional if a sample was scaled up.
    """

    count: int = 0
    nan_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0
    zero_count: int = 0
    min: float = nan
    max: float = nan
    sum: float = 0.0
    sum_squares: float = 0.0
    sum_cubes: float = 0.0
    sum_fourth_powers: float = 0.0
    buckets: NDArray[np.int16]
    counts: NDArray[np.float64]

    nonfinite_count = _moment(moments.nonfinite_of, int)
    finite_count = _moment(moments.finite_of, int)
    mean = _moment(moments.mean_of, float)
    rms = _moment(moments.rms_of, float)
    std = _moment(moments.std_of, float)
    kurtosis = _moment(moments.kurtosis_of, float)
    norm = _moment(moments.norm_of, float)
    zero_fraction = _moment(moments.zero_fraction_of, float)

    @staticmethod
    def of_row(rows: Rows, row: int) -> Sketch:
        """Return the sketch of one row."""
        values = dict(zip(moments.MOMENTS, rows.columns[row].item(), strict=False))
        buckets, counts = rows.histogram(row)
        return Sketch(**values, buckets=buckets, counts=counts)

    @staticmethod
    def empty() -> Sketch:
        """Return the sketch of no elements; merging with it changes nothing."""
        return Sketch(buckets=np.empty(0, np.int16), counts=np.empty(0, np.float64))

    def quantile(self, q: float) -> float:
        """Return the finite value that a share ``q`` of the finite values does not exceed.

        It is in the same bucket as the exact quantile (NumPy's ``inverted_cdf``), at most 12.5 %
        from it for numbers of 1.3e-38 and more. ``q=0`` and ``q=1`` return the extremes. Values in
        bucket 0 count as 0.

        Raises:
            ValueError: ``q`` is not within 0 and 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"quantile({q}): must be between 0 and 1")
        if not self.counts.size:
            return nan
        below_or_in = np.cumsum(self.counts)
        # Rounding may leave a scaled-up total below the target; it is the last bucket then.
        target = min(q * self.finite_count, below_or_in[-1])
        i = int(np.searchsorted(below_or_in, target))
        bucket = int(self.buckets[i])
        left, right = limits(np.asarray([bucket]))
        if bucket == 0:
            value = 0.0
        else:
            low, high = max(float(left[0]), self.min), min(float(right[0]), self.max)
            share_inside = 1 - (below_or_in[i] - target) / self.counts[i]
            value = low + (high - low) * float(share_inside)
        return min(max(value, self.min), self.max)

    def histogram(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return left edges, right edges and counts, ascending and without gaps, for plots.

        The outer edges are the exact minimum and maximum. One empty bucket represents all between
        two filled ones. Without a finite value the arrays are empty; if all values are equal, the
        bucket has no width.
        """
        left, right = limits(self.buckets)
        if not left.size:
            return left, right, self.counts
        left[0], right[-1] = self.min, self.max
        gaps = np.flatnonzero(left[1:] > right[:-1]) + 1
        begins, ends = right[gaps - 1], left[gaps]
        counts = np.insert(self.counts, gaps, 0.0)
        return np.insert(left, gaps, begins), np.insert(right, gaps, ends), counts


def sketch_array(x: NDArray[Any]) -> Sketch:
    """Return the sketch of a NumPy array of any numeric dtype and shape, in float64 throughout.

    Complex numbers count with their absolute value.

    Raises:
        TypeError: The dtype does not hold numbers.
    """
    x = np.asarray(x)
    if x.dtype.kind not in "biufc":
        raise TypeError(f"sketch_array: cannot take dtype {x.dtype}; convert it to a numeric one")
    if x.dtype.kind == "c":
        x = np.abs(x.astype(np.complex128))
    with np.errstate(over="ignore", invalid="ignore"):  # of sums, and of signaling NaN
        values = x.astype(np.float64).reshape(-1)
        finite = values[np.isfinite(values)]
        squares = finite * finite
        powers = (finite, squares, squares * finite, squares * squares)
        sums = {name: float(power.sum()) for name, power in zip(POWER_SUMS, powers, strict=True)}
    by_bucket = np.bincount(bucket_indices(finite).astype(np.intp) + LAST_BUCKET)
    filled = np.flatnonzero(by_bucket)
    return Sketch(
        count=values.size,
        nan_count=int(np.isnan(values).sum()),
        positive_inf_count=int(np.isposinf(values).sum()),
        negative_inf_count=int(np.isneginf(values).sum()),
        zero_count=int((finite == 0).sum()),
        min=float(finite.min()) if finite.size else nan,
        max=float(finite.max()) if finite.size else nan,
        buckets=(filled - LAST_BUCKET).astype(np.int16),
        counts=by_bucket[filled].astype(np.float64),
        **sums,
    )

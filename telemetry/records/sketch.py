"""A mergeable histogram over logarithmic buckets, with exact moments beside it.

The buckets are those of bfloat16's leading bits: three bits of mantissa, so eight buckets per
octave, at places that do not depend on the data. Counts of two sketches therefore simply add up,
across calls, micro-batches, steps and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log2, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.records.moments import POWER_SUMS, Moments

BUCKETS_PER_OCTAVE = 8

# The largest bucket of a finite number; 2040 would be infinity and above it NaN.
LAST_BUCKET = 2039

# Rounding float32 to bfloat16 keeps the upper 16 bits, to nearest even; the bucket is what is left
# after dropping 4 more. A tie at a bucket's edge has an odd bfloat16 below it and an even one
# above, so it always rounds up: adding half a unit before the shift says the same.
_HALF_BFLOAT16_UNIT = 0x8000
_BUCKET_SHIFT = 20


@cache
def edges() -> NDArray[np.float32]:
    """Lower limits ``E[0..2040]`` of the buckets' magnitudes, float32, read-only.

    Bucket ``j`` holds ``E[j] <= |x| < E[j + 1]``, for a tensor of any dtype, bfloat16 included: an
    edge is half a bfloat16 unit below the first such number of its bucket. ``E[1]`` is 1.42e-39,
    and from 1.3e-38 on an edge is at most 1.125 times the one before it.
    """
    bits = (np.arange(LAST_BUCKET + 2, dtype=np.uint32) << _BUCKET_SHIFT) - _HALF_BFLOAT16_UNIT
    bits[0] = 0
    result = bits.view(np.float32)
    result.flags.writeable = False
    return result


def bucket_indices(finite: NDArray[Any]) -> NDArray[np.int16]:
    """The signed bucket of each number, rounded to float32 first; same shape.

    The sign is that of the number, and 0 stands for ``|x| < E[1]`` of either sign. Magnitudes from
    ``E[2040]`` (3.396e38) on are counted in the last bucket.
    """
    with np.errstate(over="ignore"):
        bits = np.abs(np.asarray(finite).astype(np.float32)).view(np.uint32)
    magnitude = np.minimum((bits + np.uint32(_HALF_BFLOAT16_UNIT)) >> _BUCKET_SHIFT, LAST_BUCKET)
    signed: NDArray[np.int16] = magnitude.astype(np.int16)
    return np.where(np.asarray(finite) < 0, -signed, signed)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sketch(Moments):
    """What is kept of a tensor's values; sketches of several tensors can be merged.

    Attributes:
        buckets: The buckets that hold anything, ascending, int16, shape ``[k]``. Bucket ``b > 0``
            holds ``E[b] <= x < E[b + 1]`` with ``E = edges()``, ``b < 0`` its mirror image, and 0
            what lies within ``±E[1]``. The outermost hold whatever finite lies beyond them.
        counts: Finite values in each of them, float64, shape ``[k]``; they add up to
            ``finite_count``. Fractional where only a sample was counted and scaled up.
    """

    buckets: NDArray[np.int16]
    counts: NDArray[np.float64]

    @staticmethod
    def of(moments: Moments, buckets: NDArray[np.int16], counts: NDArray[np.float64]) -> Sketch:
        """Moments with a histogram."""
        return Sketch(**vars(moments), buckets=buckets, counts=counts)

    @staticmethod
    def empty() -> Sketch:
        """The sketch of no elements; merging with it changes nothing."""
        return Sketch(buckets=np.empty(0, np.int16), counts=np.empty(0, np.float64))

    @staticmethod
    def of_zeros(count: int) -> Sketch:
        """The sketch of so many zeros, at least one."""
        moments = Moments(count=count, zero_count=count, min=0.0, max=0.0)
        return Sketch.of(moments, np.zeros(1, np.int16), np.full(1, float(count)))

    def quantile(self, q: float) -> float:
        """The finite value that a share ``q`` of the finite values does not exceed.

        It lies in the same bucket as the exact one (NumPy's ``inverted_cdf``), at most 12.5 % from
        it for numbers of 1.3e-38 and more. ``q=0`` and ``q=1`` give the extremes. Values within
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
        left, right = _limits(np.asarray([bucket]))
        if bucket == 0:
            value = 0.0
        else:
            low, high = max(float(left[0]), self.min), min(float(right[0]), self.max)
            share_inside = 1 - (below_or_in[i] - target) / self.counts[i]
            value = low + (high - low) * float(share_inside)
        return min(max(value, self.min), self.max)

    def scaled(self, factor: float) -> Sketch:
        """The sketch of the values times a positive, finite factor.

        Counts are exact if the factor is a power of two, and else up to half a bucket off; values
        that leave or enter the range of normal float32 numbers stay in the outermost buckets.
        """
        shift = round(BUCKETS_PER_OCTAVE * log2(factor))
        moved = np.abs(self.buckets.astype(np.int32)) + shift
        moved = np.where(self.buckets == 0, 0, np.clip(moved, 1, LAST_BUCKET))
        buckets, place = np.unique(np.sign(self.buckets) * moved, return_inverse=True)
        return replace(
            super().scaled(factor),
            buckets=buckets.astype(np.int16),
            counts=np.bincount(place, weights=self.counts).astype(np.float64, copy=False),
        )

    def merge(self, other: Sketch) -> Sketch:
        """The sketch of both tensors' values together."""
        return Sketch.merge_all((self, other))

    @staticmethod
    def merge_all(sketches: Iterable[Sketch]) -> Sketch:
        """The sketch of all these tensors' values together; of no elements if there are none."""
        parts = [sketch for sketch in sketches if sketch.count]
        if len(parts) < 2:
            return parts[0] if parts else Sketch.empty()
        dense = np.bincount(
            np.concatenate([part.buckets for part in parts]).astype(np.intp) + LAST_BUCKET,
            weights=np.concatenate([part.counts for part in parts]),
        )
        filled = np.flatnonzero(dense)
        buckets = (filled - LAST_BUCKET).astype(np.int16)
        return Sketch.of(
            Moments.total(parts), buckets, dense[filled].astype(np.float64, copy=False)
        )

    def histogram(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Left edges, right edges and counts, ascending and without gaps, for plots.

        The outer edges are the exact minimum and maximum. Where buckets between two filled ones
        hold nothing, one empty bucket stands for them all. Three empty arrays if there is no finite
        value; a bucket of no width if all are equal.
        """
        left, right = _limits(self.buckets)
        if not left.size:
            return left, right, self.counts
        left[0], right[-1] = self.min, self.max
        ends_before_gap = left[1:] > right[:-1]
        # Where each bucket goes; numpy.insert takes ten times as long.
        places = np.arange(left.size)
        places[1:] += np.cumsum(ends_before_gap)
        gaps = places[:-1][ends_before_gap] + 1
        size = left.size + gaps.size
        all_left, all_right, all_counts = np.empty(size), np.empty(size), np.zeros(size)
        all_left[places], all_right[places], all_counts[places] = left, right, self.counts
        all_left[gaps], all_right[gaps] = right[:-1][ends_before_gap], left[1:][ends_before_gap]
        return all_left, all_right, all_counts


def sketch_array(x: NDArray[Any]) -> Sketch:
    """The sketch of a NumPy array of any numeric dtype and shape, in float64 throughout.

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
    moments = Moments(
        count=values.size,
        nan_count=int(np.isnan(values).sum()),
        positive_inf_count=int(np.isposinf(values).sum()),
        negative_inf_count=int(np.isneginf(values).sum()),
        zero_count=int((finite == 0).sum()),
        min=float(finite.min()) if finite.size else nan,
        max=float(finite.max()) if finite.size else nan,
        **sums,
    )
    buckets = (filled - LAST_BUCKET).astype(np.int16)
    return Sketch.of(moments, buckets, by_bucket[filled].astype(np.float64))


def _limits(buckets: NDArray[np.integer]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Left and right edges of signed buckets, as new float64 arrays; the outermost are infinite."""
    magnitude = np.abs(buckets.astype(np.intp))
    wide = _wide_edges()
    near, far = wide[magnitude], wide[magnitude + 1]
    left = np.where(buckets > 0, near, -far)
    right = np.where(buckets < 0, -near, far)
    return left, right


@cache
def _wide_edges() -> NDArray[np.float64]:
    wide = edges().astype(np.float64)
    wide[-1] = inf
    return wide

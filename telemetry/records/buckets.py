"""Buckets of all histograms: the leading bits of bfloat16, with fixed edges.

Three bits of mantissa make eight buckets per octave. Counts of two histograms therefore add up,
across calls, micro-batches, steps and ranks.
"""

from __future__ import annotations

import math
from functools import cache
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUCKETS_PER_OCTAVE = 8

# The largest bucket of a finite number; 2040 would be infinity and above it NaN.
LAST_BUCKET = 2039

# Rounding float32 to bfloat16 keeps the upper 16 bits, to nearest even; dropping 4 more gives the
# bucket. A tie at a bucket's edge has an odd bfloat16 below it and an even one above, so it always
# rounds up: adding half a unit before the shift is equivalent.
_HALF_BFLOAT16_UNIT = 0x8000
_BUCKET_SHIFT = 20


@cache
def edges() -> NDArray[np.float32]:
    """Return lower limits ``E[0..2040]`` of the buckets' magnitudes, float32, read-only.

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
    """Return the signed bucket of each number, rounded to float32 first; same shape.

    Bucket 0 is ``|x| < E[1]``. Magnitudes from ``E[2040]`` (3.396e38) on are in the last bucket.
    """
    with np.errstate(over="ignore"):
        bits = np.abs(np.asarray(finite).astype(np.float32)).view(np.uint32)
    magnitude = np.minimum((bits + np.uint32(_HALF_BFLOAT16_UNIT)) >> _BUCKET_SHIFT, LAST_BUCKET)
    signed: NDArray[np.int16] = magnitude.astype(np.int16)
    return np.where(np.asarray(finite) < 0, -signed, signed)


@cache
def bucket_of(value: float) -> int:
    """Return the bucket of a number; that of infinity is beyond all others."""
    if math.isinf(value):
        return int(math.copysign(LAST_BUCKET + 1, value))
    return int(bucket_indices(np.array([value]))[0])


def limits(buckets: NDArray[np.integer]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return new float64 arrays of left and right edges; the outermost are infinite."""
    magnitude = np.abs(buckets.astype(np.intp))
    wide = edges().astype(np.float64)
    wide[-1] = inf
    near, far = wide[magnitude], wide[magnitude + 1]
    left = np.where(buckets > 0, near, -far)
    right = np.where(buckets < 0, -near, far)
    return left, right

"""Figures of low precision: values that 8-bit floats lose, and units that stand out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.records.buckets import edges
from telemetry.records.moments import finite_of
from telemetry.records.rows import Rows

# e4m3: the largest number is 448. The smallest above zero is 2^-9, and half of it rounds to zero,
# as a tie to even (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433).
LARGEST_E4M3 = 448.0
_LARGEST_LOST = 2.0**-10


@np.errstate(all="ignore")
def lost_in_fp8(rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Count the values that a scaling of each tensor to the largest number of e4m3 rounds to zero.

    They follow from the histogram: its buckets are an eighth of an octave, and values within the
    bucket of the threshold count as evenly spread. Returned with the numbers of finite values other
    than zero, float64 ``[rows]`` each.
    """
    threshold = np.fmax(-rows.min, rows.max) * (_LARGEST_LOST / LARGEST_E4M3)
    which, magnitudes = np.arange(len(rows)).repeat(rows.bucket_count), np.abs(rows.buckets)
    some = np.flatnonzero(edges().take(magnitudes) < threshold[which])
    which, magnitudes = which[some], magnitudes[some]
    low, high = edges().take([magnitudes, magnitudes + 1]).astype(np.float64)
    shares = np.minimum((threshold[which] - low) / (high - low), 1.0)
    zeros = np.where(magnitudes == 0, rows.zero_count[which], 0)
    counts = shares * np.maximum(rows.counts[some] - zeros, 0)
    lost: NDArray[np.float64] = np.bincount(which, counts, len(rows)).astype(np.float64)
    return lost, (finite_of(rows) - rows.zero_count).astype(np.float64)


@np.errstate(all="ignore")
def outlier_ratio(rows: Rows) -> NDArray[Any]:
    """Return the largest magnitude of any unit over that of the median unit, float64 ``[rows]``.

    NaN where a row has no units, a unit has NaN or no values, or half of the units are zero.
    """
    sizes = np.maximum(-rows.units[:, 0], rows.units[:, 1])
    ratios, starts = np.full(len(rows), np.nan), np.cumsum(rows.unit_count) - rows.unit_count
    for count in {*rows.unit_count.tolist()} - {0}:
        some = np.flatnonzero(rows.unit_count == count)
        ordered = np.sort(sizes[starts[some, None] + np.arange(count)], axis=1)  # NaN last
        lower, upper = ordered[:, (count - 1) // 2].astype(np.float64), ordered[:, count // 2]
        middle = (lower + upper) / 2
        known = (middle > 0) & (ordered[:, 0] >= 0)
        ratios[some] = np.where(known, ordered[:, -1] / middle, np.nan)
    return ratios

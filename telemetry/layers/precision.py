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
    bucket of the threshold count as evenly spread.

    Returns:
        Numbers of lost values, and of finite values other than zero, float64 ``[rows]`` each.
    """
    largest = np.fmax(-rows.min, rows.max)
    threshold = (largest * (_LARGEST_LOST / LARGEST_E4M3)).repeat(rows.bucket_count)
    limits, magnitudes = edges().astype(np.float64), np.abs(rows.buckets.astype(np.intp))
    low, high = limits[magnitudes], limits[magnitudes + 1]
    shares = np.clip((threshold - low) / (high - low), 0.0, 1.0)
    zeros = np.where(magnitudes == 0, rows.zero_count.repeat(rows.bucket_count), 0)
    which = np.arange(len(rows)).repeat(rows.bucket_count)
    counts = shares * np.maximum(rows.counts - zeros, 0)
    lost: NDArray[np.float64] = np.bincount(which, counts, len(rows)).astype(np.float64)
    return lost, (finite_of(rows) - rows.zero_count).astype(np.float64)


@np.errstate(all="ignore")
def outlier_ratio(rows: Rows) -> NDArray[Any]:
    """Return the largest magnitude of any unit over that of the median unit, float64 ``[rows]``.

    NaN where a row has no units, a unit has NaN or no values, or half of the units are zero.
    """
    sizes = np.maximum(-rows.units[:, 0], rows.units[:, 1])
    ratios, starts = np.full(len(rows), np.nan), np.cumsum(rows.unit_count) - rows.unit_count
    for count in np.unique(rows.unit_count[rows.unit_count > 0]).tolist():
        some = np.flatnonzero(rows.unit_count == count)
        ordered = np.sort(sizes[starts[some, None] + np.arange(count)], axis=1)  # NaN last
        middle = ordered[:, [(count - 1) // 2, count // 2]].mean(axis=1, dtype=np.float64)
        known = (middle > 0) & (ordered[:, 0] >= 0)
        ratios[some] = np.where(known, ordered[:, -1] / middle, np.nan)
    return ratios

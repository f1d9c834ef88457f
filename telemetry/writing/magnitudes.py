"""Histograms of log10 |x|: gradients differ by magnitudes, which a linear axis cannot show."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from telemetry.sketch import Sketch, edges


def log10_histogram(
    sketch: Sketch,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Left edges, right edges and counts over log10 of the magnitudes, without gaps.

    Both signs count together; zeros and what lies within the smallest bucket are left out. Three
    empty arrays if nothing remains.
    """
    magnitude = np.abs(sketch.buckets.astype(np.intp))
    counts = np.bincount(magnitude, weights=sketch.counts)[1:].astype(np.float64, copy=False)
    filled = np.flatnonzero(counts)
    if not filled.size:
        return np.empty(0), np.empty(0), np.empty(0)
    first, last = int(filled[0]), int(filled[-1])
    log_limits = _log_edges()[first : last + 2].copy()
    largest = max(abs(sketch.min), abs(sketch.max))
    log_limits[-1] = min(log_limits[-1], np.log10(largest)) if largest > 0 else log_limits[-1]
    return log_limits[:-1], np.maximum(log_limits[1:], log_limits[:-1]), counts[first : last + 1]


@cache
def _log_edges() -> NDArray[np.float64]:
    limits = edges()[1:].astype(np.float64)
    # The last bucket's upper edge is infinite where float32 ends.
    limits[-1] = min(limits[-1], float(np.finfo(np.float32).max))
    return np.log10(limits)

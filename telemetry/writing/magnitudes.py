"""Histograms of log10 |x|: a linear axis cannot show the magnitudes of gradients."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from telemetry.sketch import Sketch, edges


def log10_histogram(
    sketch: Sketch,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Left edges, right edges and counts over log10 of the magnitudes, without gaps.

    Both signs count together. Zeros and values in the smallest bucket are left out; if no other
    value remains, the three arrays are empty.
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
    # The last bucket of float32 has an infinite upper edge.
    limits[-1] = min(limits[-1], float(np.finfo(np.float32).max))
    return np.log10(limits)

"""Histograms of many tensors, with a fixed number of buckets each, in few NumPy calls.

A linear axis cannot show the magnitudes of gradients, so these have a second histogram, of log10
|x|, with a bucket for each octave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from telemetry.events import summaries
from telemetry.events.summaries import FLOAT32_MAX
from telemetry.records.buckets import BUCKETS_PER_OCTAVE, LAST_BUCKET, edges
from telemetry.records.rows import Rows

BUCKETS = 40

Tagged = tuple[Sequence[str], Rows]
"""Tags, and the row of each one's tensor."""
Charts = tuple[NDArray[np.float32], Sequence[int]]
"""Buckets of histograms, and the end of each: arguments of :func:`summaries.histograms`."""

_AT_ONCE = 128


def histograms(rows: Rows) -> Charts:
    """Return the histogram of each row: at most 40 buckets, and one for exact zeros.

    Measured buckets are far narrower near zero than a chart can show. Neighbors become one such
    that each of the 40 has about a fortieth of the values and of the range, halfway between equal
    counts and equal widths. The outer edges are the exact minimum and maximum. One empty bucket
    represents all between two filled ones.
    """
    row_ends = np.cumsum(rows.bucket_count)
    filled = rows.bucket_count > 0
    # Charts have float32: extremes of float64 tensors are clipped, and counts above 2**24 rounded.
    span = np.clip([rows.min, rows.max], -FLOAT32_MAX, FLOAT32_MAX)
    left, right = _limits(rows)
    starts = _starts(rows, span, left, right)
    ends = np.searchsorted(starts, row_ends)
    counts = np.add.reduceat(rows.counts, starts) if len(starts) else rows.counts
    left, right = left[starts], right[np.append(starts[1:], len(right))[: len(starts)] - 1]
    is_last = np.zeros(len(starts) + 1, np.bool_)
    is_last[ends - 1] = True
    behind = np.flatnonzero((left[1:] > right[:-1]) & ~is_last[: len(starts) - 1])
    source = np.ones(len(starts) + len(behind), np.intp)
    gaps = behind + np.arange(1, len(behind) + 1)
    source[gaps] = 0
    source = source.cumsum() - 1
    charts = np.empty((len(source), 3), np.float32)
    charts[:, 0], charts[:, 1] = left.take(source), right.take(source)
    charts[:, 2] = counts.take(source)
    charts[gaps, 0], charts[gaps, 1], charts[gaps, 2] = charts[gaps - 1, 1], charts[gaps + 1, 0], 0
    ends = ends + np.searchsorted(behind, ends)
    charts[ends[filled] - 1, 1] = span[1, filled]
    charts[np.concatenate([[0], ends[:-1]])[filled], 0] = span[0, filled]
    return charts, ends.tolist()


def _limits(rows: Rows) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the left and right edge of each measured bucket."""
    buckets = rows.buckets.astype(np.intp)
    near = edges().take(np.abs(buckets))
    far = edges().take(np.minimum(np.abs(buckets), LAST_BUCKET) + 1)
    return np.where(buckets > 0, near, -far), np.where(buckets < 0, -near, far)


def _starts(
    rows: Rows,
    span: NDArray[np.float64],
    left: NDArray[np.float32],
    right: NDArray[np.float32],
) -> NDArray[np.intp]:
    """Return the places of the measured buckets that begin a bucket of a histogram."""
    which = np.arange(len(rows)).repeat(rows.bucket_count)
    first = (np.cumsum(rows.bucket_count) - rows.bucket_count)[which]
    low, high = span[:, which]
    with np.errstate(all="ignore"):  # an empty range
        middle = (np.clip(left, low, high) + np.clip(right, low, high)) / 2
        of_range = np.nan_to_num((middle - low) / (high - low))
        shares = rows.counts / np.bincount(which, rows.counts, len(rows))[which]
        of_values = np.cumsum(shares) - shares / 2
        of_values -= (of_values - shares / 2)[first]
    # Rounded, since the error of the sum depends on the rows before.
    places = np.round((of_values + of_range) * (BUCKETS / 2), 9)
    places = np.minimum(places, BUCKETS - 1).astype(np.intp)
    keys = np.stack([which, places, rows.buckets == 0])
    begins = np.ones(len(which), np.bool_)
    begins[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    return np.flatnonzero(begins)


def log10_histograms(rows: Rows) -> Charts:
    """Return buckets over log10 of the magnitudes, one for each octave, without gaps.

    Both signs count together. Zeros and values in the smallest bucket are omitted; each row must
    have others.
    """
    lengths = rows.bucket_count
    starts = np.cumsum(lengths) - lengths
    magnitudes = -(-np.abs(rows.buckets.astype(np.intp)) // BUCKETS_PER_OCTAVE)
    lowest = np.minimum.reduceat(np.where(magnitudes, magnitudes, LAST_BUCKET), starts)
    sizes = np.maximum.reduceat(magnitudes, starts) - lowest + 1
    ends = np.cumsum(sizes)
    shifts = ends - sizes - lowest  # from a magnitude to its place among all
    counted = magnitudes > 0
    counts = np.bincount((magnitudes + shifts.repeat(lengths))[counted], rows.counts[counted])
    charts = np.empty((len(counts), 3), np.float32)
    lower, upper = _log10_limits()
    places = np.arange(len(counts)) - shifts.repeat(sizes)
    charts[:, 0], charts[:, 1] = lower.take(places), upper.take(places)
    charts[:, 2] = counts
    last = ends - 1
    largest = np.log10(np.maximum(np.abs(rows.min), np.abs(rows.max)))
    charts[last, 1] = np.maximum(np.minimum(charts[last, 1], largest), charts[last, 0])
    return charts, ends.tolist()


@cache
def _log10_limits() -> NDArray[np.float32]:
    """Return the lower and upper log10 of each octave; that of bucket 0 is not used."""
    fine = edges().astype(np.float64)
    limits = np.concatenate([fine[1:2], fine[1 : LAST_BUCKET + 1 : BUCKETS_PER_OCTAVE], fine[-1:]])
    # The last bucket of float32 has an infinite upper edge.
    limits[-1] = min(limits[-1], FLOAT32_MAX)
    return np.stack([np.log10(limits[:-1]), np.log10(limits[1:])]).astype(np.float32)


def histogram_values(
    tags: Sequence[str], rows: Rows, charts_of: Callable[[Rows], Charts] = histograms
) -> Iterator[Sequence[bytes]]:
    """Yield histograms of all tensors, some at a time."""
    for first in range(0, len(tags), _AT_ONCE):
        some = tags[first : first + _AT_ONCE]
        part = rows.take(np.arange(first, first + len(some)))
        yield summaries.histograms(some, *charts_of(part))


def log10_histogram_values(tags: Sequence[str], rows: Rows) -> Iterator[Sequence[bytes]]:
    """Yield histograms of log10 |x| of the tensors that have values other than zero."""
    which = np.arange(len(rows)).repeat(rows.bucket_count)
    filled = np.flatnonzero(np.bincount(which, rows.buckets != 0, len(rows)))
    some = [tags[row] for row in filled.tolist()]
    return histogram_values(some, rows.take(filled), log10_histograms)

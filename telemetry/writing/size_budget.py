"""Size budget of a step: its histograms and pictures, which are nearly all of its bytes.

Each NumPy call builds histograms of many tensors: of the values, and of log10 |x|. A linear axis
cannot show the magnitudes of gradients, so these have a second histogram, with a bucket per octave.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.events import summaries
from telemetry.events.summaries import FLOAT32_MAX
from telemetry.measure.images import encode_png
from telemetry.records.buckets import BUCKETS_PER_OCTAVE, LAST_BUCKET, edges
from telemetry.records.rows import Rows

log = logging.getLogger(__name__)

Picture = tuple[str, NDArray[np.uint8]]
"""Tag, and pixels ``[height, width, 3]``."""
Tagged = tuple[Sequence[str], Rows]
"""Tags, and the row of each one's tensor."""
Charts = tuple[NDArray[Any], Sequence[int]]
"""Buckets of histograms, and the end of each: arguments of :func:`summaries.histograms`."""

# Numbers of neighboring buckets that may become one.
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_PICTURES_SHARE = 1 / 3
_HISTOGRAM_BYTES = 80  # of a histogram without its tag and its rows
_ROW_BYTES, _CLASSIC_ROW_BYTES = 12, 16
_AT_ONCE = 128


class SizeBudget:
    """Limit of the bytes that the histograms and pictures of each step take.

    Pictures take at most a third of it. Those that fit are written, and the next step continues
    with the others; a picture that does not fit alone is written at half its size, or less.
    Histograms that do not fit get wider buckets: up to 32 neighbors, four octaves, become one.
    Those of magnitudes are then omitted, which is logged once. If that is not enough, tags take
    turns.

    Args:
        max_bytes: Limit per step; None: no limit.
        classic: Use torch's format.
    """

    def __init__(self, *, max_bytes: int | None = None, classic: bool = False) -> None:
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._classic = classic
        self._row_bytes = _CLASSIC_ROW_BYTES if classic else _ROW_BYTES
        self._next_picture = self._next_histogram = 0
        self._logs_omitted = True

    def values_of(
        self,
        pictures: Sequence[Picture],
        tensors: Tagged,
        magnitudes: Tagged,
    ) -> Iterator[Sequence[bytes]]:
        """Yield pictures, histograms, and histograms of magnitudes of one step, some at a time."""
        drawn = list(self._fitting(pictures, self._max_bytes * _PICTURES_SHARE))
        yield drawn
        yield from self._coarse(*tensors, magnitudes, self._max_bytes - sum(map(len, drawn)))

    def picture(self, tag: str, pixels: NDArray[np.uint8]) -> bytes:
        """Return one picture."""
        png, (height, width, _) = encode_png(pixels), pixels.shape
        if self._classic:
            return summaries.classic_image(tag, png, width, height)
        return summaries.image(tag, [png], width, height)

    def _fitting(self, pictures: Sequence[Picture], room: float) -> Iterator[bytes]:
        left = room
        for _ in pictures:
            tag, pixels = pictures[self._next_picture % len(pictures)]
            value = self.picture(tag, pixels)
            while len(value) > room and pixels.size > 3:
                pixels = pixels[::2, ::2]
                value = self.picture(tag, pixels)
            left -= len(value)
            if left < 0:
                return
            self._next_picture = (self._next_picture + 1) % len(pictures)
            yield value

    def _coarse(
        self, tags: Sequence[str], rows: Rows, magnitudes: Tagged, room: float
    ) -> Iterator[Sequence[bytes]]:
        merged = self._width(tags, rows, room)
        if merged > 1 and magnitudes[0]:
            self._log_omitted()
        if turn := self._next_histogram % max(1, len(tags)):
            tags = [*tags[turn:], *tags[:turn]]
            rows = rows.take(np.roll(np.arange(len(tags)), -turn))
        for values in histogram_values(tags, rows, merged=merged, classic=self._classic):
            some, room = _within(values, room)
            self._next_histogram = turn = (turn + len(some)) % len(tags)
            yield some
            if room < 0:
                return
        if merged > 1:
            return
        for values in log10_histogram_values(*magnitudes, classic=self._classic):
            some, room = _within(values, room)
            yield some
            if room < 0:
                return self._log_omitted()

    def _log_omitted(self) -> None:
        if self._logs_omitted:
            log.warning(
                "telemetry: histograms of gradients' magnitudes (grad_log10/...) are omitted, "
                "because they exceed max_bytes_per_step=%s",
                self._max_bytes,
            )
        self._logs_omitted = False

    def _width(self, tags: Sequence[str], rows: Rows, room: float) -> int:
        """Return the smallest bucket width with which all histograms fit, or the largest one."""
        room -= sum(map(len, tags)) + _HISTOGRAM_BYTES * len(tags)
        most = room / self._row_bytes
        if 2 * len(rows.buckets) <= most:  # between two of them there is at most one row more
            return 1
        place = bisect_left(_WIDTHS, True, key=lambda width: row_count(rows, width) <= most)
        return _WIDTHS[min(place, len(_WIDTHS) - 1)]


def _within(values: Sequence[bytes], room: float) -> tuple[Sequence[bytes], float]:
    """Return the first values that take at most ``room`` bytes; the room is below 0 if not all."""
    sizes = [*accumulate(map(len, values))]
    return values[: bisect_right(sizes, room)], room - sizes[-1]


def histogram_values(
    tags: Sequence[str], rows: Rows, *, merged: int = 1, classic: bool = False
) -> Iterator[Sequence[bytes]]:
    """Yield histograms of all tensors, some at a time, with ``merged`` buckets in one."""
    return _values(tags, rows, partial(histograms, merged=merged), classic)


def log10_histogram_values(
    tags: Sequence[str], rows: Rows, *, classic: bool = False
) -> Iterator[Sequence[bytes]]:
    """Yield histograms of log10 |x| of the tensors that have values other than zero."""
    filled = np.unique(np.arange(len(rows)).repeat(rows.bucket_count)[rows.buckets != 0])
    return _values([tags[row] for row in filled], rows.take(filled), log10_histograms, classic)


def _values(
    tags: Sequence[str],
    rows: Rows,
    charts_of: Callable[[Rows], Charts],
    classic: bool,
    at_once: int = _AT_ONCE,
) -> Iterator[Sequence[bytes]]:
    for some, part in _parts(tags, rows, at_once):
        buckets, ends = charts_of(part)
        if buckets.dtype == np.float64 and len(some) > 1:  # one of them may be the reason
            yield from _values(some, part, charts_of, classic, at_once=1)
        elif classic:
            sums = zip(part.sum.tolist(), part.sum_squares.tolist(), strict=True)
            yield summaries.classic_histograms(some, buckets, ends, sums)
        else:
            yield summaries.histograms(some, buckets, ends)


def _parts(tags: Sequence[str], rows: Rows, at_once: int = _AT_ONCE) -> Iterator[Tagged]:
    for first in range(0, len(tags), at_once):
        some = slice(first, first + at_once)
        yield tags[some], rows.take(np.arange(len(tags))[some])


def row_count(rows: Rows, merged: int) -> int:
    """Return the number of rows that :func:`histograms` returns, or slightly more."""
    rises = np.diff(_merged_buckets(merged).take(rows.buckets))
    gaps = np.count_nonzero(rises > 1)  # some may be where one ends and another begins
    lengths = rows.bucket_count[rows.bucket_count > 0]
    rises[np.cumsum(lengths)[:-1] - 1] = 1
    return int(len(lengths) > 0) + int(np.count_nonzero(rises)) + int(gaps)


@cache
def _merged_buckets(merged: int) -> NDArray[np.int16]:
    """Return the merged bucket of each bucket; those below 0 have the last places.

    Bucket 0 stays alone; ``k > 0`` is ``merged`` buckets from ``(k - 1) * merged + 1`` on.
    """
    magnitudes = -(-np.arange(LAST_BUCKET + 1) // merged)
    return np.concatenate([magnitudes, -magnitudes[:0:-1]]).astype(np.int16)


def _merged(
    rows: Rows, merged: int
) -> tuple[NDArray[np.int16], NDArray[np.intp], NDArray[np.intp]]:
    """Return the merged buckets of all rows, the begin of each, and the end of each row."""
    ends = np.cumsum(rows.bucket_count)
    if merged == 1:
        return rows.buckets, np.arange(len(rows.buckets)), ends
    coarse = _merged_buckets(merged).take(rows.buckets)
    begins = np.zeros(len(coarse) + 1, np.bool_)
    begins[ends] = True
    begins[0] = True
    begins[1:-1] |= coarse[1:] != coarse[:-1]
    starts = np.flatnonzero(begins[:-1])
    return coarse[starts], starts, np.searchsorted(starts, ends)


def histograms(rows: Rows, merged: int = 1) -> Charts:
    """Return :meth:`Sketch.histogram` of each row, with ``merged`` buckets in one."""
    buckets, starts, ends = _merged(rows, merged)
    counts = rows.counts
    counts = np.add.reduceat(counts, starts) if merged > 1 and len(starts) else counts
    low, high = np.stack([rows.min, rows.max])[:, rows.bucket_count > 0]
    # One empty bucket represents all between two filled ones of a tensor. Between two tensors
    # there is no gap.
    begins = np.zeros(len(buckets) + 1, np.bool_)
    begins[ends] = True
    before = np.flatnonzero((np.diff(buckets) > 1) & ~begins[1:-1])
    gaps = before + np.arange(1, len(before) + 1)
    source = np.ones(len(buckets) + len(gaps), np.intp)
    source[gaps] = 0
    source = source.cumsum() - 1
    largest = np.abs([low, high]).max(initial=0.0)
    charts = np.empty((len(source), 3), summaries.histogram_dtype(counts, largest))
    left, right = _limits(merged)
    places = buckets.take(source) + len(left) // 2
    charts[:, 0], charts[:, 1] = left.take(places), right.take(places)
    charts[:, 2] = counts.take(source)
    charts[gaps, 0], charts[gaps, 1], charts[gaps, 2] = charts[gaps - 1, 1], charts[gaps + 1, 0], 0
    ends += np.searchsorted(before, ends)
    after = np.unique(ends[ends > 0])
    charts[after - 1, 1] = high
    charts[np.append(0, after)[:-1], 0] = low
    return charts, ends.tolist()


def log10_histograms(rows: Rows) -> Charts:
    """Return buckets over log10 of the magnitudes, one for each octave, without gaps.

    Both signs count together. Zeros and values in the smallest bucket are omitted; each row must
    have others.
    """
    lengths = rows.bucket_count
    starts = np.cumsum(lengths) - lengths
    magnitudes = np.abs(_merged_buckets(BUCKETS_PER_OCTAVE).take(rows.buckets))
    lowest = np.minimum.reduceat(np.where(magnitudes, magnitudes, LAST_BUCKET), starts)
    sizes = np.maximum.reduceat(magnitudes, starts) - lowest + 1
    ends = np.cumsum(sizes)
    shifts = ends - sizes - lowest  # from a magnitude to its place among all
    counted = magnitudes > 0
    counts = np.bincount(
        (magnitudes + shifts.repeat(lengths))[counted], rows.counts[counted]
    ).astype(np.float64, copy=False)
    charts = np.empty((len(counts), 3), summaries.histogram_dtype(counts, 0.0))
    lower, upper = _log10_limits()
    places = np.arange(len(counts)) - shifts.repeat(sizes)
    charts[:, 0], charts[:, 1] = lower.take(places), upper.take(places)
    charts[:, 2] = counts
    last = ends - 1
    largest = np.log10(np.maximum(np.abs(rows.min), np.abs(rows.max)))
    charts[last, 1] = np.maximum(np.minimum(charts[last, 1], largest), charts[last, 0])
    return charts, ends.tolist()


@cache
def _bounds(merged: int) -> NDArray[np.float32]:
    """Return the lower limits of merged buckets from 0 on, and the upper limit of the last."""
    fine = edges()
    return np.concatenate([fine[:1], fine[1 : LAST_BUCKET + 1 : merged], fine[-1:]])


@cache
def _limits(merged: int) -> NDArray[np.float32]:
    """Return the left and right edges of the merged buckets, ascending."""
    limits = _bounds(merged).copy()
    limits[-1] = np.inf
    left = np.concatenate([-limits[:0:-1], limits[1:-1]])
    return np.stack([left, -left[::-1]])


@cache
def _log10_limits() -> NDArray[np.float32]:
    """Return the lower and upper log10 of each octave; that of bucket 0 is not used."""
    limits = _bounds(BUCKETS_PER_OCTAVE).astype(np.float64)
    limits[0] = limits[1]
    # The last bucket of float32 has an infinite upper edge.
    limits[-1] = min(limits[-1], FLOAT32_MAX)
    return np.stack([np.log10(limits[:-1]), np.log10(limits[1:])]).astype(np.float32)

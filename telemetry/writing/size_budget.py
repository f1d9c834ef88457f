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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.events import summaries
from telemetry.events.summaries import FLOAT32_MAX
from telemetry.measure.images import encode_png
from telemetry.records.buckets import BUCKETS_PER_OCTAVE, LAST_BUCKET, edges
from telemetry.records.moments import finite_of
from telemetry.records.rows import Rows

log = logging.getLogger(__name__)

Picture = tuple[str, NDArray[np.uint8]]
"""Tag, and pixels ``[height, width, 3]``."""
Tagged = tuple[Sequence[str], Rows]
"""Tags, and the row of each one's tensor."""
Charts = tuple[NDArray[Any], Sequence[int]]
"""Buckets of histograms, and the end of each: arguments of :func:`summaries.histograms`."""

# Numbers of neighboring buckets that may become one.
_WIDTHS = (1, 2, 4, 8, 16, 32)
_MOST_VALUES = 1 / 32  # of a tensor's, in a cell of several buckets
_WIDEST = 1 / 16  # of the root mean square, the width of a cell of more than two
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
    turns. ``classic`` is torch's format.
    """

    def __init__(self, *, max_bytes: int | None = None, classic: bool = False) -> None:
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._classic = classic
        self._row_bytes = _CLASSIC_ROW_BYTES if classic else _ROW_BYTES
        self._next_picture = self._next_histogram = 0
        self._logs_omitted = True

    def values_of(
        self, pictures: Sequence[Picture], tensors: Tagged, magnitudes: Tagged
    ) -> Iterator[Sequence[bytes]]:
        """Yield pictures, histograms, and histograms of magnitudes of one step, some at a time."""
        drawn = list(self._fitting(pictures, self._max_bytes * _PICTURES_SHARE))
        yield drawn
        yield from self._coarse(*tensors, magnitudes, self._max_bytes - sum(map(len, drawn)))

    def picture(self, tag: str, pixels: NDArray[np.uint8]) -> bytes:
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
        joined = joined_widths(rows)
        place = bisect_left(
            _WIDTHS, True, key=lambda width: _Cells.of(rows, joined, width).row_count <= most
        )
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
    which = np.arange(len(rows)).repeat(rows.bucket_count)
    filled = np.flatnonzero(np.bincount(which, rows.buckets != 0, len(rows)))
    some = [tags[row] for row in filled.tolist()]
    return _values(some, rows.take(filled), log10_histograms, classic)


def _values(
    tags: Sequence[str],
    rows: Rows,
    charts_of: Callable[[Rows], Charts],
    classic: bool,
    at_once: int = _AT_ONCE,
) -> Iterator[Sequence[bytes]]:
    for first in range(0, len(tags), at_once):
        some = tags[first : first + at_once]
        part = rows.take(np.arange(first, first + len(some)))
        buckets, ends = charts_of(part)
        if buckets.dtype == np.float64 and len(some) > 1:  # one of them may be the reason
            yield from _values(some, part, charts_of, classic, at_once=1)
        elif classic:
            sums = zip(part.sum.tolist(), part.sum_squares.tolist(), strict=True)
            yield summaries.classic_histograms(some, buckets, ends, sums)
        else:
            yield summaries.histograms(some, buckets, ends)


class _Cells(NamedTuple):
    """Buckets of which neighbors became one: the cells of all rows, one row after the other."""

    starts: NDArray[np.intp]  # place of each cell's first bucket
    ends: NDArray[np.intp]  # of each row
    left: NDArray[np.float32]
    right: NDArray[np.float32]
    gaps: NDArray[np.intp]  # cells behind which the row has empty buckets

    @staticmethod
    def of(rows: Rows, widths: NDArray[np.intp], merged: int = 1) -> _Cells:
        """Return the cells, of which each is as wide as its buckets say, at least ``merged``.

        Bucket 0 stays alone; cell ``k > 0`` begins at bucket ``(k - 1) * width + 1``.
        """
        widths = np.maximum(widths, merged)
        buckets, row_ends = rows.buckets.astype(np.intp), np.cumsum(rows.bucket_count)
        last = -(-np.abs(buckets) // widths) * widths
        first = np.maximum(last - widths + 1, 0)
        signed = np.where(buckets < 0, -first, first)
        begins = np.zeros(len(buckets) + 1, np.bool_)
        begins[1:-1] = signed[1:] != signed[:-1]
        begins[row_ends] = True
        begins[0] = True
        starts = np.flatnonzero(begins[:-1])
        near, far = _limits(first[starts], last[starts])
        left = np.where(signed[starts] > 0, near, -far)
        right = np.where(signed[starts] < 0, -near, far)
        ends = np.searchsorted(starts, row_ends)
        is_last = np.zeros(len(starts) + 1, np.bool_)
        is_last[ends - 1] = True
        gaps = np.flatnonzero((left[1:] > right[:-1]) & ~is_last[: len(starts) - 1])
        return _Cells(starts, ends, left, right, gaps)

    @property
    def row_count(self) -> int:
        """Number of rows that :func:`histograms` returns."""
        return len(self.starts) + len(self.gaps)


def _limits(first: NDArray[np.intp], last: NDArray[np.intp]) -> tuple[NDArray[np.float32], ...]:
    return edges().take(first), edges().take(np.minimum(last, LAST_BUCKET) + 1)


def joined_widths(rows: Rows) -> NDArray[np.intp]:
    """Return the number of neighbors with which each bucket may become one.

    A cell of several buckets has at most 1/32 of the tensor's values. It is a quarter of an octave
    wide, or at most 1/16 of their root mean square. TensorBoard's charts have wider bins, and the
    page's are about as wide. Half of all buckets are near zero, where they are far narrower.
    """
    finite, which = finite_of(rows), np.arange(len(rows)).repeat(rows.bucket_count)
    with np.errstate(all="ignore"):
        most, widest = _MOST_VALUES * finite, _WIDEST * np.sqrt(rows.sum_squares / finite)
    # A cell is two of half its width, and joined only if both of them are.
    cells, counts, joined = rows.buckets.astype(np.intp), rows.counts, []
    for width in _WIDTHS[1:] if len(which) else ():
        cells = (cells + (cells > 0)) >> 1  # away from zero
        begins = np.ones(len(cells), np.bool_)
        begins[1:] = (cells[1:] != cells[:-1]) | (which[1:] != which[:-1])
        starts = np.flatnonzero(begins)
        cells, which, counts = cells[starts], which[starts], np.add.reduceat(counts, starts)
        is_joined = counts <= most[which]
        if width > 2:
            last = np.abs(cells) * width
            near, far = _limits(np.maximum(last - width + 1, 0), last)
            is_joined &= far - near <= widest[which]
        counts[~is_joined] = math.inf
        joined.append((begins.cumsum() - 1, np.where(is_joined, width, 1)))
    widths = np.ones(len(cells), np.intp)
    for place, widest_joined in reversed(joined):
        widths = np.maximum(widths, widest_joined)[place]
    return widths


def histograms(rows: Rows, merged: int = 1) -> Charts:
    """Return the histogram of each row, with at least ``merged`` buckets in one.

    The outer edges are the exact minimum and maximum. One empty bucket represents all between two
    filled ones.
    """
    cells = _Cells.of(rows, joined_widths(rows), merged)
    counts = np.add.reduceat(rows.counts, cells.starts) if len(cells.starts) else rows.counts
    filled = rows.bucket_count > 0
    low, high = rows.min[filled], rows.max[filled]
    source = np.ones(cells.row_count, np.intp)
    gaps = cells.gaps + np.arange(1, len(cells.gaps) + 1)
    source[gaps] = 0
    source = source.cumsum() - 1
    largest = np.abs([low, high]).max(initial=0.0)
    charts = np.empty((len(source), 3), summaries.histogram_dtype(counts, largest))
    charts[:, 0], charts[:, 1] = cells.left.take(source), cells.right.take(source)
    charts[:, 2] = counts.take(source)
    charts[gaps, 0], charts[gaps, 1], charts[gaps, 2] = charts[gaps - 1, 1], charts[gaps + 1, 0], 0
    ends = cells.ends + np.searchsorted(cells.gaps, cells.ends)
    charts[ends[filled] - 1, 1] = high
    charts[np.concatenate([[0], ends[:-1]])[filled], 0] = low
    return charts, ends.tolist()


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
def _log10_limits() -> NDArray[np.float32]:
    """Return the lower and upper log10 of each octave; that of bucket 0 is not used."""
    fine = edges().astype(np.float64)
    limits = np.concatenate([fine[1:2], fine[1 : LAST_BUCKET + 1 : BUCKETS_PER_OCTAVE], fine[-1:]])
    # The last bucket of float32 has an infinite upper edge.
    limits[-1] = min(limits[-1], FLOAT32_MAX)
    return np.stack([np.log10(limits[:-1]), np.log10(limits[1:])]).astype(np.float32)

"""The histograms and pictures of a step, which are nearly all of its bytes, within a limit.

Histograms are built from many sketches with each NumPy call: of the values, and of log10 |x|. A
linear axis cannot show the magnitudes of gradients, so these have a histogram of their own, with
a bucket per octave: what is finer is in that of the values.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.events import summaries
from telemetry.events.summaries import FLOAT32_MAX
from telemetry.measure.images import encode_png
from telemetry.records.buckets import BUCKETS_PER_OCTAVE, LAST_BUCKET, edges
from telemetry.records.sketch import Sketch

log = logging.getLogger(__name__)

Picture = tuple[str, NDArray[np.uint8]]
"""A tag, and pixels ``[height, width, 3]``."""

# How many buckets may become one.
_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_PICTURES_SHARE = 1 / 3
_HISTOGRAM_BYTES = 80  # a histogram has so many, its tag and its rows
_ROW_BYTES, _CLASSIC_ROW_BYTES = 12, 16
_AT_ONCE = 128


class Bulk:
    """Writes the histograms and pictures of each step within a number of bytes.

    Pictures take at most a third: as many as fit, and the next step goes on with the others; one
    that does not fit alone is written at half its size, or less. For histograms to fit, two, three
    and up to 32 neighbouring buckets become one, which are four octaves, and magnitudes, which are
    the same values once more, are left out, which is logged once. If that is not enough, tags take
    turns.

    Args:
        max_bytes: Of each step; None: no limit.
        classic: Write both as torch does.
    """

    def __init__(self, *, max_bytes: int | None = None, classic: bool = False) -> None:
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._classic = classic
        self._row_bytes = _CLASSIC_ROW_BYTES if classic else _ROW_BYTES
        self._next_picture = self._next_histogram = 0
        self._says_left_out = True

    def values_of(
        self,
        pictures: Sequence[Picture],
        sketches: Mapping[str, Sketch],
        magnitudes: Mapping[str, Sketch],
    ) -> Iterator[bytes]:
        """What to write of one step.

        Args:
            pictures: All of them.
            sketches: All of them by tag, to be shown as histograms.
            magnitudes: Those to be shown as histograms of their magnitudes, too.
        """
        used = 0
        for value in self._fitting(pictures, self._max_bytes * _PICTURES_SHARE):
            used += len(value)
            yield value
        yield from self._coarse(sketches, magnitudes, self._max_bytes - used)

    def picture(self, tag: str, pixels: NDArray[np.uint8]) -> bytes:
        """One picture."""
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
        self, sketches: Mapping[str, Sketch], magnitudes: Mapping[str, Sketch], room: float
    ) -> Iterator[bytes]:
        merged = self._width(sketches, room)
        if merged > 1 and magnitudes:
            self._say_left_out()
        names = list(sketches)
        turn = self._next_histogram % max(1, len(names))
        order = iter([*names[turn:], *names[:turn]])
        while some := {name: sketches[name] for name in islice(order, _AT_ONCE)}:
            for value in histogram_values(some, merged=merged, classic=self._classic):
                room -= len(value)
                if room < 0:
                    return
                self._next_histogram = turn = (turn + 1) % len(names)
                yield value
        if merged > 1:
            return
        for value in log10_histogram_values(magnitudes, classic=self._classic):
            room -= len(value)
            if room < 0:
                return self._say_left_out()
            yield value

    def _say_left_out(self) -> None:
        if self._says_left_out:
            log.warning(
                "telemetry: histograms of gradients' magnitudes (grad_log10/...) are left out: "
                "beside those of values, they do not fit into max_bytes_per_step=%s",
                self._max_bytes,
            )
        self._says_left_out = False

    def _width(self, sketches: Mapping[str, Sketch], room: float) -> int:
        """How many buckets become one, so that all histograms fit; the most if they never do."""
        room -= sum(map(len, sketches)) + _HISTOGRAM_BYTES * len(sketches)
        most_rows = room / self._row_bytes
        buckets = sum(len(sketch.buckets) for sketch in sketches.values())
        if 2 * buckets <= most_rows:  # between two of them there is at most one row more
            return 1
        place = bisect_left(_WIDTHS, True, key=lambda width: _rows(sketches, width) <= most_rows)
        return _WIDTHS[min(place, len(_WIDTHS) - 1)]


def _rows(sketches: Mapping[str, Sketch], merged: int) -> int:
    """Rows of all histograms together."""
    rest = iter(sketches.values())
    count = 0
    while part := list(islice(rest, _AT_ONCE)):
        count += row_count(part, merged)
    return count


Rows = tuple[NDArray[Any], Sequence[int]]
"""The arguments of :func:`summaries.histograms`."""


def histogram_values(
    sketches: Mapping[str, Sketch], *, merged: int = 1, classic: bool = False
) -> Iterator[bytes]:
    """A histogram of each sketch, by tag.

    Args:
        sketches: By tag.
        merged: How many neighbouring buckets become one.
        classic: Write them as torch does.
    """
    return _values(sketches.items(), partial(histograms, merged=merged), classic)


def log10_histogram_values(
    sketches: Mapping[str, Sketch], *, classic: bool = False
) -> Iterator[bytes]:
    """A histogram of log10 |x| of each sketch, by tag; none of a sketch without such values."""
    pairs = (pair for pair in sketches.items() if _has_magnitudes(pair[1]))
    return _values(pairs, log10_histograms, classic)


def _values(
    sketches: Iterable[tuple[str, Sketch]],
    rows_of: Callable[[Sequence[Sketch]], Rows],
    classic: bool,
) -> Iterator[bytes]:
    rest = iter(sketches)
    while part := list(islice(rest, _AT_ONCE)):
        tags, of_part = zip(*part, strict=True)
        rows, ends = rows_of(of_part)
        if rows.dtype == np.float64 and len(part) > 1:  # one of them may be the reason
            for pair in part:
                yield from _values([pair], rows_of, classic)
        elif classic:
            sums = [(sketch.sum, sketch.sum_squares) for sketch in of_part]
            yield from summaries.classic_histograms(tags, rows, ends, sums)
        else:
            yield from summaries.histograms(tags, rows, ends)


def _has_magnitudes(sketch: Sketch) -> bool:
    buckets = sketch.buckets
    return len(buckets) > 1 or (len(buckets) == 1 and bool(buckets[0]))


def row_count(sketches: Sequence[Sketch], merged: int) -> int:
    """How many rows :func:`histograms` of these have together, or a few more."""
    buckets, starts, _ = _merged(sketches, merged)
    gaps = int(np.count_nonzero(np.diff(buckets) > 1))
    return len(starts) + gaps  # some of them may be where one sketch ends and another begins


def _merged(
    sketches: Sequence[Sketch], merged: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Buckets of all sketches, neighbours taken together; where each begins and each sketch ends.

    Bucket 0 stays alone; ``k > 0`` stands for ``merged`` buckets from ``(k - 1) * merged + 1`` on.
    """
    fine = np.concatenate([sketch.buckets for sketch in sketches]).astype(np.intp)
    ends = np.cumsum([len(sketch.buckets) for sketch in sketches])
    if merged == 1:
        return fine, np.arange(len(fine)), ends
    coarse = np.sign(fine) * -(-np.abs(fine) // merged)
    begins = np.zeros(len(fine) + 1, np.bool_)
    begins[ends] = True
    begins[0] = True
    begins[1:-1] |= coarse[1:] != coarse[:-1]
    starts = np.flatnonzero(begins[:-1])
    return coarse[starts], starts, np.searchsorted(starts, ends)


def histograms(sketches: Sequence[Sketch], merged: int = 1) -> Rows:
    """:meth:`Sketch.histogram` of each, with ``merged`` neighbouring buckets in one."""
    buckets, starts, ends = _merged(sketches, merged)
    counts = np.concatenate([sketch.counts for sketch in sketches])
    counts = np.add.reduceat(counts, starts) if merged > 1 and len(starts) else counts
    filled = [sketch for sketch in sketches if len(sketch.buckets)]
    low, high = [sketch.min for sketch in filled], [sketch.max for sketch in filled]
    # One empty bucket stands for all between two filled ones of a sketch. Where the next sketch
    # begins, buckets start again from below, or there is a gap that is none.
    begins = np.zeros(len(buckets) + 1, np.bool_)
    begins[ends] = True
    before = np.flatnonzero((np.diff(buckets) > 1) & ~begins[1:-1])
    gaps = before + np.arange(1, len(before) + 1)
    source = np.ones(len(buckets) + len(gaps), np.intp)
    source[gaps] = 0
    source = source.cumsum() - 1
    largest = max((*high, *(-x for x in low)), default=0.0)
    rows = np.empty((len(source), 3), summaries.histogram_dtype(counts, largest))
    left, right = _limits(merged)
    places = buckets.take(source) + len(left) // 2
    rows[:, 0], rows[:, 1] = left.take(places), right.take(places)
    rows[:, 2] = counts.take(source)
    rows[gaps, 0], rows[gaps, 1], rows[gaps, 2] = rows[gaps - 1, 1], rows[gaps + 1, 0], 0
    ends += np.searchsorted(before, ends)
    after = np.unique(ends[ends > 0])
    rows[after - 1, 1] = high
    rows[np.append(0, after)[:-1], 0] = low
    return rows, ends.tolist()


def log10_histograms(sketches: Sequence[Sketch]) -> Rows:
    """Buckets over log10 of the magnitudes, one for each octave, without gaps.

    Both signs count together. Zeros and values in the smallest bucket are left out.

    Args:
        sketches: Each with a value beyond the smallest bucket.
    """
    lengths = [len(sketch.buckets) for sketch in sketches]
    starts = np.append(0, np.cumsum(lengths)[:-1])
    fine = np.abs(np.concatenate([sketch.buckets for sketch in sketches])).astype(np.intp)
    magnitudes = -(-fine // BUCKETS_PER_OCTAVE)
    lowest = np.minimum.reduceat(np.where(magnitudes, magnitudes, LAST_BUCKET), starts)
    sizes = np.maximum.reduceat(magnitudes, starts) - lowest + 1
    ends = np.cumsum(sizes)
    shifts = ends - sizes - lowest  # from a magnitude to its place among all
    counted = magnitudes > 0
    counts = np.bincount(
        (magnitudes + shifts.repeat(lengths))[counted],
        np.concatenate([sketch.counts for sketch in sketches])[counted],
    ).astype(np.float64, copy=False)
    rows = np.empty((len(counts), 3), summaries.histogram_dtype(counts, 0.0))
    lower, upper = _log10_limits()
    places = np.arange(len(counts)) - shifts.repeat(sizes)
    rows[:, 0], rows[:, 1] = lower.take(places), upper.take(places)
    rows[:, 2] = counts
    last = ends - 1
    largest = np.log10([max(abs(sketch.min), abs(sketch.max)) for sketch in sketches])
    rows[last, 1] = np.maximum(np.minimum(rows[last, 1], largest), rows[last, 0])
    return rows, ends.tolist()


@cache
def _bounds(merged: int) -> NDArray[np.float32]:
    """Lower limits of magnitudes of merged buckets from 0 on, and the upper limit of the last."""
    fine = edges()
    return np.concatenate([fine[:1], fine[1 : LAST_BUCKET + 1 : merged], fine[-1:]])


@cache
def _limits(merged: int) -> NDArray[np.float32]:
    """Left and right edges of the merged buckets, from the lowest to the highest."""
    limits = _bounds(merged).copy()
    limits[-1] = np.inf
    left = np.concatenate([-limits[:0:-1], limits[1:-1]])
    return np.stack([left, -left[::-1]])


@cache
def _log10_limits() -> NDArray[np.float32]:
    """Lower and upper log10 of each octave's magnitudes; that of bucket 0 is not used."""
    limits = _bounds(BUCKETS_PER_OCTAVE).astype(np.float64)
    limits[0] = limits[1]
    # The last bucket of float32 has an infinite upper edge.
    limits[-1] = min(limits[-1], FLOAT32_MAX)
    return np.stack([np.log10(limits[:-1]), np.log10(limits[1:])]).astype(np.float32)

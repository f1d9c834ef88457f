"""The histograms and pictures of a step, which are nearly all of its bytes, within a limit."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from telemetry.events import summaries
from telemetry.images import encode_png
from telemetry.sketch import Sketch
from telemetry.writing import histograms

log = logging.getLogger(__name__)

Picture = tuple[str, NDArray[np.uint8]]
"""A tag, and pixels ``[height, width, 3]``."""

_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""How many buckets may become one."""
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
        self._max_bytes = max_bytes
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
        if self._max_bytes is None:
            yield from (self.picture(*each) for each in pictures)
            yield from histograms.values_of(sketches, classic=self._classic)
            yield from histograms.log10_values_of(magnitudes, classic=self._classic)
            return
        used = 0
        for value in self._fitting(pictures, int(self._max_bytes * _PICTURES_SHARE)):
            used += len(value)
            yield value
        yield from self._coarse(sketches, magnitudes, self._max_bytes - used)

    def picture(self, tag: str, pixels: NDArray[np.uint8]) -> bytes:
        """One picture."""
        png, (height, width, _) = encode_png(pixels), pixels.shape
        if self._classic:
            return summaries.classic_image(tag, png, width, height)
        return summaries.image(tag, [png], width, height)

    def _fitting(self, pictures: Sequence[Picture], room: int) -> Iterator[bytes]:
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
        self, sketches: Mapping[str, Sketch], magnitudes: Mapping[str, Sketch], room: int
    ) -> Iterator[bytes]:
        merged = self._width(sketches, room)
        if merged > 1 and magnitudes:
            self._say_left_out()
        names = list(sketches)
        turn = self._next_histogram % max(1, len(names))
        order = iter([*names[turn:], *names[:turn]])
        while some := {name: sketches[name] for name in islice(order, _AT_ONCE)}:
            for value in histograms.values_of(some, merged=merged, classic=self._classic):
                room -= len(value)
                if room < 0:
                    return
                self._next_histogram = turn = (turn + 1) % len(names)
                yield value
        if merged > 1:
            return
        for value in histograms.log10_values_of(magnitudes, classic=self._classic):
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

    def _width(self, sketches: Mapping[str, Sketch], room: int) -> int:
        """How many buckets become one, so that all histograms fit; the most if they never do."""
        room -= sum(map(len, sketches)) + _HISTOGRAM_BYTES * len(sketches)
        most_rows = room // self._row_bytes
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
        count += histograms.row_count(part, merged)
    return count

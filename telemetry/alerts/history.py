"""The recent values of a figure in this run, with robust statistics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice

import numpy as np
from numpy.typing import ArrayLike

from telemetry.movers import NORMAL_CONSISTENT


def median(values: Collection[float]) -> float:
    """The middle value, or the upper of two. Faster than NumPy for a few values."""
    return sorted(values)[len(values) // 2]


def middle(values: Collection[float]) -> float:
    """The middle value, or the mean of two: NumPy's median of a few values, none of them NaN."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def leading(holds: ArrayLike) -> int:
    """How many of the first values are true, shape ``[n]``, before the first that is not."""
    array = np.asarray(holds)
    return len(array) if array.all() else int(array.argmin())


class History:
    """The last values of a figure: its usual level and its usual spread.

    Args:
        length: How many values are kept.
    """

    _values: deque[float]

    def __init__(self, length: int) -> None:
        self._values = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._values)

    def __copy__(self) -> History:
        other = History(0)
        other._values = self._values.copy()
        return other

    def add(self, *values: float) -> None:
        self._values.extend(values)

    @property
    def last(self) -> float:
        return self._values[-1]

    def latest(self, count: int) -> Iterator[float]:
        """The last ``count`` values, or all if there are fewer, oldest first."""
        return islice(self._values, max(0, len(self._values) - count), None)

    @property
    def median(self) -> float:
        return median(self._values)

    @property
    def highest(self) -> float:
        return max(self._values)

    def staying(self, more: int) -> list[float]:
        """Those that are still kept when so many were added."""
        assert self._values.maxlen is not None
        gone = max(len(self._values) + more - self._values.maxlen, 0)
        return list(islice(self._values, gone, None))

    def highest_after(self, more: int) -> float:
        """The highest of those that stay when so many are added; ``-inf`` if none does."""
        return max(self.staying(more), default=-math.inf)

    @property
    def lowest(self) -> float:
        return min(self._values)

    @property
    def spread(self) -> float:
        """Standard deviation, estimated from the median absolute deviation."""
        middle = self.median
        return NORMAL_CONSISTENT * median([abs(value - middle) for value in self._values])

"""The recent values of a figure in this run, with robust statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice

from telemetry.movers import NORMAL_CONSISTENT


def median(values: Collection[float]) -> float:
    """The middle value, or the upper of two. Faster than NumPy for a few values."""
    return sorted(values)[len(values) // 2]


def middle(values: Collection[float]) -> float:
    """The middle value, or the mean of two: NumPy's median of a few values, none of them NaN."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


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

    def add(self, value: float) -> None:
        self._values.append(value)

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

    @property
    def lowest(self) -> float:
        return min(self._values)

    @property
    def spread(self) -> float:
        """Standard deviation, estimated from the median absolute deviation."""
        middle = self.median
        return NORMAL_CONSISTENT * median([abs(value - middle) for value in self._values])

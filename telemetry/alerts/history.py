"""The past of a figure in this run, with robust statistics; how far gradients are above theirs."""

from __future__ import annotations

import math
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


class Past:
    """The last hundred values but for the latest ones; of few, the older half.

    A value that rises step by step, compared with those just before it, would raise its own limit.

    Args:
        latest: How many of the latest are left out.
    """

    _old: History
    _new: deque[float]

    def __init__(self, latest: int) -> None:
        self._latest = latest
        self._old = History(_OLD)
        self._new = deque()

    def __len__(self) -> int:
        return len(self._old)

    def add(self, value: float) -> None:
        """Add the latest value, which becomes past later."""
        self._new.append(value)
        waiting = min(self._latest, (len(self._old) + len(self._new)) // 2)
        while len(self._new) > waiting:
            self._old.add(self._new.popleft())

    def adopt(self, value: float) -> None:
        """Add a value that is past at once."""
        self._old.add(value)

    def clear(self) -> None:
        """Forget all."""
        self._old = History(_OLD)
        self._new.clear()

    def ranges_above(self, value: float) -> float:
        """How far a value lies above the highest, in ranges; minus infinity while they are few."""
        if len(self._old) < _FEWEST:
            return -math.inf
        highest = self.highest
        unit = max(highest - self.lowest, _LEAST_RANGE * abs(highest))
        return (value - highest) / unit if unit > 0 else -math.inf

    @property
    def highest(self) -> float:
        return self._old.highest

    @property
    def lowest(self) -> float:
        return self._old.lowest

    @property
    def median(self) -> float:
        return self._old.median

    @property
    def spread(self) -> float:
        return self._old.spread


_OLD = 100  # by eye, in steps; tried 50 and 200
# The range of 10 normally distributed values is 3.1 deviations, that of a hundred 5.0.
_FEWEST = 10
_LEAST_RANGE = 1e-3  # of the highest, so that a constant has one


NEVER = 10**9
"""Number of steps since an event that has not happened."""


class NormTrend:
    """How far the total gradient norm is above its past, in decades (log10). Clipping hides it.

    A norm thirty times above all before does not count as usual until it has lasted 50 steps.

    Attributes:
        above: Compared with the highest of the last hundred steps; 0 in the first steps.
        far_above: Compared with the highest of the hundred steps that ended 20 steps ago.
        usual: Median norm of the latter.
        since_jump: Steps since it first rose to five times the highest.
    """

    above: float
    far_above: float
    usual: float
    since_jump: int
    _totals: History
    _between: deque[float]
    _long_ago: History
    _steps_unusual: int

    def __init__(self) -> None:
        self.above = 0.0
        self.far_above = 0.0
        self.usual = 0.0
        self.since_jump = NEVER
        self._totals = History(_ALL)
        self._between = deque(maxlen=_BETWEEN)
        self._long_ago = History(_ALL)
        self._steps_unusual = 0

    def add(self, total: float) -> None:
        """Add the finite norm of one step."""
        self.since_jump += 1
        self.above = self.far_above = 0.0
        if total == 0:
            return
        level = math.log10(total)
        if len(self._totals) >= _SHORTEST:
            past = self._long_ago if len(self._long_ago) else self._totals
            self.above = level - self._totals.highest
            self.far_above = level - past.highest
            if max(self.above, self.far_above) > 0 or self.since_jump <= _SAME_JUMP:
                self.usual = 10**past.median
            if self.above >= _JUMP and self.since_jump > _SAME_JUMP:
                self.since_jump = 0
        self._steps_unusual = self._steps_unusual + 1 if self.above > _UNUSUAL else 0
        if not 0 < self._steps_unusual <= _NEW_NORMAL:
            self._remember(level)

    def _remember(self, level: float) -> None:
        self._totals.add(level)
        if len(self._between) == _BETWEEN:
            self._long_ago.add(self._between[0])
        self._between.append(level)


_ALL = 100  # by eye, in steps; tried 50 and 200
_BETWEEN = 20  # by eye, in steps; tried 10 and 40
_SHORTEST = 10  # by eye, in steps; tried 2 and 50
_JUMP = FAR_ABOVE = 0.7  # a factor of 5, by eye; tried 0.14 and 3.5
_SAME_JUMP = 30  # by eye, in steps; tried 15 and 60
_UNUSUAL = 1.5  # a factor of 30, that of ExplodingGradient's lasting_factor; tried 0.3 and 7.5
_NEW_NORMAL = 50  # by eye, in steps; tried 25 and 100

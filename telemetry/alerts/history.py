"""The past of a figure in this run, with robust statistics; how far gradients are above theirs."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from telemetry.layers.movers import NORMAL_CONSISTENT


def median(values: Collection[float]) -> float:
    """The middle value, or the upper of two. Faster than NumPy for a few values."""
    return sorted(values)[len(values) // 2]


def middle(values: Collection[float]) -> float:
    """The middle value, or the mean of two: NumPy's median of a few values, none of them NaN."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def carried(
    values: NDArray[np.float64], before: Sequence[str], names: Sequence[str], fill: float
) -> NDArray[np.float64]:
    """Values of the layers ``before``, for those of ``names``; ``fill`` for new ones."""
    known = dict(zip(before, values.tolist(), strict=False))
    return np.array([known.get(name, fill) for name in names], np.float64)


class History:
    """The last values of a figure.

    Args:
        length: How many are kept.
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


class Ranked(History):
    """Keeps them in ascending order, too, so that asking at each step costs little; none is NaN."""

    _values: deque[float]

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._ordered: list[float] = []
        self._ordered_of = self._values  # another one after a resumed run was loaded

    def add(self, value: float) -> None:
        ordered, values = self.ordered, self._values
        if len(values) == values.maxlen:
            del ordered[bisect_left(ordered, values[0])]
        insort(ordered, value)
        values.append(value)

    @property
    def ordered(self) -> list[float]:
        """All values, ascending."""
        if self._ordered_of is not self._values:
            self._ordered, self._ordered_of = sorted(self._values), self._values
        return self._ordered

    @property
    def median(self) -> float:
        return self.ordered[len(self._values) // 2]

    @property
    def highest(self) -> float:
        return self.ordered[-1]

    @property
    def lowest(self) -> float:
        return self.ordered[0]

    @property
    def deviation(self) -> float:
        """Standard deviation, estimated from the median absolute deviation.

        Half of the values are nearest to the median: they lie side by side, and as far below it as
        above it.
        """
        ordered, half = self.ordered, len(self._values) // 2
        usual, last = ordered[half], len(ordered) - 1 - half
        first = bisect_left(
            range(last), True, key=lambda i: ordered[i + half] - usual >= usual - ordered[i]
        )
        beyond = ordered[first + half] - usual
        farthest = max(beyond, usual - ordered[first])
        if first > 0:
            farthest = min(farthest, usual - ordered[first - 1])
        return NORMAL_CONSISTENT * farthest


class Past(Ranked):
    """The last hundred values but for the latest ones; of few, the older half.

    A value that rises step by step, compared with those just before it, would raise its own limit.

    Args:
        latest: How many of the latest are left out.
    """

    _new: deque[float]

    def __init__(self, latest: int) -> None:
        super().__init__(_OLD)
        self._latest = latest
        self._new = deque()

    def add(self, value: float) -> None:
        """Add the latest value, which becomes past later."""
        self._new.append(value)
        waiting = min(self._latest, (len(self) + len(self._new)) // 2)
        while len(self._new) > waiting:
            super().add(self._new.popleft())

    def adopt(self, value: float) -> None:
        """Add a value that is past at once."""
        super().add(value)

    def clear(self) -> None:
        """Forget all."""
        self._values = deque(maxlen=_OLD)
        self._new.clear()

    def ranges_above(self, value: float) -> float:
        """How far a value lies above the highest, in ranges; minus infinity while they are few."""
        if len(self) < _FEWEST:
            return -math.inf
        highest = self.highest
        unit = max(highest - self.lowest, _LEAST_RANGE * abs(highest))
        return (value - highest) / unit if unit > 0 else -math.inf


_OLD = 100  # by eye, in steps; tried 50 and 200
# The range of 10 normally distributed values is 3.1 deviations, that of a hundred 5.0.
_FEWEST = 10
_LEAST_RANGE = 1e-3  # of the highest, so that a constant has one


# Number of steps since an event that has not happened.
NEVER = 10**9


class NormTrend:
    """How far the total gradient norm is above its past, in decades (log10). Clipping hides it.

    A norm thirty times above all before does not count as usual until it has lasted 50 steps.

    Attributes:
        above: Compared with the highest of the last hundred steps; 0 in the first steps.
        far_above: Compared with the highest of the hundred steps that ended 20 steps ago.
        usual: Median norm of the latter.
        since_jump: Steps since it first rose to five times the highest.
    """

    above: float = 0.0
    far_above: float = 0.0
    usual: float = 0.0
    since_jump: int = NEVER
    _totals: Ranked
    _between: deque[float]
    _long_ago: Ranked
    _steps_unusual: int = 0

    def __init__(self) -> None:
        self._totals = Ranked(_ALL)
        self._between = deque(maxlen=_BETWEEN)
        self._long_ago = Ranked(_ALL)

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

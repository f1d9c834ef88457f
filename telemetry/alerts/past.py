"""What a figure was some time ago."""

from __future__ import annotations

import math
from collections import deque

from telemetry.alerts.history import History


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

"""Whether the norm of all gradients is as usual, compared with what it was some time ago."""

from __future__ import annotations

import math
from collections import deque

from telemetry.alerts.history import History

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

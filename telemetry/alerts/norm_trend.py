"""Whether the norm of all gradients is as usual, compared with what it was some time ago."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

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

    def add_quiet(self, totals: Sequence[float]) -> int:
        """Add norms until one is far above; how many came before that."""
        for i, total in enumerate(totals):
            if not math.isfinite(total):
                return i
            self.add(total)
            if max(self.above, self.far_above) >= FAR_ABOVE:
                return i
        return len(totals)

    def are_usual(self, totals: Sequence[float]) -> bool:
        """Whether none is zero or above its past, by a look that may miss some."""
        if not self._long_ago or self._steps_unusual or self.since_jump <= _SAME_JUMP:
            return False
        highest = min(past.highest_after(len(totals)) for past in (self._totals, self._long_ago))
        return min(totals) > 0 and math.log10(max(totals)) <= highest

    def keeps_below(self, highest: float, count: int) -> bool:
        """Whether so many norms up to this one are not far above."""
        if not self._long_ago or self._steps_unusual or not 0 < highest < math.inf:
            return False
        pasts = (self._totals, self._long_ago)
        limit = min(past.highest_after(count) for past in pasts) + _NEARLY_FAR
        return math.log10(highest) < limit

    def add_usual(self, totals: Sequence[float]) -> None:
        """Add usual norms; only the last is compared with those before."""
        self._remember(*map(math.log10, totals[:-1]))
        self.since_jump += len(totals) - 1
        self.add(totals[-1])

    def _remember(self, *levels: float) -> None:
        self._totals.add(*levels)
        between = (*self._between, *levels)
        self._long_ago.add(*between[:-_BETWEEN])
        self._between.extend(levels)


_ALL = 100  # by eye, in steps; tried 50 and 200
_BETWEEN = 20  # by eye, in steps; tried 10 and 40
_SHORTEST = 10  # by eye, in steps; tried 2 and 50
_JUMP = FAR_ABOVE = 0.7  # a factor of 5, by eye; tried 0.14 and 3.5
_NEARLY_FAR = 0.69  # a little less
_SAME_JUMP = 30  # by eye, in steps; tried 15 and 60
_UNUSUAL = 1.5  # a factor of 30, that of ExplodingGradient's lasting_factor; tried 0.3 and 7.5
_NEW_NORMAL = 50  # by eye, in steps; tried 25 and 100

"""What a figure used to be in this run: a bounded memory with robust statistics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from telemetry.records import StepRecord

NORMAL_CONSISTENT = 1.4826
"""Median absolute deviation to standard deviation, for a normal distribution."""


def median(values: Collection[float]) -> float:
    """The middle value; of an even number the upper one. Faster than NumPy for a few values."""
    return sorted(values)[len(values) // 2]


class History:
    """The last values of a figure; its usual level and how far it usually strays from it.

    Args:
        length: How many values are kept.
    """

    def __init__(self, length: int) -> None:
        self._values: deque[float] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._values.append(value)

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


class LossTrend:
    """Whether the loss is where it was. It may have any unit and sign; it need not be known.

    The last five steps are compared with thirty before them; while they are worse, those before
    them stay as they are, for a hundred steps.
    """

    def __init__(self) -> None:
        self._past = History(_PAST)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._steps_worse = 0
        self._peak = 0.0
        self._last_step = -1
        self.is_worse = False
        """Whether it rose four standard deviations of its past above it."""
        self.is_better = False
        """Whether it fell below what it used to be by more than it usually strays."""
        self.is_recovering = False
        """Whether it is worse than it was, but falling: a fifth of the rise is undone."""

    def see(self, record: StepRecord) -> None:
        """Take the loss of a step, if it is known and finite; once, also if several rules ask."""
        loss = record.loss
        if record.step == self._last_step or loss is None or not math.isfinite(loss):
            return
        self._last_step = record.step
        if len(self._recent) == _RECENT and not 0 < self._steps_worse <= _PATIENCE:
            self._past.add(self._recent[0])
        self._recent.append(loss)
        if len(self._past) >= _RECENT:
            self._compare(median(self._recent))

    def _compare(self, recent: float) -> None:
        usual = self._past.median
        spread = max(self._past.spread, 1e-3 * abs(usual))
        self.is_worse = recent > usual + 4 * spread
        self.is_better = recent < usual - spread
        self._steps_worse = self._steps_worse + 1 if self.is_worse else 0
        self._peak = max(self._peak, recent) if self._steps_worse > 1 else recent
        self.is_recovering = self.is_worse and recent < self._peak - 0.2 * (self._peak - usual)


_PAST = 30
_RECENT = 5
_PATIENCE = 100

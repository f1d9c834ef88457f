"""Rolling windows of a run's own figures, and the rise and fall of its loss.

A window excludes the latest 20 steps, so that a slow rise does not raise its own limit. Outliers
are excluded too, unless they persist for 20 steps.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import median_high
from typing import NamedTuple

from telemetry.alerts import shared
from telemetry.layers.onset import NORMAL_CONSISTENT


class Window:
    """Last hundred values of a figure without the latest 20; of fewer than 40, the older half."""

    first: float = math.nan  # median of the first five values
    _firsts: tuple[float, ...] = ()
    _values: deque[float]
    _unusual: deque[float]

    def __init__(self) -> None:
        self._values, self._unusual = deque(maxlen=shared.LENGTH + shared.LATEST), deque()

    def add(self, value: float, *, unusual: bool = False) -> None:
        """Add the latest value."""
        if unusual:
            self._unusual.append(value)
            if len(self._unusual) <= shared.LATEST:
                return
            self._values.clear()
            self._values.extend(self._unusual)
        else:
            self._values.append(value)
            if len(self._firsts) < shared.RECENT:
                self._firsts = (*self._firsts, value)
                self.first = median_high(self._firsts)
        self._unusual.clear()

    def __len__(self) -> int:
        count = len(self._values)
        return count - min(shared.LATEST, count // 2)

    @property
    def values(self) -> list[float]:
        """The window, oldest first. The properties below need one value or more."""
        return [*self._values][: len(self)]

    @property
    def usual(self) -> float:
        """Median, the upper of two."""
        return median_high(self.values)

    @property
    def extremes(self) -> tuple[float, float]:
        """Lowest and highest value."""
        values = self.values
        return min(values), max(values)

    @property
    def highest(self) -> float:
        return max(self.values)

    @property
    def extremes_of_all(self) -> tuple[float, float]:
        """Lowest and highest value, the latest ones included."""
        return min(self._values), max(self._values)

    @property
    def range(self) -> float:
        """Highest minus lowest, at least a thousandth of the highest, also for a constant."""
        lowest, highest = self.extremes
        return max(highest - lowest, shared.TINY * abs(highest))

    def of_latest(self, count: int) -> tuple[float, float]:
        """Return median and standard deviation (from the median absolute one) of the latest."""
        latest = self.values[-count:]
        usual = median_high(latest)
        return usual, NORMAL_CONSISTENT * median_high([abs(value - usual) for value in latest])

    @property
    def noise(self) -> float:
        """Standard deviation from one value to the next (from the median); 0 for fewer than two."""
        changes = [abs(after - before) for before, after in pairwise(self.values)]
        return NORMAL_CONSISTENT * median_high(changes) / math.sqrt(2) if changes else 0.0

    def ranges_above(self, value: float) -> float:
        """Return the distance of a value above the highest, in ranges; -inf for a short window."""
        if len(self) < shared.FEWEST:
            return -math.inf
        return (value - self.highest) / self.range if self.range else -math.inf


class Logged(NamedTuple):
    """A loss and its step."""

    step: int
    loss: float


class LossJump(NamedTuple):
    """A rise of the loss."""

    before: float  # median of the last losses before it
    limit: float  # threshold of losses far above them
    first: Logged  # the first above the limit
    peak: Logged


class Loss:
    """Rise and fall of the loss, which may have any unit and sign.

    - Each loss is compared with the window.
    - The last five are compared with the latest twenty of the window: a loss may fall far in a
      hundred steps.
    - The last five are compared with the best five and the first five: half of the progress is
      lost, however slowly the loss rises, if the progress was more than noise.
    """

    window: Window  # losses that are not far above it
    high: deque[Logged]  # consecutive losses that are far above it
    latest: deque[Logged]
    recent: float = math.nan  # median of the last five losses
    best: float = math.inf  # the lowest median of five
    is_worse: bool = False  # the recent median is four standard deviations above the window
    is_better: bool = False  # the recent median is half a deviation below the window
    excess: float = 0.0  # (last loss - highest before) / |highest before|
    losses_lost: int = 0  # consecutive losses at which half of the progress was lost
    limit: float = math.inf  # threshold of losses far above the window

    def __init__(self) -> None:
        self.window, self.high = Window(), deque(maxlen=shared.LATEST + 1)
        self.latest = deque(maxlen=3 * shared.LATEST)

    def median_of(self, count: int) -> float:
        """Return the median of the last ``count`` losses; NaN before the first."""
        latest = sorted([logged.loss for logged in islice(reversed(self.latest), count)])
        return latest[len(latest) // 2] if latest else math.nan

    @property
    def first(self) -> float:
        """Median of the first five losses that were not far above those before."""
        return self.window.first

    @property
    def has_not_fallen(self) -> bool:
        """Whether no five losses were lower than the first five by more than noise."""
        return self.best > (1 - shared.NOISE) * self.first > 0

    @property
    def floor(self) -> float:
        """The loss that is almost zero compared with the first: a rise to it loses nothing.

        Adam varies by a factor of 300 where a regression without noise has reached a
        ten-thousandth (regression_at_its_floor), and spikes (curve_at_its_floor). 0 while unknown.
        """
        return shared.NOISE * abs(self.first) if len(self.window) else 0.0

    def jump_since(self, since: int) -> LossJump:
        """Return the rise of the loss at step ``since`` or later."""
        before = [loss for step, loss in self.latest if step < since][-shared.LATEST :]
        after = [logged for logged in self.latest if logged.step >= since]
        limit = max(before) + shared.HALF * (max(before) - min(before)) if before else -math.inf
        peak = max(after, key=lambda logged: logged.loss)
        first = next((logged for logged in after if logged.loss > limit), peak)
        usual = median_high(before) if before else math.nan
        return LossJump(before=usual, limit=limit, first=first, peak=peak)

    @property
    def lowest(self) -> float:
        """The lowest loss of the window and of the latest ones."""
        return min(self.window.extremes[0], *[loss for _, loss in self.latest])

    def rise(self, peak: float) -> Rise:
        """Return the rise from the window to the highest loss up to now."""
        return Rise(first=self.first, usual=self.window.usual, peak=peak)

    @property
    def is_unbounded(self) -> bool:
        """Whether the loss is below -10 times the first one: it seems to have no lower limit."""
        return self.recent < 0 and self.recent < -10 * abs(self.first)

    def add(self, step: int, loss: float, *, judged: bool = True) -> None:
        """Add the finite loss of one step; ``judged``: whether rules judge this step."""
        self.latest.append(Logged(step, loss))
        recent = self.recent = self.median_of(shared.RECENT)
        if judged and len(self.window) >= shared.RECENT:
            usual, deviation = self.window.of_latest(shared.LATEST)
            deviation = max(deviation, shared.TINY * abs(usual))  # so that a constant has one
            self.is_worse = recent > usual + shared.WORSE * deviation
            self.is_better = recent < usual - shared.HALF * deviation
        if len(self.latest) >= shared.RECENT:
            self.best = min(self.best, recent)
            learned = self.first - self.best
            is_lost = (
                learned > shared.NOISE * abs(self.first) and recent > (self.first + self.best) / 2
            )
            # A loss that is noise from the start has a best five by luck (weak_signal).
            is_lost = is_lost and learned > shared.WORSE * self.window.noise
            self.losses_lost = self.losses_lost + 1 if is_lost else 0
        if len(self.window):
            highest = self.window.highest
            self.excess = (loss - highest) / abs(highest) if highest else 0.0
            few = _FAR_OF_FEW * abs(highest) if len(self.window) < shared.FEWEST else 0.0
            self.limit = highest + max(shared.HALF * self.window.range, few)
        if loss > self.limit:
            self.high.append(Logged(step, loss))
        else:
            self.high.clear()
        self.window.add(loss, unusual=bool(self.high))


# Of the highest loss, for a short window: without it the healthy lora alarms.
_FAR_OF_FEW = 0.2


@dataclass(kw_only=True)
class Rise:
    """A loss that rose from its usual level."""

    first: float  # in the first steps of the run
    usual: float  # before the rise
    peak: float  # the highest since

    def is_undone(self, loss: float) -> bool:
        """Whether the latest loss undoes half of the rise.

        A rise above the loss of the first steps counts up to there: the loss of an untrained model
        is no recovery. If the loss had hardly fallen before it rose, it has to fall.
        """
        self.peak = max(self.peak, loss)
        learned = self.first - self.usual
        if abs(learned) <= shared.NOISE * abs(self.first):
            return loss < self.first - shared.NOISE * abs(self.first)
        top = min(self.peak, self.first) if learned > 0 else self.peak
        return loss < (self.usual + top) / 2

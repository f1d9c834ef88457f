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

from telemetry.layers.onset import NORMAL_CONSISTENT

LATEST = 20  # steps, or losses, that a window excludes; tried 10 and 40
LENGTH = 100  # of a window; tried 50 and 200
FEWEST = 10  # values of a window: their range is 3.1 deviations, that of a hundred 5.0
RECENT = 5  # losses whose median ignores two outliers; tried 2 and 10
NOISE = 0.03  # of the first loss: less may be noise


class Window:
    """Last hundred values of a figure without the latest 20; of fewer than 40, the older half."""

    _values: deque[float]
    _unusual: deque[float]
    _extremes: tuple[float, float] | None = None  # of the window, once asked for

    def __init__(self) -> None:
        self._values, self._unusual = deque(maxlen=LENGTH + LATEST), deque()

    def add(self, value: float, *, unusual: bool = False) -> None:
        """Add the latest value."""
        if unusual:
            self._unusual.append(value)
            if len(self._unusual) <= LATEST:
                return
            self._values.clear()
            self._values.extend(self._unusual)
            self._extremes = None
        else:
            values, extremes = self._values, self._extremes
            oldest = values[0] if len(values) == values.maxlen else None
            values.append(value)
            if extremes is None or oldest is None or oldest in extremes:
                self._extremes = None
            else:  # one value enters the window, and none of its extremes leaves it
                entering = values[LENGTH - 1]
                self._extremes = min(extremes[0], entering), max(extremes[1], entering)
        self._unusual.clear()

    def __len__(self) -> int:
        count = len(self._values)
        return count - min(LATEST, count // 2)

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
        if self._extremes is None:
            values = self.values
            self._extremes = min(values), max(values)
        return self._extremes

    @property
    def highest(self) -> float:
        return self.extremes[1]

    @property
    def extremes_of_all(self) -> tuple[float, float]:
        """Lowest and highest value, the latest ones included."""
        return min(self._values), max(self._values)

    @property
    def range(self) -> float:
        """Highest minus lowest, at least a thousandth of the highest, also for a constant."""
        lowest, highest = self.extremes
        return max(highest - lowest, 1e-3 * abs(highest))

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
        if len(self) < FEWEST:
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
    first: float = math.nan  # median of the first five that were not far above
    best: float = math.inf  # the lowest median of five
    is_worse: bool = False  # the recent median is four standard deviations above the window
    is_better: bool = False  # the recent median is half a deviation below the window
    excess: float = 0.0  # (last loss - highest before) / |highest before|
    losses_lost: int = 0  # consecutive losses at which half of the progress was lost
    _firsts: tuple[float, ...] = ()
    limit: float = math.inf  # threshold of losses far above the window

    def __init__(self) -> None:
        self.window, self.high = Window(), deque(maxlen=LATEST + 1)
        self.latest = deque(maxlen=3 * LATEST)

    def median_of(self, count: int) -> float:
        """Return the median of the last ``count`` losses; NaN before the first."""
        latest = sorted([logged.loss for logged in islice(reversed(self.latest), count)])
        return latest[len(latest) // 2] if latest else math.nan

    @property
    def has_not_fallen(self) -> bool:
        """Whether no five losses were lower than the first five by more than noise."""
        return self.best > (1 - NOISE) * self.first > 0

    def is_floor(self, loss: float) -> bool:
        """Whether a loss is almost zero compared with the first: a rise to it loses nothing.

        Adam varies by a factor of 300 where a regression without noise has reached a
        ten-thousandth (regression_at_its_floor), and spikes (curve_at_its_floor).
        """
        return 0 <= loss < NOISE * abs(self.first)

    def jump_since(self, since: int) -> LossJump:
        """Return the rise of the loss at step ``since`` or later."""
        before = [loss for step, loss in self.latest if step < since][-LATEST:]
        after = [logged for logged in self.latest if logged.step >= since]
        limit = max(before) + _FAR * (max(before) - min(before)) if before else -math.inf
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
        recent = self.recent = self.median_of(RECENT)
        if judged and len(self.window) >= RECENT:
            usual, deviation = self.window.of_latest(LATEST)
            deviation = max(deviation, 1e-3 * abs(usual))  # so that a constant has one
            self.is_worse = recent > usual + WORSE * deviation
            self.is_better = recent < usual - _BETTER * deviation
        if len(self.latest) >= RECENT and self._firsts:
            self.best = min(self.best, recent)
            learned = self.first - self.best
            is_lost = learned > NOISE * abs(self.first) and recent > (self.first + self.best) / 2
            # A loss that is noise from the start has a best five by luck (weak_signal).
            is_lost = is_lost and learned > WORSE * self.window.noise
            self.losses_lost = self.losses_lost + 1 if is_lost else 0
        if len(self.window):
            highest = self.window.highest
            self.excess = (loss - highest) / abs(highest) if highest else 0.0
            few = _FAR_OF_FEW * abs(highest) if len(self.window) < FEWEST else 0.0
            self.limit = highest + max(_FAR * self.window.range, few)
        if loss > self.limit:
            self.high.append(Logged(step, loss))
        else:
            self.high.clear()
        if len(self._firsts) < RECENT and not self.high:
            self._firsts = (*self._firsts, loss)
            self.first = median_high(self._firsts)
        self.window.add(loss, unusual=bool(self.high))


# A normally distributed loss exceeds this once in 30,000 steps. At 0.8 the vanishing
# mlp_tanh20_small is called exploding; tried 2 and 20.
WORSE = 4.0  # deviations
_BETTER = 0.5  # chosen manually; tried 0.25 and 1
# Of the highest loss, for a short window: without it the healthy lora alarms.
_FAR_OF_FEW = 0.2
_FAR = 0.5  # of the range of the window; chosen manually; tried 0.1 and 2.5


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
        if abs(learned) <= NOISE * abs(self.first):
            return loss < self.first - NOISE * abs(self.first)
        top = min(self.peak, self.first) if learned > 0 else self.peak
        return loss < (self.usual + top) / 2

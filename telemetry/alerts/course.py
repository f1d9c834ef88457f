"""How a run goes as a whole: its loss, gradient norm, learning rate and the size of its steps."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from telemetry.alerts.history import History, median
from telemetry.records import StepRecord
from telemetry.rule import Rule

NEVER = 10**9
"""Steps since something that has not happened."""


class Course:
    """What the rules want to know of the whole run; they may share one.

    Attributes:
        loss: See :class:`LossTrend`.
        norm: See :class:`NormTrend`.
        age: Steps seen before this one.
        since_rate_jump: Steps since the learning rate rose threefold above all former ones.
        since_large_step: Steps since one moved the median weight matrix by more than a fifth.
        step_ratio: How far the last measured one moved it, relative to its size.
    """

    loss: LossTrend
    norm: NormTrend
    age: int
    since_rate_jump: int
    since_large_step: int
    step_ratio: float
    _rates: History
    _ratios: History

    def __init__(self) -> None:
        self.loss = LossTrend()
        self.norm = NormTrend()
        self.age = -1
        self.since_rate_jump = NEVER
        self.since_large_step = NEVER
        self.step_ratio = 0.0
        self._rates = History(1000)
        self._ratios = History(5)
        self._last: StepRecord | None = None

    def follow(self, record: StepRecord) -> None:
        """Take one step; once, also if several rules ask."""
        if record is self._last:
            return
        self._last = record
        self.age += 1
        self.since_rate_jump += 1
        self.since_large_step += 1
        self._follow_rates(record.learning_rates)
        if record.loss is not None and math.isfinite(record.loss):
            self.loss.add(record.loss)
        if record.all_grads_finite:
            self.norm.add(record.total_grad_norm)
        if record.update_ratios:
            self._follow_ratio(_median_ratio(record))

    @property
    def is_young(self) -> bool:
        """Whether training can hardly have changed the model yet."""
        return self.age < _YOUNG

    @property
    def gradients_led(self) -> bool:
        """Whether gradients jumped while the learning rate was what it was, and not too large."""
        usual = self._ratios.median if len(self._ratios) else 0.0
        return (
            self.norm.since_jump <= _JUST
            and self.since_rate_jump > self.norm.since_jump + _JUST
            and usual < _LARGE_USUALLY
        )

    def _follow_rates(self, rates: tuple[float, ...]) -> None:
        rate = max(rates, default=0.0)
        if len(self._rates) >= _FEW and rate > _RATE_JUMP * self._rates.highest:
            self.since_rate_jump = 0
        self._rates.add(rate)

    def _follow_ratio(self, ratio: float) -> None:
        self.step_ratio = ratio
        if ratio >= LARGE_STEP:
            self.since_large_step = 0
        if self.norm.since_jump > _JUST:
            self._ratios.add(ratio)


class CourseRule(Rule):
    """A rule that judges a step by how the run goes as a whole.

    Attributes:
        course: Its own, until it is given one that rules share.
    """

    def __init__(self) -> None:
        self.course = Course()


LARGE_STEP = 0.2
_LARGE_USUALLY = 0.05
_YOUNG = 5
_JUST = 10
_FEW = 5
_RATE_JUMP = 3.0


class LossTrend:
    """Whether the loss is where it was. It may have any unit and sign.

    The last five losses are compared with thirty before them; while they are worse, those before
    them stay as they are, for a hundred steps.

    Attributes:
        is_worse: Whether it rose four standard deviations of its past above it.
        is_better: Whether it fell below it by half a standard deviation.
        is_recovering: Whether it is worse, but falling: a fifth of the rise is undone.
        steps_far_above: Losses in a row that were far above all of the last hundred before.
    """

    is_worse: bool
    is_better: bool
    is_recovering: bool
    steps_far_above: int
    _past: History
    _recent: deque[float]
    _steps_worse: int
    _peak: float
    _all: History

    def __init__(self) -> None:
        self.is_worse = False
        self.is_better = False
        self.is_recovering = False
        self.steps_far_above = 0
        self._past = History(30)
        self._recent = deque(maxlen=_RECENT)
        self._steps_worse = 0
        self._peak = 0.0
        self._all = History(100)

    def add(self, loss: float) -> None:
        """Take the finite loss of one step."""
        if len(self._recent) == _RECENT and not 0 < self._steps_worse <= _PATIENCE:
            self._past.add(self._recent[0])
        self._recent.append(loss)
        if len(self._past) >= _RECENT:
            self._compare(median(self._recent))
        is_far_above = len(self._all) > 0 and loss > self._limit()
        self.steps_far_above = self.steps_far_above + 1 if is_far_above else 0
        if not 0 < self.steps_far_above <= _OUTLIERS:
            self._all.add(loss)

    def _compare(self, recent: float) -> None:
        usual = self._past.median
        spread = max(self._past.spread, 1e-3 * abs(usual))
        self.is_worse = recent > usual + 4 * spread
        self.is_better = recent < usual - 0.5 * spread
        self._steps_worse = self._steps_worse + 1 if self.is_worse else 0
        self._peak = max(self._peak, recent) if self._steps_worse > 1 else recent
        self.is_recovering = self.is_worse and recent < self._peak - 0.2 * (self._peak - usual)

    def _limit(self) -> float:
        """Half the range of the losses so far above the highest; of few losses a fifth of it."""
        highest, lowest = self._all.highest, self._all.lowest
        few = 0.2 * abs(highest) if len(self._all) < _FEW else 0.0
        return highest + max(0.5 * (highest - lowest), few)


_RECENT = 5
_PATIENCE = 100
_OUTLIERS = 20


class NormTrend:
    """Where the total gradient norm is against its past, in decades; clipping hides it.

    What lies thirty times above all before is not what is usual, unless it stays for 50 steps.

    Attributes:
        above: Above the highest of the last hundred steps; 0 while there are few.
        far_above: Above the highest of a hundred steps that are more than 20 steps ago.
        usual: Median of these, as a norm.
        since_jump: Steps since it first was five times above the highest.
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
        self._totals = History(100)
        self._between = deque(maxlen=20)
        self._long_ago = History(100)
        self._steps_unusual = 0

    def add(self, total: float) -> None:
        """Take the finite norm of one step."""
        self.since_jump += 1
        self.above = self.far_above = 0.0
        if total == 0:
            return
        level = math.log10(total)
        if len(self._totals) >= _SHORTEST:
            past = self._long_ago if len(self._long_ago) else self._totals
            self.above = level - self._totals.highest
            self.far_above = level - past.highest
            self.usual = 10**past.median
            if self.above >= _JUMP and self.since_jump > _SAME_JUMP:
                self.since_jump = 0
        self._steps_unusual = self._steps_unusual + 1 if self.above > _UNUSUAL else 0
        if not 0 < self._steps_unusual <= _NEW_NORMAL:
            self._remember(level)

    def _remember(self, level: float) -> None:
        self._totals.add(level)
        if len(self._between) == self._between.maxlen:
            self._long_ago.add(self._between[0])
        self._between.append(level)


_SHORTEST = 10
_JUMP = 0.7
_SAME_JUMP = 30
_UNUSUAL = 1.5
_NEW_NORMAL = 50


def _median_ratio(record: StepRecord) -> float:
    matrices = {p.name for p in record.layout.parameters if len(p.shape) > 1}
    ratios = [r for n, r in record.update_ratios.items() if n in matrices and np.isfinite(r)]
    return float(np.median(ratios)) if ratios else 0.0

"""How a run develops: its loss, gradient norm, learning rate and the size of its steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import TypeVar

import numpy as np

from telemetry.alerts.history import History, median
from telemetry.records import LightSteps, StepRecord
from telemetry.rule import Rule

Trend = TypeVar("Trend", "LossTrend", "NormTrend")

NEVER = 10**9
"""Number of steps since an event that has not happened."""


class Course:
    """What rules need to know of the whole run; they may share one course.

    Attributes:
        loss: See :class:`LossTrend`.
        norm: See :class:`NormTrend`.
        age: Steps seen before this one.
        since_rate_jump: Steps since the learning rate rose threefold above all former ones.
        since_large_step: Steps since one moved the median weight matrix by a fifth of its norm.
        step_ratio: The median update ratio of the weight matrices at the last full measurement.
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
        self._last: StepRecord | LightSteps | None = None
        # The latest that were looked at, how many are quiet, and the trends after those.
        self._ahead: tuple[LightSteps | None, int, LossTrend, NormTrend]
        self._ahead = None, 0, self.loss, self.norm

    def follow(self, record: StepRecord) -> None:
        """Add a step; several rules may pass the same record."""
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

    def quiet_steps(self, steps: LightSteps) -> int:
        """How many of the first steps pass before loss, norm or learning rate jump."""
        if self._ahead[0] is not steps:
            self._ahead = steps, *self._look_ahead(steps)
        return self._ahead[1]

    def pass_over(self, steps: LightSteps) -> None:
        """Add quiet steps; several rules may pass the same."""
        if steps is self._last:
            return
        if self.quiet_steps(steps) < len(steps):
            raise ValueError("these steps are not quiet")
        self._last = steps
        _, _, self.loss, norm = self._ahead
        if norm is self.norm:
            norm.add_usual(steps.total_grad_norms.tolist())
        self.norm = norm
        self.age += len(steps)
        self.since_rate_jump += len(steps)
        self.since_large_step += len(steps)
        for rate in steps.highest_rates:
            self._rates.add(rate)

    def _look_ahead(self, steps: LightSteps) -> tuple[int, LossTrend, NormTrend]:
        """The number of quiet steps, and the trends after all if they all are.

        That of the norms is the same one, and has nothing added, if they all are usual.
        """
        rates = [self._rates.last, *steps.highest_rates]
        quiet = len(steps)
        for i in range(quiet):
            if rates[i + 1] > _RATE_JUMP * rates[i]:
                quiet = i
                break
        loss, norm = self.loss, self.norm
        losses, totals = steps.losses.tolist(), steps.total_grad_norms.tolist()
        if not all(map(math.isnan, losses)):
            loss = _branch(loss)
            quiet = min(quiet, loss.add_quiet(losses))
        if not norm.are_usual(totals):
            norm = _branch(norm)
            quiet = min(quiet, norm.add_quiet(totals))
        return quiet, loss, norm

    @property
    def is_young(self) -> bool:
        """Whether training can hardly have changed the model so far."""
        return self.age < _YOUNG

    @property
    def gradients_led(self) -> bool:
        """Whether gradients just jumped while the learning rate did not, and was not too large."""
        usual = self._ratios.median if len(self._ratios) else 0.0
        return (
            self.norm.since_jump <= _JUST
            and self.since_rate_jump > self.norm.since_jump + _JUST
            and usual < _LARGE_USUALLY
        )

    def _follow_rates(self, rates: tuple[float, ...]) -> None:
        rate = max(rates, default=0.0)
        # The last one is looked at first, for the highest of a thousand takes some time to find.
        # The last one first: to find the highest of a thousand takes some time.
        rises = len(self._rates) >= _FEW and rate > _RATE_JUMP * self._rates.last
        if rises and rate > _RATE_JUMP * self._rates.highest:
            self.since_rate_jump = 0
        self._rates.add(rate)

    def _follow_ratio(self, ratio: float) -> None:
        self.step_ratio = ratio
        if ratio >= LARGE_STEP:
            self.since_large_step = 0
        if self.norm.since_jump > _JUST:
            self._ratios.add(ratio)


class CourseRule(Rule):
    """A rule that also looks at how the run develops.

    Attributes:
        course: Its own; may be replaced by one that several rules share.
    """

    def __init__(self) -> None:
        self.course = Course()

    def quiet_steps(self, steps: LightSteps) -> int:
        return self.course.quiet_steps(steps) if self.course.age >= 0 else 0

    def pass_over(self, steps: LightSteps) -> None:
        self.course.pass_over(steps)


def _branch(trend: Trend) -> Trend:
    """A trend that goes on by itself."""
    branch = copy(trend)
    for name, value in vars(branch).items():
        if isinstance(value, deque | History):
            setattr(branch, name, copy(value))
    return branch


# As update_ratio of loss_divergence: at 0.1 the healthy rare_positive_weighted alarms; tried 0.4.
LARGE_STEP = 0.2
# Five times the 0.01 that healthy runs stay below (see LossDivergence); tried 0.01 and 0.25.
_LARGE_USUALLY = 0.05
_YOUNG = 5  # by eye, in steps; tried 1 and 25
_JUST = 10  # by eye, in steps: one full measurement in faultbench; tried 2 and 50
_FEW = 5  # the fewest values of which a median means something; tried 2 and 10
# Warm restarts return to the highest rate so far, and warm-up climbs slowly: neither triples it.
# Below 1, cnn_scaled_batch and cnn_overwrite_big are missed; tried 1.5 and 15.
_RATE_JUMP = 3.0


class LossTrend:
    """Whether the loss rises or falls. It may have any unit and sign.

    The last five losses are compared with the thirty before. While they are worse, the thirty are
    kept unchanged, for at most a hundred steps.

    Attributes:
        is_worse: Whether its recent median is four standard deviations above its past.
        is_better: Whether that is half a standard deviation below its past.
        is_recovering: Whether it is worse, but has fallen again by a fifth of its rise.
        steps_far_above: Number of losses in a row that were far above each of the hundred before.
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
        self._past = History(_PAST)
        self._recent = deque(maxlen=_RECENT)
        self._steps_worse = 0
        self._peak = 0.0
        self._all = History(_ALL)

    def add(self, loss: float) -> None:
        """Add the finite loss of one step."""
        if len(self._recent) == _RECENT and not 0 < self._steps_worse <= _PATIENCE:
            self._past.add(self._recent[0])
        self._recent.append(loss)
        if len(self._past) >= _RECENT:
            self._compare(median(self._recent))
        is_far_above = len(self._all) > 0 and loss > self._limit()
        self.steps_far_above = self.steps_far_above + 1 if is_far_above else 0
        if not 0 < self.steps_far_above <= _OUTLIERS:
            self._all.add(loss)

    def add_quiet(self, losses: Sequence[float]) -> int:
        """Add losses until one is far above; how many came before that. NaN: there was none."""
        for i, loss in enumerate(losses):
            if math.isfinite(loss):
                self.add(loss)
            if self.steps_far_above:
                return i
        return len(losses)

    def _compare(self, recent: float) -> None:
        usual = self._past.median
        spread = max(self._past.spread, _LEAST_SPREAD * abs(usual))
        self.is_worse = recent > usual + _WORSE * spread
        self.is_better = recent < usual - _BETTER * spread
        self._steps_worse = self._steps_worse + 1 if self.is_worse else 0
        self._peak = max(self._peak, recent) if self._steps_worse > 1 else recent
        self.is_recovering = self.is_worse and recent < self._peak - _RECOVERED * (
            self._peak - usual
        )

    def _limit(self) -> float:
        """A loss above this is far above all before."""
        highest, lowest = self._all.highest, self._all.lowest
        few = _FAR_OF_FEW * abs(highest) if len(self._all) < _FEW else 0.0
        return highest + max(_FAR * (highest - lowest), few)


_RECENT = 5  # a median of 5 ignores two outliers; tried 2 and 10
_PAST = 30  # by eye, in steps; tried 15 and 60
_ALL = 100  # by eye, in steps; tried 50 and 200
_LEAST_SPREAD = 1e-3  # so that a constant loss has one, too; tried 0.0005 and 0.002
# A normally distributed loss exceeds this once in 30,000 steps. At 0.8 the vanishing
# mlp_tanh20_small is called exploding; tried 2 and 20.
_WORSE = 4.0
_BETTER = 0.5  # by eye; tried 0.25 and 1
_RECOVERED = 0.2  # by eye; tried 0.1 and 0.4
_FAR = 0.5  # of the range of the losses so far, by eye; tried 0.1 and 2.5
_FAR_OF_FEW = 0.2  # of the highest loss, while the range says little; by eye; tried 0.1 and 0.4
_PATIENCE = 100  # by eye, in steps; tried 50 and 200
_OUTLIERS = 20  # by eye, in losses; tried 10 and 40


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

    def add_usual(self, totals: Sequence[float]) -> None:
        """Add usual norms; only the last is compared with those before."""
        for total in totals[:-1]:
            self._remember(math.log10(total))
        self.since_jump += len(totals) - 1
        self.add(totals[-1])

    def _remember(self, level: float) -> None:
        self._totals.add(level)
        if len(self._between) == self._between.maxlen:
            self._long_ago.add(self._between[0])
        self._between.append(level)


_BETWEEN = 20  # by eye, in steps; tried 10 and 40
_SHORTEST = 10  # by eye, in steps; tried 2 and 50
_JUMP = FAR_ABOVE = 0.7  # a factor of 5, by eye; tried 0.14 and 3.5
_SAME_JUMP = 30  # by eye, in steps; tried 15 and 60
_UNUSUAL = 1.5  # a factor of 30, that of ExplodingGradient's lasting_factor; tried 0.3 and 7.5
_NEW_NORMAL = 50  # by eye, in steps; tried 25 and 100


def _median_ratio(record: StepRecord) -> float:
    matrices = {p.name for p in record.layout.parameters if len(p.shape) > 1}
    ratios = [r for n, r in record.update_ratios.items() if n in matrices and np.isfinite(r)]
    return float(np.median(ratios)) if ratios else 0.0

"""How a run develops: its loss, gradient norm, learning rate and the size of its steps."""

from __future__ import annotations

import math

from telemetry.alerts.history import History, middle
from telemetry.alerts.loss_trend import LossTrend
from telemetry.alerts.norm_trend import FAR_ABOVE, NEVER, NormTrend
from telemetry.records import StepRecord
from telemetry.rule import Rule

__all__ = ["AFTER_JUMP", "FAR_ABOVE", "LARGE_STEP", "NEVER", "Course", "CourseRule"]


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
    _ratio_rate: float
    _rates: History
    _ratios: History

    def __init__(self) -> None:
        self.loss = LossTrend()
        self.norm = NormTrend()
        self.age = -1
        self.since_rate_jump = NEVER
        self.since_large_step = NEVER
        self.step_ratio = 0.0
        self._ratio_rate = 0.0
        self._rates = History(1000)
        self._ratios = History(5)
        self._last: StepRecord | None = None

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

    @property
    def is_young(self) -> bool:
        """Whether training can hardly have changed the model so far."""
        return self.age < _YOUNG

    @property
    def follows_rate_jump(self) -> bool:
        """Whether the learning rate has jumped so recently that what happens comes from it."""
        return self.since_rate_jump <= AFTER_JUMP

    @property
    def rate_rise(self) -> tuple[float, float]:
        """The learning rate now, and the lowest of the last hundred steps above zero."""
        lowest = min((rate for rate in self._rates.latest(_ALL) if rate > 0), default=0.0)
        return (self._rates.last if len(self._rates) else 0.0), lowest

    def ratio_at(self, rate: float) -> float:
        """The ratio of a step that was not measured: 0 unless the rate has risen since one was."""
        growth = rate / self._ratio_rate if self._ratio_rate > 0 else 0.0
        return self.step_ratio * growth if growth >= _RATE_JUMP else 0.0

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
        # The last one first: to find the highest of a thousand takes some time.
        rises = len(self._rates) >= _FEW and rate > _RATE_JUMP * self._rates.last
        if rises and rate > _RATE_JUMP * self._rates.highest:
            self.since_rate_jump = 0
        self._rates.add(rate)

    def _follow_ratio(self, ratio: float) -> None:
        self.step_ratio, self._ratio_rate = ratio, self._rates.last
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


# As update_ratio of loss_divergence: at 0.1 the healthy rare_positive_weighted alarms; tried 0.4.
LARGE_STEP = 0.2
# Five times the 0.01 that healthy runs stay below (see LossDivergence); tried 0.01 and 0.25.
_LARGE_USUALLY = 0.05
# What a jump does between two full measurements is seen some steps later, in those that rules ask
# for. By then a momentum of 0.9 has forgotten most of it.
AFTER_JUMP = 20
_YOUNG = 5  # by eye, in steps; tried 1 and 25
_ALL = 100  # by eye, in steps, as of losses
_JUST = 10  # by eye, in steps: one full measurement in faultbench; tried 2 and 50
_FEW = 5  # the fewest values of which a median means something; tried 2 and 10
# Warm restarts return to the highest rate so far, and warm-up climbs slowly: neither triples it.
# Below 1, cnn_scaled_batch and cnn_overwrite_big are missed; tried 1.5 and 15.
_RATE_JUMP = 3.0


def _median_ratio(record: StepRecord) -> float:
    matrices = record.layout.matrices
    ratios = [r for n, r in record.update_ratios.items() if n in matrices and math.isfinite(r)]
    return middle(ratios) if ratios else 0.0

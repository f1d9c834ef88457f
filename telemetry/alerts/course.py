"""How a run develops: its loss, gradient norm, learning rate and the size of its steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from telemetry.alerts.history import (
    FAR_ABOVE,
    NEVER,
    History,
    NormTrend,
    Past,
    Ranked,
    median,
    middle,
)
from telemetry.records import StepRecord

__all__ = ["AFTER_JUMP", "FAR_ABOVE", "LARGE_STEP", "NEVER", "Course"]


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
    age: int = -1
    since_rate_jump: int = NEVER
    since_large_step: int = NEVER
    step_ratio: float = 0.0
    _ratio_rate: float = 0.0
    _rates: History
    _ratios: History

    def __init__(self) -> None:
        self.loss = LossTrend()
        self.norm = NormTrend()
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
        since = self.norm.since_jump
        if since > _JUST or self.since_rate_jump <= since + _JUST:
            return False
        return not len(self._ratios) or self._ratios.median < _LARGE_USUALLY

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


class LossTrend:
    """Whether the loss rises or falls. It may have any unit and sign.

    Three comparisons, from fast to slow:

    - Each loss with the hundred that lie more than twenty steps back (in the first steps, with the
      older half of all): with those just before it, a loss that rises step by step would raise its
      own limit.
    - The last five with the thirty before. While they are worse, the thirty are kept unchanged, for
      at most a hundred steps.
    - The last five with the best five and the first five: has half of what was learned been lost?
      However slowly the loss rises, it comes to that.

    Attributes:
        is_worse: Whether its recent median is four standard deviations above its past.
        is_better: Whether that is half a standard deviation below its past.
        is_recovering: Whether it is worse, but has fallen again by a fifth of its rise.
        steps_far_above: Number of losses in a row that were far above each of the past hundred.
        excess: By how many times its magnitude the last loss exceeds the highest of the past.
        steps_lost: Number of losses in a row after which half of what was learned had been lost.
    """

    is_worse: bool = False
    is_better: bool = False
    is_recovering: bool = False
    steps_far_above: int = 0
    excess: float = 0.0
    steps_lost: int = 0
    _first: tuple[float, ...] = ()
    _best: float = math.inf
    _recent: deque[float]
    _past: Ranked
    _steps_worse: int = 0
    _peak: float = 0.0
    _long_ago: Past

    def __init__(self) -> None:
        self._recent = deque(maxlen=_RECENT)
        self._past = Ranked(_PAST)
        self._long_ago = Past(_LATEST)

    @property
    def first(self) -> float:
        """Median of the first five losses that were not far above; there must be one."""
        return median(self._first)

    @property
    def usual(self) -> float:
        """Median of the past; there must be one loss."""
        return self._long_ago.median

    @property
    def is_unbounded(self) -> bool:
        """Whether it is so far below zero that nothing seems to limit it: ten first losses."""
        recent = median(self._recent) if self._first else 0.0
        return recent < 0 and recent < -_UNBOUNDED * abs(self.first)

    @property
    def has_lost(self) -> bool:
        """Whether half of what was learned is lost for certain."""
        return self.steps_lost >= _RECENT

    @property
    def has_just_lost(self) -> bool:
        """Whether that is so since this loss."""
        return self.steps_lost == _RECENT

    def add(self, loss: float) -> None:
        """Add the finite loss of one step."""
        if len(self._recent) == _RECENT and not 0 < self._steps_worse <= _PATIENCE:
            self._past.add(self._recent[0])
        self._recent.append(loss)
        recent = median(self._recent)
        if len(self._past) >= _RECENT:
            self._compare(recent)
        self._compare_with_best(recent)
        self._compare_with_past(loss)
        self._remember(loss)

    def _compare(self, recent: float) -> None:
        usual = self._past.median
        deviation = max(self._past.deviation, _LEAST_DEVIATION * abs(usual))
        self.is_worse = recent > usual + _WORSE * deviation
        self.is_better = recent < usual - _BETTER * deviation
        self._steps_worse = self._steps_worse + 1 if self.is_worse else 0
        self._peak = max(self._peak, recent) if self._steps_worse > 1 else recent
        self.is_recovering = self.is_worse and recent < self._peak - _RECOVERED * (
            self._peak - usual
        )

    def _compare_with_best(self, recent: float) -> None:
        if len(self._recent) < _RECENT or not self._first:
            return
        self._best = min(self._best, recent)
        first = self.first
        has_learned = first - self._best > _LEARNED * abs(first)
        is_lost = has_learned and recent > (first + self._best) / 2
        self.steps_lost = self.steps_lost + 1 if is_lost else 0

    def _compare_with_past(self, loss: float) -> None:
        if not self._long_ago:
            return
        highest, lowest = self._long_ago.highest, self._long_ago.lowest
        few = _FAR_OF_FEW * abs(highest) if len(self._long_ago) < _FEW_LOSSES else 0.0
        is_far_above = loss > highest + max(_FAR * (highest - lowest), few)
        self.steps_far_above = self.steps_far_above + 1 if is_far_above else 0
        self.excess = (loss - highest) / abs(highest) if highest else 0.0

    def _remember(self, loss: float) -> None:
        if len(self._first) < _RECENT and not self.steps_far_above:
            self._first = (*self._first, loss)
        if self.steps_far_above > _OUTLIERS:  # it is how things are now
            self._long_ago.adopt(loss)
        elif self.steps_far_above == 0:
            self._long_ago.add(loss)


_RECENT = 5  # a median of 5 ignores two outliers; tried 2 and 10
_PAST = 30  # by eye, in steps; tried 15 and 60
_LATEST = 20  # steps; as _BETWEEN of NormTrend
_LEARNED = 0.1  # of the first loss: less may be noise; by eye
_LEAST_DEVIATION = 1e-3  # so that a constant loss has one, too; tried 0.0005 and 0.002
# A normally distributed loss exceeds this once in 30,000 steps. At 0.8 the vanishing
# mlp_tanh20_small is called exploding; tried 2 and 20.
_WORSE = 4.0
_BETTER = 0.5  # by eye; tried 0.25 and 1
_RECOVERED = 0.2  # by eye; tried 0.1 and 0.4
_FAR = 0.5  # of the range of the losses so far, by eye; tried 0.1 and 2.5
_FAR_OF_FEW = 0.2  # of the highest loss, while the range says little; by eye; tried 0.1 and 0.4
_FEW_LOSSES = 10  # losses whose range says little, as _FEWEST of Past
_PATIENCE = 100  # by eye, in steps; tried 50 and 200
_UNBOUNDED = 10.0  # by eye
_OUTLIERS = 20  # by eye, in losses; tried 10 and 40


@dataclass(frozen=True, kw_only=True)
class Rise:
    """A loss that rose from its usual level.

    Attributes:
        first: What it was in the first steps of the run.
        usual: What it was before it rose.
        peak: The highest since.
    """

    first: float
    usual: float
    peak: float

    def followed_by(self, loss: float) -> Rise:
        return self if loss <= self.peak else replace(self, peak=loss)

    def is_undone(self, loss: float) -> bool:
        """Whether this loss is so low that the rise is as good as over.

        That is when half of the rise is undone. Where the loss rose above that of the first steps,
        it is half of the way up to there: to be no worse than an untrained model is no recovery.
        Where it had hardly come down before it rose, it is when it has.
        """
        learned = self.first - self.usual
        if abs(learned) <= _NOISE * abs(self.first):
            return loss < self.first - _NOISE * abs(self.first)
        top = min(self.peak, self.first) if learned > 0 else self.peak
        return loss < (self.usual + top) / 2


_NOISE = 0.03  # of the first loss: less may be noise; as in LossStuck

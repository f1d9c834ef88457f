"""A loss that rises because the steps are too large."""

from __future__ import annotations

import math
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.course import AFTER_JUMP, LARGE_STEP, NEVER, CourseRule, Rise
from telemetry.alerts.episode import Episode
from telemetry.alerts.summed_gradients import SummedGradients
from telemetry.records import StepRecord


class LossDivergence(CourseRule):
    """Alerts when steps move the weights too far and the loss has risen since.

    A loss may rise for good reasons: a harder task, an annealed term, two networks that compete.
    The learning rate is to blame when an optimizer step moves the median weight matrix by at least
    ``update_ratio`` of its norm (healthy runs have 0.001 to 0.01; their first steps may be larger,
    but then the loss falls; between two measurements it grows with the learning rate), and

    - the next ``losses`` losses are all far above those before. One less is enough if the learning
      rate has just jumped above all former ones, or if it is that of the first steps and the loss
      has become several times as high; or
    - half of what was learned has been lost, after the first hundred steps.

    If gradients jumped and the learning rate did not, this rule is silent: ``exploding_gradient``
    covers that. It is over when :class:`Rise` is undone.

    It alerts, too, when gradients are never zeroed, so that those of all steps add up and steps
    become ever larger (see :class:`SummedGradients`); the loss is high soon after.

    Args:
        update_ratio: Least update ratio of the median weight matrix, at a full measurement.
        losses: Number of high losses in a row, within 20 steps of that measurement.
    """

    name = "loss_divergence"
    _ratio: float
    _since_large: int
    _sums: SummedGradients
    _rise: Rise | None
    _episode: Episode

    def __init__(
        self,
        *,
        update_ratio: float = LARGE_STEP,
        losses: int = 3,  # at 6 mlp_lr_high, cnn_lr30 and mlp_adam_lr_high are missed; tried 1
    ) -> None:
        super().__init__()
        self._update_ratio = update_ratio
        self._losses = losses
        self._ratio = 0.0
        self._since_large = NEVER
        self._sums = SummedGradients()
        self._rise = None
        self._episode = Episode(_CALM_STEPS)

    @property
    def wants_full(self) -> bool:
        """Whether the loss is high and the size of the steps should be measured."""
        course, loss = self.course, self.course.loss
        rises = loss.steps_far_above > 0 or loss.has_just_lost
        suspicious = rises or course.since_rate_jump <= _JUST or self._sums.wants_full
        return suspicious and not self._episode.is_on

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        course = self.course
        course.follow(record)
        self._sums.add(record)
        self._since_large += 1
        ratio = course.ratio_at(max(record.learning_rates, default=0.0))
        ratio = course.step_ratio if record.update_ratios else ratio
        if ratio >= self._update_ratio:
            self._since_large, self._ratio = 0, ratio
        if self._sums.is_sure:
            return self._episode.update(record.step, _summed(record))
        if record.loss is None or not math.isfinite(record.loss):
            return ()
        diverges = self._diverges() if self._rise is None else self._goes_on(record.loss)
        return self._episode.update(record.step, self._alert(record) if diverges else None)

    def _diverges(self) -> bool:
        course, loss = self.course, self.course.loss
        is_new = course.is_young and loss.excess > _FAR
        enough = self._losses - (is_new or course.follows_rate_jump)
        lost = loss.has_lost and course.age > _BEGINNING
        high = loss.steps_far_above >= enough or lost
        if not high or self._since_large > AFTER_JUMP or course.gradients_led:
            return False
        self._rise = Rise(first=loss.first, usual=loss.usual, peak=loss.usual)
        return True

    def _goes_on(self, loss: float) -> bool:
        assert self._rise is not None
        if not self._episode.is_on:
            self._rise = None
            return self._diverges()
        self._rise = self._rise.followed_by(loss)
        return not self._rise.is_undone(loss)

    def _alert(self, record: StepRecord) -> Alert:
        rate, lowest = self.course.rate_rise
        at = f" at a learning rate of {rate:.3g}" if rate > 0 else ""
        if 0 < lowest * _RISEN <= rate:
            at = f" since the learning rate rose from {lowest:.3g} to {rate:.3g}"
        ratio = f"{self._ratio:.0%} of" if self._ratio < 10 else f"{self._ratio:.2g} times"
        return Alert(
            kind=self.name,
            severity="warning",
            step=record.step,
            module_name=None,
            value=self._ratio,
            threshold=self._update_ratio,
            message=(
                f"The loss has risen to {record.loss:.4g}, far above earlier ones, and one "
                f"optimizer step moves the weights by {ratio} their norm{at}.\n"
                "People usually divide the learning rate by 3 to 10, and warm it up."
            ),
        )


def _summed(record: StepRecord) -> Alert:
    return Alert(
        kind=LossDivergence.name,
        severity="warning",
        step=record.step,
        module_name=None,
        value=record.total_grad_norm,
        threshold=0.0,
        message=(
            "The gradients of each step are added to those of the steps before, which nobody "
            f"zeroes: their norm is {record.total_grad_norm:.3g} by now, and steps become ever "
            "larger.\n"
            "Call optimizer.zero_grad() in every step, before backward(). To accumulate gradients, "
            "step once for all of them, and zero them then."
        ),
    )


_JUST = 2  # steps after a jump of the learning rate that are measured in full; tried 1 and 4
_FAR = 3.0  # times the loss itself; meta_learning, which learns, has 2.4 in its first steps
# As many as a past has losses: of fewer, the best is luck. Without it matrix_factorization, which
# learns, alarms at step 16.
_BEGINNING = 100
_RISEN = 3.0  # as a jump in course
_CALM_STEPS = 10  # as many as of a rate that was survived (LossSpike)

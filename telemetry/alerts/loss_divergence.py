"""A loss that rises because the steps are too large."""

from __future__ import annotations

import math
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.course import LARGE_STEP, NEVER, CourseRule
from telemetry.alerts.episode import Episode
from telemetry.records import LightSteps, StepRecord


class LossDivergence(CourseRule):
    """Alerts when steps move the weights too far and the loss has risen since.

    A loss may rise for good reasons: a harder task, an annealed term, two networks that compete.
    The learning rate is to blame when an optimizer step moves the median weight matrix by at least
    ``update_ratio`` of its norm (healthy runs have 0.001 to 0.01; their first steps may be larger,
    but then the loss falls), and the next ``losses`` losses are all far above those before. If the
    learning rate has just jumped above all former ones, one loss less is enough. If gradients
    jumped and the learning rate did not, this rule is silent: ``exploding_gradient`` covers that.

    Args:
        update_ratio: Least update ratio of the median weight matrix, at a full measurement.
        losses: Number of high losses in a row, within 20 steps of that measurement.
    """

    name = "loss_divergence"
    _ratio: float
    _since_large: int
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
        self._episode = Episode(_CALM_STEPS)

    @property
    def wants_full(self) -> bool:
        """Whether the loss is high and the size of the steps should be measured."""
        course = self.course
        suspicious = course.loss.steps_far_above > 0 or course.since_rate_jump <= _JUST
        return suspicious and not self._episode.is_on

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        course = self.course
        course.follow(record)
        self._since_large += 1
        if record.update_ratios and course.step_ratio >= self._update_ratio:
            self._since_large, self._ratio = 0, course.step_ratio
        if record.loss is None or not math.isfinite(record.loss):
            return ()
        enough = self._losses - (course.since_rate_jump <= _REACH)
        diverges = (
            course.loss.steps_far_above >= enough
            and self._since_large <= _REACH
            and not course.gradients_led
        )
        return self._episode.update(record.step, self._alert(record) if diverges else None)

    def quiet_steps(self, steps: LightSteps) -> int:
        busy = self._episode.is_on or self.course.since_rate_jump <= _REACH
        return 0 if busy else super().quiet_steps(steps)

    def pass_over(self, steps: LightSteps) -> None:
        super().pass_over(steps)
        self._since_large += len(steps)

    def _alert(self, record: StepRecord) -> Alert:
        return Alert(
            kind=self.name,
            severity="warning",
            step=record.step,
            module_name=None,
            value=self._ratio,
            threshold=self._update_ratio,
            message=(
                f"The loss has risen to {record.loss:.4g}, above all earlier ones, and one "
                f"optimizer step moves the weights by {self._ratio:.0%} of their norm.\n"
                "People usually divide the learning rate by 3 to 10, and warm it up."
            ),
        )


_REACH = 20  # by eye, in steps; tried 4 and 100
_JUST = 2  # steps after a jump of the learning rate that are measured in full; tried 1 and 4
_CALM_STEPS = 10  # by eye

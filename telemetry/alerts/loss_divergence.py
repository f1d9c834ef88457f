"""A loss that rises because the steps are too large."""

from __future__ import annotations

import math
from collections.abc import Iterable

from telemetry.alerts.course import LARGE_STEP, NEVER, CourseRule
from telemetry.alerts.episode import Episode
from telemetry.records import Alert, StepRecord


class LossDivergence(CourseRule):
    """Speaks when steps move the weights too far and the loss has risen since.

    A loss may rise for good reasons: a harder task, an annealed term, a game of two networks. It
    is the learning rate when optimizer steps move the median weight matrix by more than
    ``update_ratio`` of its size (healthy runs lie around 0.001 to 0.01; their first steps may be
    larger, but then the loss falls), and the ``losses`` after it are all far above all that were
    before. If the learning rate has just jumped beyond all former ones, one loss less will do. If
    it has not, but gradients jumped, they are the fault, and another rule's.

    Args:
        update_ratio: Of the median weight matrix, at a full measurement.
        losses: In a row, within 20 steps of that measurement.
    """

    name = "loss_divergence"
    _ratio: float
    _since_large: int
    _episode: Episode

    def __init__(self, *, update_ratio: float = LARGE_STEP, losses: int = 3) -> None:
        super().__init__()
        self._update_ratio = update_ratio
        self._losses = losses
        self._ratio = 0.0
        self._since_large = NEVER
        self._episode = Episode(_CALM_STEPS)

    @property
    def wants_full(self) -> bool:
        """Whether the loss is up and the size of the steps should be known."""
        course = self.course
        suspicious = course.loss.steps_far_above > 0 or course.since_rate_jump <= 2
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

    def _alert(self, record: StepRecord) -> Alert:
        return Alert(
            kind=self.name,
            severity="warning",
            step=record.step,
            module_name=None,
            value=self._ratio,
            threshold=self._update_ratio,
            message=(
                f"The loss has risen to {record.loss:.4g}, above all before, and one optimizer "
                f"step moves the weights by {self._ratio:.0%} of their size.\n"
                "People usually divide the learning rate by 3 to 10, and warm it up."
            ),
        )


_REACH = 20
_CALM_STEPS = 10

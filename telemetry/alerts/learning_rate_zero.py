"""Steps that are taken with a learning rate of zero."""

from __future__ import annotations

import math
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import Episode
from telemetry.records import StepRecord
from telemetry.rule import Rule


class LearningRateZero(Rule):
    """A note when training goes on though the learning rate of all parameter groups has run out.

    Usual causes are a schedule that was made for fewer steps, and one made for epochs that is
    advanced at each step. Silent in the first steps of a warm-up and the last ones of a schedule.

    Args:
        fraction: Of the highest learning rate so far; below it nothing more is learned.
        steps: Number of such steps in a row.
    """

    name = "learning_rate_zero"
    _highest: float
    _steps: int
    _since: int
    _episode: Episode

    def __init__(
        self,
        *,
        # A million such steps do what one did. Usual schedules end at 0.1 to 0.001 of their peak.
        fraction: float = 1e-6,
        steps: int = 20,  # by eye: a schedule that ends at 0 has one or two such steps
    ) -> None:
        self._fraction = fraction
        self._needed = steps
        self._highest = 0.0
        self._steps = 0
        self._since = 0
        self._episode = Episode(1)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        rate = max(record.learning_rates, default=math.nan)
        if not math.isfinite(sum(record.learning_rates, rate)):
            return ()  # an optimizer without one, which works it out itself
        self._highest = max(self._highest, rate)
        is_zero = rate <= self._fraction * self._highest
        self._since = self._since if is_zero and self._steps else record.step
        self._steps = self._steps + 1 if is_zero else 0
        found = self._alert(record, rate) if self._steps >= self._needed else None
        return self._episode.update(record.step, found)

    def _alert(self, record: StepRecord, rate: float) -> Alert:
        return Alert(
            kind=self.name,
            severity="note",
            step=record.step,
            module_name=None,
            value=rate,
            threshold=self._fraction * self._highest,
            message=(
                f"The learning rate is {rate:.3g} since step {self._since}, after up to "
                f"{self._highest:.3g}: steps go on and change nothing.\n"
                "Check how many steps the schedule was made for, and that it is advanced once for "
                "each of them."
            ),
        )

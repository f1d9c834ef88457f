"""Steps that are taken with a learning rate of zero."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.alerts.episode import Episode
from telemetry.alerts.history import leading
from telemetry.records import Bounds, LightSteps, StepRecord
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

    def quiet_steps(self, steps: LightSteps) -> int:
        if self._steps or self._episode.is_on:
            return 0
        rates = _highest_rates(steps)
        highest = np.fmax.accumulate([self._highest, *rates])[1:]
        return leading(~(rates <= self._fraction * highest))

    def narrow(self, bounds: Bounds) -> bool:
        highest = max(self._highest, bounds.rates_high.max())
        low = bool(bounds.rates_low.max() <= self._fraction * highest)
        return not (low or self._steps or self._episode.is_on)

    def pass_over(self, steps: LightSteps) -> None:
        rates = _highest_rates(steps)
        known = np.flatnonzero(np.isfinite(rates))
        if known.size:
            self._highest = max(self._highest, float(rates[known].max()))
            self._since = steps.steps[known[-1]]

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


def _highest_rates(steps: LightSteps) -> NDArray[np.float64]:
    """Of each step, shape ``[n]``; NaN where an optimizer has none or works it out itself."""
    rates = steps.learning_rates
    if not rates.shape[1]:
        return np.full(len(steps), math.nan)
    highest: NDArray[np.float64] = np.where(
        np.isfinite(rates).all(axis=1), rates.max(axis=1), np.nan
    )
    return highest

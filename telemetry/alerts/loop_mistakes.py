"""Mistakes in the training loop: evaluation mode, one batch again and again, a rate of zero."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import EpisodeRule
from telemetry.alerts.history import median
from telemetry.records import Layout, StepRecord


class EvalMode(EpisodeRule):
    """A note when optimizer steps are taken while the whole model is in evaluation mode.

    That is usual after ``from_pretrained()`` or a validation, where ``train()`` was forgotten.
    Silent where only some modules are in evaluation mode, as batch norms that are frozen on
    purpose, and where no module does anything else in training: the model has neither dropout nor
    batch norm.

    Args:
        steps: Number of such steps in a row.
    """

    name = "eval_mode"
    steps = 20  # by eye: a step or two may be an experiment
    _steps: int = 0
    _differ: tuple[str, ...] = ()

    def _set_up(self) -> None:
        self._layout: Layout | None = None

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if record.layout is not self._layout:
            self._layout = record.layout
            self._differ = tuple(
                sorted({m.type_name for m in record.layout.modules if _DIFFER.search(m.type_name)})
            )
        self._steps = self._steps + 1 if record.eval_mode and self._differ else 0
        found = self._found(record) if self._steps >= self.steps else None
        return self._episode.update(record.step, found)

    def _found(self, record: StepRecord) -> Alert:
        message = (
            f"{self._steps} steps in a row were taken in evaluation mode, in which "
            f"{', '.join(self._differ[:3])} work differently.\n"
            "Call model.train() before training and after each validation, unless this is "
            "meant to be so."
        )
        return self._alert(record.step, None, self._steps, self.steps, message, "note")


# What torch's own modules that look at ``training`` are called, and most of other libraries.
_DIFFER = re.compile("BatchNorm|Drop|RReLU")


class SameBatch(EpisodeRule):
    """A note when the model was given the same values at all steps that were looked at.

    A loader that begins anew after each epoch repeats its batches, too. So the rule compares steps
    whose distances have no common divisor: then no period but that of a single batch explains it.

    Where the values were other ones before, the loader is stuck. Where they are the same from the
    first step on, the data set may be a single batch, as a graph is; then the rule is silent until
    the loss says that this batch is being learned by heart.

    Args:
        steps: Distance of the first and the last of these steps, at least.
        share: Of the first losses; below it, a batch that was the only one is known by heart.
    """

    name = "same_batch"
    steps = 100  # by eye: PPO takes up to 80 steps on what it has collected
    # The healthy gcn, trained on one graph with dropout, stays above 0.09; constant_batch and
    # first_batch_forever come to 0.0002 and 0.01.
    share = 0.05
    _given: tuple[float, ...] = ()
    _first: int = 0
    _divisor: int = 0
    _refuted: bool = False
    _varied: bool = False
    _wants: bool = False
    _first_losses: tuple[float, ...] = ()
    _losses: deque[float]

    def _set_up(self) -> None:
        self._losses = deque(maxlen=_LOSSES)

    @property
    def wants_full(self) -> bool:
        """Whether one more step would tell a loader's period from a single batch, or decide."""
        return self._wants or (self._waits_for_loss and self._is_known_by_heart())

    @property
    def _waits_for_loss(self) -> bool:
        """Whether the batch is the only one so far, and its loss decides."""
        return self._divisor == 1 and not self._varied and not self._episode.is_on

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if record.loss is not None and math.isfinite(record.loss):
            if len(self._first_losses) < _LOSSES:
                self._first_losses = (*self._first_losses, record.loss)
            self._losses.append(record.loss)
        given = record.fingerprints
        if not given or not all(map(math.isfinite, given)):
            return ()
        if given != self._given:
            self._refuted = self._refuted or self._divisor > 0
            self._varied = bool(self._given)
            self._given, self._first, self._divisor, self._wants = given, record.step, 0, False
            return self._episode.update(record.step, None)
        distance = record.step - self._first
        self._divisor = math.gcd(self._divisor, distance)
        self._wants = self._divisor > 1 and not self._refuted
        found = self._divisor == 1 and distance >= self.steps
        found &= self._varied or self._is_known_by_heart()
        return self._episode.update(record.step, self._found(record, distance) if found else None)

    def _is_known_by_heart(self) -> bool:
        """Whether the loss has come down to next to nothing; True if none is logged."""
        if not self._losses:
            return True
        return median(self._losses) <= self.share * median(self._first_losses)

    def _found(self, record: StepRecord, distance: int) -> Alert:
        message = (
            f"The model was given the same values at each step that was measured since step "
            f"{self._first}.\n"
            "Check that the loop takes a new batch at each step (next(iter(loader)) begins "
            "anew), unless the data are a single batch."
        )
        return self._alert(record.step, None, distance, self.steps, message, "note")


_LOSSES = 10  # by eye


class LearningRateZero(EpisodeRule):
    """A note when training goes on though the learning rate of all parameter groups has run out.

    Usual causes are a schedule that was made for fewer steps, and one made for epochs that is
    advanced at each step. Silent in the first steps of a warm-up and the last ones of a schedule.

    Args:
        fraction: Of the highest learning rate so far; below it nothing more is learned.
        steps: Number of such steps in a row.
    """

    name = "learning_rate_zero"
    # A million such steps do what one did. Usual schedules end at 0.1 to 0.001 of their peak.
    fraction = 1e-6
    steps = 20  # by eye: a schedule that ends at 0 has one or two such steps
    _highest: float = 0.0
    _steps: int = 0
    _since: int = 0

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        rate = max(record.learning_rates, default=math.nan)
        if not math.isfinite(sum(record.learning_rates, rate)):
            return ()  # an optimizer without one, which works it out itself
        self._highest = max(self._highest, rate)
        limit = self.fraction * self._highest
        is_zero = rate <= limit
        self._since = self._since if is_zero and self._steps else record.step
        self._steps = self._steps + 1 if is_zero else 0
        found = self._found(record, rate, limit) if self._steps >= self.steps else None
        return self._episode.update(record.step, found)

    def _found(self, record: StepRecord, rate: float, limit: float) -> Alert:
        message = (
            f"The learning rate is {rate:.3g} since step {self._since}, after up to "
            f"{self._highest:.3g}: steps go on and change nothing.\n"
            "Check how many steps the schedule was made for, and that it is advanced once for "
            "each of them."
        )
        return self._alert(record.step, None, rate, limit, message, "note")

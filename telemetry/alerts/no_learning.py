"""Steps that change nothing: weights do not move, or the learning rate has run out."""

from __future__ import annotations

import math
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import Episode
from telemetry.alerts.history import History
from telemetry.records import StepRecord
from telemetry.rule import Rule


class NoLearning(Rule):
    """Alerts when, from the beginning, no step moves any weight matrix noticeably.

    Small steps are fine if training has converged, if the schedule has ended or not begun, or if
    the gradients have faded. So the gradients must be as large as at first, and the learning rate
    must not be rising.

    Args:
        update_ratio: Largest update ratio over all weight matrices that counts as no movement.
        steps: Number of steps from the beginning.
        losses: Number of losses that are logged before any optimizer of this model has stepped.
    """

    name = "no_learning"
    _first_norms: History
    _norms: History
    _largest_ratio: float = 0.0
    _looks: int = 0
    _steps: int = 0
    _losses: int = 0
    _first_rates: tuple[float, ...] = ()
    _episode: Episode

    def __init__(
        self,
        *,
        # A thousand such steps move a weight by 0.3 % of its size. At 3e-7 mlp_lr_low is missed;
        # tried 3e-5.
        update_ratio: float = 3e-6,
        steps: int = 30,  # by eye; tried 15 and 60, by which the alert comes earlier or later
        losses: int = 100,  # by eye: more micro-batches per step are unusual
    ) -> None:
        self._update_ratio = update_ratio
        self._steps_needed = steps
        self._first_norms = History(5)
        self._norms = History(5)
        self._losses_needed = losses
        self._episode = Episode(1)

    @property
    def wants_full(self) -> bool:
        """Whether the decision is due and too few steps were measured in full."""
        late = self._steps >= self._steps_needed - _LOOKS
        return late and self._looks < _LOOKS and self._largest_ratio <= self._update_ratio

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        """Count losses that no optimizer step follows."""
        if self._steps > 0:
            return
        self._losses += 1
        if self._losses == self._losses_needed:
            seen = f"{self._losses} losses were logged, but no optimizer has stepped this model"
            yield _alert(step, 0.0, self._update_ratio, seen, _OPTIMIZER)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self._steps += 1
        self._norms.add(record.total_grad_norm)
        if len(self._first_norms) < 5:
            self._first_norms.add(record.total_grad_norm)
            self._first_rates = record.learning_rates
        if record.update_ratios:
            self._looks += 1
            self._largest_ratio = max(self._largest_ratio, _largest_ratio(record))
        return self._episode.update(record.step, self._find(record))

    def _find(self, record: StepRecord) -> Alert | None:
        moves = self._largest_ratio > self._update_ratio
        if self._steps < self._steps_needed or self._looks < _LOOKS or moves:
            return None
        first, now = self._first_norms.median, self._norms.median
        faded = not (now >= _FADED * first) or (now == 0 and first != 0)
        rising = any(
            rate > before
            for rate, before in zip(record.learning_rates, self._first_rates, strict=False)
        )
        if faded or rising or record.loss == 0:
            return None
        if now == 0:
            seen, advice = "No parameter gets a gradient", _GRADIENT
        else:
            seen = f"In {self._steps} steps no step moved any weight by more than "
            seen += f"{self._largest_ratio:.1g} of its size"
            advice = _RATE
        return _alert(record.step, self._largest_ratio, self._update_ratio, seen, advice)


_LOOKS = 3  # by eye; tried 1 and 6
_FADED = 0.3  # by eye; tried 0.15 and 0.6


def _largest_ratio(record: StepRecord) -> float:
    matrices = record.layout.matrices
    ratios = [r for n, r in record.update_ratios.items() if n in matrices and math.isfinite(r)]
    return max(ratios, default=0.0)


_OPTIMIZER = (
    "Check that the optimizer was given the parameters of this very model, not of one that was "
    "replaced or copied since, and that step() is called."
)
_GRADIENT = (
    "Check that the loss depends on the parameters of this model: detach(), no_grad(), item(), "
    "another copy of the model."
)
_RATE = (
    "People usually raise the learning rate; check its schedule, and that the optimizer was given "
    "the parameters that should move."
)


def _alert(step: int, value: float, threshold: float, seen: str, advice: str) -> Alert:
    return Alert(
        kind=NoLearning.name,
        severity="warning",
        step=step,
        module_name=None,
        value=value,
        threshold=threshold,
        message=f"{seen}.\n{advice}",
    )


class LearningRateZero(Rule):
    """A note when training goes on though the learning rate of all parameter groups has run out.

    Usual causes are a schedule that was made for fewer steps, and one made for epochs that is
    advanced at each step. Silent in the first steps of a warm-up and the last ones of a schedule.

    Args:
        fraction: Of the highest learning rate so far; below it nothing more is learned.
        steps: Number of such steps in a row.
    """

    name = "learning_rate_zero"
    _highest: float = 0.0
    _steps: int = 0
    _since: int = 0
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

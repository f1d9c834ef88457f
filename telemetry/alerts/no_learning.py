"""Steps that change nothing: weights do not move."""

from __future__ import annotations

import math
from collections.abc import Iterable

from telemetry.alert import Alert
from telemetry.alerts.episode import EpisodeRule
from telemetry.alerts.history import History
from telemetry.records import StepRecord


class NoLearning(EpisodeRule):
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
    # A thousand such steps move a weight by 0.3 % of its size. At 3e-7 mlp_lr_low is missed;
    # tried 3e-5.
    update_ratio = 3e-6
    steps = 30  # by eye; tried 15 and 60, by which the alert comes earlier or later
    losses = 100  # by eye: more micro-batches per step are unusual
    _first_norms: History
    _norms: History
    _largest_ratio: float = 0.0
    _looks: int = 0
    _steps: int = 0
    _losses: int = 0
    _first_rates: tuple[float, ...] = ()

    def _set_up(self) -> None:
        self._first_norms = History(5)
        self._norms = History(5)

    @property
    def wants_full(self) -> bool:
        """Whether the decision is due and too few steps were measured in full."""
        late = self._steps >= self.steps - _LOOKS
        return late and self._looks < _LOOKS and self._largest_ratio <= self.update_ratio

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        """Count losses that no optimizer step follows."""
        if self._steps > 0:
            return
        self._losses += 1
        if self._losses == self.losses:
            seen = f"{self._losses} losses were logged, but no optimizer has stepped this model"
            yield self._alert(step, None, 0.0, self.update_ratio, f"{seen}.\n{_OPTIMIZER}")

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
        moves = self._largest_ratio > self.update_ratio
        if self._steps < self.steps or self._looks < _LOOKS or moves:
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
        ratio = self._largest_ratio
        return self._alert(record.step, None, ratio, self.update_ratio, f"{seen}.\n{advice}")


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

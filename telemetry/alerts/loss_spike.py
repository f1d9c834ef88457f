"""A loss that jumps far above its past."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert, Severity
from telemetry.alerts.course import Rise
from telemetry.alerts.episode import DefaultRule
from telemetry.alerts.history import Past, median
from telemetry.layers.movers import LOOK_BACK, Mover, movers
from telemetry.records import StepRecord
from telemetry.shared.plain_text import called, steps_in_words


class _Loss(NamedTuple):
    step: int
    value: float


class LossSpike(DefaultRule):
    """Alerts when the loss of some steps lies far above all of the hundred before, for a reason.

    How far a loss lies above its past is counted in ranges: highest minus lowest of a hundred
    losses, the latest ten left out. Those that are high themselves do not become part of that
    past. A jump alone is no fault: a harder task, other data or another weight of a term do the
    same, so it gives a note. A warning takes one of three reasons:

    - The learning rate has just jumped to three times all rates that the run has survived, and
      after two losses since then they are ``rate_distance`` ranges above the past, or the last five
      are worse than before (:class:`LossTrend`; a range is wide where the loss was falling fast). A
      warm restart returns to a rate that it has survived.
    - Layers left their own past before the loss did, and three losses in a row are ``distance``
      ranges above. Where the task or the data change, gradients change in the same step as the
      loss, because both are of the same batch; if the weights went wrong, gradients went first.
    - One to five losses are ``batch_distance`` ranges above a hundred losses, and the next one is
      back: the batch. Where tails are so heavy that there is no mean (Pareto, index 1), one loss
      exceeds the highest of ``n`` by ``k`` times with a probability of ``1 / (k n)``: above fewer
      losses it must be more ranges. And if the past has such tails, as many as the square of the
      deviations that its range has (about 5 if it is normal). High losses of single batches count
      as past for good.

    A further jump of the rate makes it worse. It is over when :class:`Rise` is undone; while the
    learning rate is still what made the loss jump, when the loss is what it usually was.

    Args:
        rate_distance, distance: In ranges.
        batch_distance: In ranges of a hundred losses.
    """

    name = "loss_spike"
    # The healthy warm_restarts (realruns) stays 0.5 ranges below its past; learning rates x 40 to
    # x 300 bring 0.3 to 360.
    rate_distance = 0.25
    distance = 2.0  # GANs and PPO stay below 0.3
    # A batch with one example of a rare class, weighted 100 times (rare_class_1to200), is 5 above;
    # targets in a wrong unit (target_spike) are 80,000.
    batch_distance = 100.0
    _norms: NormRing
    _past: Past
    _first: tuple[float, ...] = ()
    _high: deque[_Loss]
    _rates: deque[tuple[float, ...]]
    _survived: tuple[float, ...] = ()
    _highest_batch: float = -math.inf
    _begun: Alert | None = None
    _rise: Rise | None = None
    _calm: int = 0

    def _set_up(self) -> None:
        self._norms = NormRing()
        self._past = Past(_JUST)
        self._high = deque(maxlen=_LASTING + 1)
        self._rates = deque(maxlen=_JUST)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.course.follow(record)
        self._norms.add(record)
        self._follow_rates(record.learning_rates)
        loss = record.loss
        if loss is None or not math.isfinite(loss):
            return
        if len(self._first) < _FEW_BATCHES:
            self._first = (*self._first, loss)
        if self._begun is not None:
            yield from self._until_over(record.step, loss)
        if not self._is_high(loss):
            if self._high and self._rate_jump() < _RATE_JUMP:
                yield from self._back()
                self._high.clear()
            self._past.add(loss)
            return
        self._high.append(_Loss(record.step, loss))
        found = self._find(record)
        if found is not None:
            yield found if self._begun is None else replace(found, stage="worse")
        if found is not None and found.severity != "note":
            if self._begun is None:
                self._begun = found
                self._rise = Rise(
                    first=median(self._first),
                    usual=self._past.median,
                    peak=max(self._high_losses),
                )
            self._calm = 0
            self._past.clear()
            self._high.clear()
        elif found is not None or len(self._high) > _LASTING:
            self._past.clear()
            for known in self._high_losses:
                self._past.adopt(known)  # it is how things are now
            self._high.clear()

    @property
    def _high_losses(self) -> list[float]:
        return [loss.value for loss in self._high]

    def _is_high(self, loss: float) -> bool:
        ranges = self._past.ranges_above(loss)
        if ranges >= self.rate_distance or not self.course.loss.is_worse or ranges == -math.inf:
            return ranges >= self.rate_distance
        return self._rate_jump() >= _RATE_JUMP

    # --- reasons ---------------------------------------------------------------------------------

    def _find(self, record: StepRecord) -> Alert | None:
        losses = self._high_losses
        least = min(map(self._past.ranges_above, losses[-3:]))
        jump = self._rate_jump()
        if len(losses) >= 2 and jump >= _RATE_JUMP:
            highest = max(max(rates, default=0.0) for rates in self._rates)
            return self._found(
                f"after the learning rate had jumped {jump:.3g}-fold to {highest:.3g}",
                "People usually limit what a schedule can return, lower the learning rate or warm "
                "it up, and go on from a checkpoint before the spike.",
            )
        since = self._high[0].step
        if self._begun is not None or len(losses) != 3 or least < self.distance:
            return None
        early = [mover for mover in self._norms.movers(since) if mover.step < since]
        if len(early) >= FEW * self._norms.count():
            return self._found(
                f"and gradients had left their past {steps_in_words(since - early[0].step)} before",
                "People usually clip gradients, lower the learning rate or Adam's beta2, and go on "
                "from a checkpoint before the spike without the batches around it.",
            )
        if self._might_jump(self._rates[-1]):
            return None
        return self._found(
            "at once, though neither the learning rate nor the weights had changed: the batches, "
            "their targets or the loss are others than before",
            "A new task, harder data or another weight of a term do that. If that is not meant, "
            "look at inputs and labels from this step on, their order and their unit.",
            severity="note",
        )

    def _back(self) -> Iterable[Alert]:
        """The loss is usual again: high ones before it were those of single batches."""
        if self._begun is not None or not 0 < len(self._high) <= _FEW_BATCHES:
            return
        past, highest = self._past, max(self._high_losses)
        deviations = (past.highest - past.lowest) / past.deviation if past.deviation else 0.0
        least = max(self.batch_distance * _MANY / len(past), deviations**2)
        known = max(past.highest, self._highest_batch)
        self._highest_batch = max(self._highest_batch, highest)
        if past.ranges_above(highest) < least or highest - known < least * (known - past.lowest):
            return
        found = self._found(
            f"and was back {steps_in_words(len(self._high))} later: it was the batch",
            "Look at that batch: inputs and targets in another unit, a wrong label or mask. People "
            "usually clip gradients so that one batch cannot do harm.",
        )
        yield found
        yield _over(found, self._high[-1].step + 1)

    def _follow_rates(self, rates: tuple[float, ...]) -> None:
        """A rate has been survived when ten steps later the loss is not high."""
        if len(self._rates) == _JUST and self._begun is None and not self._high:
            before = self._rates[0]
            known = self._survived if len(self._survived) == len(before) else before
            self._survived = tuple(map(max, before, known))
        self._rates.append(rates)

    def _rate_jump(self) -> float:
        """How far the rate of a group has risen in these steps, above all that was survived."""
        oldest, count = self._rates[0], len(self._survived)
        if len(oldest) != count:
            return 0.0
        before = tuple(map(max, oldest, self._survived))
        rises = [
            rate / known
            for rates in self._rates
            for rate, known in zip(rates, before, strict=False)
            if known > 0 and len(rates) == count
        ]
        return max(rises, default=0.0)

    def _might_jump(self, highest: Iterable[float]) -> bool:
        """Whether rates have jumped, or do so where each is this at most."""
        lowest = map(min, zip(*self._rates, strict=False)) if self._rates else ()
        return any(h >= _RATE_JUMP * low for h, low in zip(highest, lowest, strict=False))

    def _rate_is_high(self) -> bool:
        """Whether the rate of a group still is what no loss has survived."""
        return any(
            rate >= _RATE_JUMP * known > 0
            for rate, known in zip(self._rates[-1], self._survived, strict=False)
        )

    # --- what is said ----------------------------------------------------------------------------

    def _found(self, reason: str, advice: str, severity: Severity = "warning") -> Alert:
        step, loss = self._high[0]
        peak = max(self._high, key=lambda high: high.value)
        rise = f", and to {peak.value:.4g} at step {peak.step}" if peak.value > loss else ""
        message = (
            f"The loss, usually {self._past.median:.4g}, jumped to {loss:.4g} at step {step}"
            f"{rise}, {reason}."
            f"{self._norms.in_words(step)}\n{advice}"
        )
        return self._alert(step, None, loss, self._past.highest, message, severity)

    def _until_over(self, step: int, loss: float) -> Iterable[Alert]:
        begun, rise = self._begun, self._rise
        assert begun is not None
        assert rise is not None
        self._rise = rise.followed_by(loss)
        is_low = loss <= rise.usual if self._rate_is_high() else self._rise.is_undone(loss)
        self._calm = self._calm + 1 if is_low else 0
        if self._calm >= _CALM:
            self._begun = self._rise = None
            self._past.clear()
            yield _over(begun, step)


def _over(begun: Alert, step: int) -> Alert:
    message = f"The loss spike of step {begun.step} is over."
    return replace(begun, step=step, stage="end", message=message)


_MANY = 100  # as many as a past has
_JUST = 10  # steps; as in course
_RATE_JUMP = 3.0  # as in course: neither warm restarts nor warm-up triple the highest rate
_LASTING = 20  # losses after which a new level is how things are; as in course
_FEW_BATCHES = 5  # of which LossTrend takes the median: more in a row are the run's
_CALM = 5  # losses, likewise


# Steps after which it may still be asked about one.
LATER = 20

# Of all layers; by eye, so that one noisy layer is no reason.
FEW = 0.1


class _Row(NamedTuple):
    step: int
    norms: NDArray[np.float64]


class NormRing:
    """The gradient norms of all modules at the last steps."""

    _names: tuple[str, ...] = ()
    _rows: deque[_Row]

    def __init__(self) -> None:
        self._rows = deque(maxlen=LOOK_BACK + LATER)

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        names = record.layout.owner_names
        if names is not self._names:
            if names != self._names:
                self._rows.clear()
            self._names = names
        self._rows.append(_Row(record.step, record.owner_grad_norms))

    def movers(self, since: int) -> Sequence[Mover]:
        """The layers whose norm had left its past by step ``since``, earliest first.

        As the page finds them: of what came later it says nothing.
        """
        rows = [row for row in self._rows if since - LOOK_BACK < row.step <= since]
        steps, norms = [row.step for row in rows], [row.norms for row in rows]
        return movers(self._names, steps, norms, since) or ()

    def count(self) -> int:
        """Number of layers."""
        return len(self._names)

    def in_words(self, since: int) -> str:
        """For a message: at most five layers; nothing if there are none."""
        movers, count = self.movers(since), self.count()
        if not movers:
            return ""
        first = [mover for mover in movers if mover.step == movers[0].step]
        if len(first) > FEW * count and len(first) > _NAMED:
            return f" {len(first)} of {count} layers moved first, together at step {first[0].step}."
        named = ", ".join(
            f"{called(mover.name)} ({mover.factor:.3g} times at step {mover.step})"
            for mover in movers[:_NAMED]
        )
        return f" First to move: {named}."


_NAMED = 5

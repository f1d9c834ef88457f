"""Figures that change by a constant factor per step, and losses that fall without bound."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np

from telemetry.alerts.baseline import LARGE_STEP, NEVER, Baseline, Figures, matrix_sizes
from telemetry.alerts.detector import EXPLOSIONS, RISEN_LOSSES, Detector, Finding
from telemetry.alerts.window import FEWEST, LENGTH
from telemetry.plain_text import called, figure, steps_in_words
from telemetry.records import StepRecord
from telemetry.records.moments import rms_of


class ExponentialTrend(Detector):
    """Figures change by the same factor at each step: weights, loss, or learning rate.

    Evidence: the factor per step, and how far it went.
    Causes: weight decay too strong or of wrong sign, a multiplying schedule, a discount above 1.
    Remedies: check weight decay (times the rate, 1e-6 to 1e-3 is usual), penalties, the schedule.
    Silent: strong weight decay where the loss falls, warm-ups by a factor.
    Example: scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1.1)
    Args:
        shrinkage: Shrinkage of the median weight matrix while the loss stays.
        weight_growth: Growth of the median weight matrix while the loss stays.
        loss_growth: Growth of the loss, in medians of ten.
        rate_growth: Growth of the learning rate, by one number four times in a row.

    A trend is steady if each quarter has 0.6 to 3 times the rate of the quarter before, and its
    increments grow: Adam moves weights by the same amount, not factor. The loss must reach 3 % of
    the first, and the gradient norm a third of its growth. At the grown rate a step moves the
    median matrix by 2 % of its norm; a warm-up ends below that. Each is reported once.
    """

    kind = "exponential_trend"
    explained_by = EXPLOSIONS | RISEN_LOSSES | {"nonfinite", "dead_units", "saturated_units"}
    shrinkage = 2.0  # healthy matrices keep at least 0.7 of their size
    weight_growth = 10.0  # warm_restarts has 4.8 in a hundred steps
    loss_growth = 30.0  # dqn_cartpole, whose values grow, has 10
    rate_growth = 3.0  # as JUMP
    _reported: tuple[str, ...] = ()
    _names: tuple[str, ...] = ()
    _first_weights: tuple[float, ...] = ()
    _weights: deque[tuple[int, float]]
    _block: list[tuple[float, float]]
    _levels: deque[tuple[float, float]]
    _rates: deque[float]

    def set_up(self) -> None:
        self._weights, self._levels = deque(maxlen=LENGTH), deque(maxlen=LENGTH)
        self._rates, self._block = deque(maxlen=LENGTH), []

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        found = self._of_rate(baseline) or self._of_loss(record, baseline)
        if record.weights:
            found = self._of_weights(record, baseline) or found
        return found

    def _of_weights(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        sizes = matrix_sizes(record)
        names = tuple(sizes)
        if names != self._names:
            self._names, self._first_weights = names, tuple(sizes.values())
            self._weights.clear()
        pairs = zip(sizes.values(), self._first_weights, strict=True)
        changes = [now / first for now, first in pairs if first > 0 and 0 < now < math.inf]
        if not changes:
            return None
        self._weights.append((record.step, math.log10(median(changes))))
        steps, levels = np.array(self._weights).T
        loss = baseline.loss
        learns = not loss.recent > (1 - _LEARNED) * abs(loss.first)
        shrunk = -levels[-1] > math.log10(self.shrinkage) / 2
        self.needs_full_step = bool(shrunk and not learns and len(steps) < 2 * _FEWEST_POINTS)
        now, least = 10 ** levels[-1], math.log10(self.weight_growth)
        if not learns and (rate := _steady(steps, -levels, math.log10(self.shrinkage))):
            return self._found(
                "weights",
                f"The weights shrink by {figure(1 - 10**-rate, 2)} of their size at each step, "
                f"to {figure(now, 2)} of their first size, and the loss does not fall",
                ("Lower the weight decay; usual are 1e-6 to 1e-3, times the learning rate",),
                now,
                1 / self.shrinkage,
            )
        if not loss.is_better and (rate := _steady(steps, levels, least, compound=_COMPOUND)):
            return self._found(
                "weights",
                f"The weights grow by {figure(10**rate - 1, 2)} of their size at each step, "
                f"to {figure(now)}x their first size",
                ("Check the signs of weight decay, penalties and loss", "Check the learning rate"),
                now,
                self.weight_growth,
            )
        return None

    def _of_loss(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if record.loss is not None:
            self._block.append((record.loss, record.total_grad_norm))
        if len(self._block) < FEWEST:
            return None
        loss, norm = np.median(self._block, axis=0)
        self._block.clear()
        if not (0 < loss < math.inf and 0 < norm < math.inf):
            self._levels.clear()
            return None
        self._levels.append((math.log10(loss), math.log10(norm)))
        losses, norms = np.array(self._levels).T
        steps = FEWEST * np.arange(len(losses), dtype=float)
        least = math.log10(self.loss_growth)
        rate = _steady(steps, losses, least)
        if not rate or not _steady(steps, norms, least / 3) or baseline.loss.is_floor(loss):
            return None
        return self._found(
            "loss",
            f"The loss grows by {figure(10**rate - 1, 2)} of its size at each step, from "
            f"{figure(10 ** losses.min())} to {figure(loss)}, and the gradients with it",
            (
                "Check targets that the model makes: the discount, the target network",
                "Check the signs of penalties and decay",
            ),
            loss,
            self.loss_growth * 10 ** losses.min(),
        )

    def _of_rate(self, baseline: Baseline) -> Finding | None:
        if not self._rates or baseline.rate != self._rates[-1]:
            self._rates.append(baseline.rate)
        moves = max(baseline.step_ratio, baseline.ratio_now)
        if baseline.age % FEWEST or moves < LARGE_STEP / 10 or len(self._rates) <= _CHANGES:
            return None
        with np.errstate(all="ignore"):
            changes = np.diff(np.log(self._rates))
            others = np.flatnonzero(~np.isclose(changes, changes[-1], rtol=1e-3, atol=0))
        count = len(changes) - (others[-1] + 1 if len(others) else 0)
        began = self._rates[-1 - count]
        if count < _CHANGES or not baseline.rate >= self.rate_growth * began > 0:
            return None
        return self._found(
            "rate",
            f"The learning rate is multiplied by {figure(math.exp(changes[-1]), 4)} again and "
            f"again, from {figure(began)} to {figure(baseline.rate)}, and steps move the weights "
            f"by {figure(moves, 2)} of their norm",
            ("Check the factor of the schedule: it has to be below 1 to decay",),
            baseline.rate,
            self.rate_growth * began,
        )

    def _found(
        self, what: str, seen: str, advice: tuple[str, ...], value: float, limit: float
    ) -> Finding | None:
        if what in self._reported:
            return None
        self._reported = (*self._reported, what)
        return Finding(summary=seen, advice=advice, value=value, threshold=limit, momentary=True)


def _steady(steps: Figures, levels: Figures, least: float, *, compound: float = -math.inf) -> float:
    """Return how fast levels (log10) rise per step: steadily up to the last, by ``least``; else 0.

    The last quarter has to rise faster than the one before, by the figure to the power of
    ``compound``: 1 if each step adds a share of it, 0 if each adds the same amount.
    """
    for first in range(len(levels) - _FEWEST_POINTS, -1, -1):
        if levels[-1] - levels[first] < least:
            continue
        at = np.linspace(steps[first], steps[-1], _PARTS + 1)
        levels_at = np.interp(at, steps[first:], levels[first:])
        parts, (*_, before, last) = np.diff(levels_at), np.diff(10 ** (levels_at - levels_at[-1]))
        with np.errstate(all="ignore"):
            faster = parts[1:] / parts[:-1]
            power = np.log10(last / before) / parts[-2:].mean()
        is_steady = parts.min() > 0 and faster.min() >= _SLOWER and faster.max() <= _FASTER
        if is_steady and power >= compound:
            return float((levels[-1] - levels[first]) / (steps[-1] - steps[first]))
    return 0.0


_FEWEST_POINTS = 5  # of a rate
_PARTS = 4
_SLOWER, _FASTER = 0.6, 3.0  # learning slows down, and jumps are sudden
_COMPOUND = 0.5  # Adam adds nearly the same amount at each step; chosen manually
_CHANGES = 4  # of the learning rate: two warm restarts or drops are fewer
_LEARNED = 0.1  # of the first loss: text_decay_x1000 comes down by 6 % before its weights vanish


class UnboundedLoss(Detector):
    """Loss below zero falls because the outputs become larger. It begins at -ln C for C classes, or
    keeps falling while the last layer's output becomes 20 times as large.

    Evidence: the loss, and the growth of the output.
    Causes: a wrong sign, ``nll_loss`` without ``log_softmax``.
    Remedies: check the sign of each term.
    Silent: densities, rewards and critics, which settle.
    Example: loss = nn.functional.nll_loss(logits, targets)
    Args:
        growth: Growth of the last layer's output.

    A loss of -ln C, a guess with the wrong sign, must have fallen by a tenth. Or the second half of
    the run falls no slower than the first, while the output is above 10 and grows.
    """

    kind = "unbounded_loss"
    on = "loss"
    clear_after = NEVER
    explained_by = EXPLOSIONS | RISEN_LOSSES | {"nonfinite"}
    growth = 20.0  # wgan_gradient_penalty, whose outputs settle, has 8
    _points: deque[tuple[int, float, float]]  # step, size of the outputs, loss
    _classes: int = 0

    def set_up(self) -> None:
        self._points = deque(maxlen=LENGTH)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        first, recent = baseline.loss.first, baseline.loss.recent
        measured = record.full and len(record.activations) > 0
        if measured:
            self._add(record, recent)
        is_low = not measured and recent < 0 and recent < first
        self.needs_full_step = is_low and self._needs_points(baseline.age)
        guess = -math.log(self._classes) if self._classes > 2 else math.nan
        if abs(first - guess) < _NEAR * -guess and recent < (1 + _FALLEN) * min(first, guess):
            return self._found(
                recent, guess, f"started near -ln {self._classes} = {figure(guess, 4)} and falls"
            )
        if not recent < 0 or not measured or len(self._points) < _FEWEST_POINTS:
            return None
        steps, sizes, losses = np.array(self._points).T
        middle = (steps[0] + steps[-1]) / 2
        size, loss = np.interp(middle, steps, sizes), np.interp(middle, steps, losses)
        grows = sizes[-1] > max(self.growth * sizes[0], _HALF * size, _LARGE)
        falls = losses[0] > loss and loss - losses[-1] >= _UNDIMINISHED * (losses[0] - loss)
        if not grows or not falls or steps[-1] - steps[0] < _STEPS:
            return None
        times, last = sizes[-1] / sizes[0], next(reversed(record.activations))
        return self._found(
            recent,
            losses[0],
            f"falls ever faster below zero, while the output of {called(last)} grows "
            f"{figure(times)}-fold in {steps_in_words(int(steps[-1] - steps[0]))}",
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return baseline.loss.recent < 0

    def _needs_points(self, age: int) -> bool:
        """Whether full steps might show that the outputs grow: in the middle of the steps first."""
        if len(self._points) > _FEWEST_POINTS or age < _STEPS // 2 - _SOON:
            return False
        sizes = [size for _, size, _ in self._points]
        return len(sizes) < 2 or sizes[-1] > _GROWS * sizes[0]

    def _add(self, record: StepRecord, loss: float) -> None:
        rows, layout = record.activations.rows, record.layout
        widths = [layout.parameters[index].shape[0] for index in layout.matrices.values()]
        self._classes = int(rows.unit_count[-1]) or max(widths, default=0)
        size = float(rms_of(rows)[-1])
        if math.isfinite(size + loss) and size > 0:
            self._points.append((record.step, size, loss))

    def _found(self, loss: float, limit: float, what: str) -> Finding:
        return Finding(
            summary=f"The loss is {figure(loss, 4)}: it {what}",
            cause="Nothing limits the loss from below",
            advice=(
                "Check the sign of the loss and of each of its terms",
                "Give nll_loss log-probabilities (log_softmax)",
                "Limit each term that is maximized",
            ),
            value=loss,
            threshold=limit,
        )


_NEAR = 0.15  # of ln C: large first weights guess worse than all alike
_FALLEN = 0.1
_LARGE = 10.0  # log-probabilities and log-scales stay below; exp of it is 22,000
_HALF = 1.5  # linear growth doubles in the second half; that of wgan_gradient_penalty is 1.3
_UNDIMINISHED = 0.8  # text_loss_negated has 1.5
_GROWS = 1.5  # of a twentieth of ``growth`` in the first steps
_SOON = 2  # steps until a requested full step
_STEPS = 40  # by then a loss that settles has slowed down

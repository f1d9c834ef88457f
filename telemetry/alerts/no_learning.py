"""A run that learns nothing: weights do not move, or they do and the loss does not come down."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from telemetry.alert import Alert
from telemetry.alerts.episode import EpisodeRule
from telemetry.alerts.history import History, middle
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


class LossStuck(EpisodeRule):
    """A note when the loss is after hundreds of steps still that of a model that knows nothing.

    That is its first value, or ln C, the cross entropy of guessing among the C outputs of the last
    layer. Usual causes: targets that do not belong to the inputs, a weight decay that undoes every
    step, a learning rate far too low or high, an output that does not depend on the input.

    The losses of the last ``steps`` steps must be noise: their halves have the same mean, and each
    is independent of the one before. The losses of GANs and of reinforcement learning wander.

    A loss that is far from 0 and the same at every step, though the batches differ, depends on
    neither inputs nor targets, whatever its value: the network's output has become a constant, at
    the flat end of a sigmoid for example.

    Args:
        reduction: By what part of itself the loss must have come down to be on its way.
        steps: Number of losses that are looked at; as many must have come before.
    """

    name = "loss_stuck"
    reduction = 0.03
    steps = 100
    _calm = 2
    _first: tuple[float, ...] = ()
    _losses: deque[float]
    _moves: float = 0.0
    _classes: int = 0
    _given: tuple[float, ...] = ()
    _varies: bool = False

    def _set_up(self) -> None:
        self._losses = deque(maxlen=2 * self.steps)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if record.update_ratios:
            self._moves = _median(list(record.update_ratios.values()))
            self._classes = _outputs_of_last_layer(record)
        if record.fingerprints:
            self._varies = self._given != () and record.fingerprints != self._given
            self._given = record.fingerprints
        loss = record.loss
        if loss is None or not math.isfinite(loss):
            return ()
        if len(self._first) < _FIRST:
            self._first = (*self._first, loss)
        self._losses.append(loss)
        if len(self._losses) < 2 * self.steps or record.step % _LOOK:
            return ()
        return self._episode.update(record.step, self._find(record))

    def _find(self, record: StepRecord) -> Alert | None:
        first, losses = _median(self._first), np.array(self._losses)
        now = float(np.mean(losses[-self.steps :]))
        if self._varies and _is_constant(losses[-self.steps :]) and now > _NOTHING * abs(first):
            return self._found(record, now, now, "the same at each, though the batches differ")
        if not _is_noise(losses[-self.steps :]) or not self._moves > _MOVES:
            return None
        if not first > 0 or float(losses.std()) > _NOISE * now:
            return None
        blocks = losses[: len(losses) // _FIRST * _FIRST].reshape(-1, _FIRST)
        least = float(np.median(blocks, axis=1).min())
        guess = math.log(self._classes) if self._classes > 2 else math.nan
        moves = f"though the weights move by {self._moves:.1g} of their norm at each step"
        if abs(now - guess) < self.reduction * guess:
            what = f"which is ln {self._classes}: a guess among {self._classes} classes"
            return self._found(record, now, guess, f"{what}, {moves}")
        if least > (1 - self.reduction) * first and now < (1 + self.reduction) * first:
            return self._found(record, now, first, f"as in the first steps, {moves}")
        return None

    def _found(self, record: StepRecord, now: float, reference: float, what: str) -> Alert:
        message = (
            f"The loss of the last {self.steps} steps is {now:.4g}, {what}.\n"
            "Check that each target belongs to its input, that the output depends on the input, "
            "weight decay and learning rate; a small part of the data should be learned by heart "
            "within some hundred steps."
        )
        limit = (1 - self.reduction) * reference
        return self._alert(record.step, None, now, limit, message, "note")


def _is_noise(losses: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bool:
    """Whether the losses have no trend and are independent of each other."""
    off = losses - losses.mean()
    variance = float(off @ off)
    if _is_constant(losses):
        return True
    first, second = np.split(off, 2)
    # Four standard errors of the difference of two means.
    trend = abs(first.mean() - second.mean()) > 4 * 2 * losses.std() / len(losses) ** 0.5
    return not trend and float(off[1:] @ off[:-1]) < _CORRELATED * variance


def _is_constant(losses: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bool:
    """Whether the losses are equal but for rounding."""
    return bool(losses.std() <= _ROUNDING * abs(losses.mean()))


def _outputs_of_last_layer(record: StepRecord) -> int:
    """Number of units of the last module's output; 0 if that is not known."""
    counts = record.activations.rows.unit_count
    return int(counts[-1]) if len(counts) else 0


def _median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return middle(finite) if finite else math.nan


_FIRST = 10  # losses that say where the run began; by eye
_LOOK = 100  # every so many steps, because a look takes time
_MOVES = 1e-5  # ten thousand such steps move a weight by a tenth; below it no_learning looks
_NOISE = 0.25  # of the loss: policy losses are noise around 0; by eye
_ROUNDING = 1e-5
_NOTHING = 0.05  # of the first loss: what is left where all examples are known; by eye
_CORRELATED = 0.3  # three standard errors of the correlation of 100 independent losses

"""NaN or infinity that training cannot recover from, and where it came from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from telemetry.alert import Alert
from telemetry.alerts.episode import CALM_STEPS, EpisodeRule
from telemetry.alerts.origins import Origin, is_bad, origins
from telemetry.records import StepRecord


class Nonfinite(EpisodeRule):
    """Alerts when the loss, a parameter, its gradient or a buffer is NaN or infinite.

    Such values inside of the network show where the fault began, but are not one by themselves:
    masks hold ``-inf``, missing values are NaN until the model fills them in. They count when they
    reach the output of the last module. Steps that a gradient scaler skips are no fault, but after
    ten losses in a row that are not finite, and no other step, the rule reports that.

    Where it began is the first of these that holds:

    - the optimizer: it made a parameter so though gradients were finite, at this step or before it;
    - the inputs: the batch is bad, or what the first watched module is given, unless a good step
      had such values before;
    - the forward pass: the output of a module is bad;
    - the targets or the loss: the loss is bad, and no output is;
    - the backward pass: the loss is finite and gradients are not. A module began it if gradients
      come in finite and go out bad.

    At a step that was not measured in full, inputs and outputs are unknown. What is known are the
    loss, which gradients are bad, and, where gradients are on the CPU, the running statistics of
    batch norms, which have been given what is NaN in the forward pass.

    - It was the backward pass if the loss is finite, or not logged and the gradients of the last
      layers are; the culprit lies behind the last layer whose gradient is bad.
    - If the loss is bad and the gradients of some layers behind others are not, it is what follows
      the last bad one: another term of the loss has finite gradients.
    - If statistics are NaN, it was the forward pass, before the first batch norm that has them.
    - Otherwise it may have been the inputs (unless the loss is infinite and not NaN), the forward
      pass, the targets or the loss.

    Then a module is suspect if it is not one of PyTorch's, because those do not turn usual numbers
    into NaN. If several are, they are said to be, and none is named as the culprit.

    Where loss or gradients had grown a millionfold, the numbers overflowed, wherever that shows.

    Args:
        losses: Number of losses in a row that are not finite, after which no further optimizer step
            is expected.
    """

    name = "nonfinite"
    losses = 10  # a scaler halves its factor at each skipped step, and first needs several
    _bad_losses: int = 0
    _loss_step: int = -1
    _seen: int = -1
    _has_stepped: bool = False
    _skipped: bool = False
    _has_scaler: bool = False
    _was_good: bool = False
    _usual: set[str]
    _calm_steps: int = 0
    _loss: _Ends
    _norm: _Ends

    def _set_up(self) -> None:
        self._usual = set()
        self._loss, self._norm = _Ends(), _Ends()

    @property
    def wants_full(self) -> bool:
        """Whether it seems to be over, and what shows only in full could remain."""
        return self._episode.is_on and self._calm_steps >= CALM_STEPS

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        """Count losses that are not finite; perhaps no step follows them."""
        # A step may come without a record: not of each are the norms taken.
        has_stepped = step != self._loss_step and not self._skipped
        self._bad_losses = 0 if has_stepped else self._bad_losses
        self._bad_losses = 0 if math.isfinite(loss) else self._bad_losses + 1
        self._loss_step = step
        if self._bad_losses != self.losses or not self._has_stepped or self._episode.is_on:
            return ()
        self._calm_steps = 0
        return self._episode.update(step, self._no_step(step))

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self._has_stepped = True
        self._skipped = record.skipped
        self._has_scaler |= record.loss_scale is not None
        if record.skipped:
            return ()
        # What the steps did in between of which there is no record is not known.
        after_good = self._was_good and self._seen in (-1, record.step - 1)
        found = next(origins(record, self._usual, after_good=after_good), None)
        self._seen = record.step
        self._was_good = record.all_grads_finite
        if found is not None:
            self._calm_steps = 0
            return self._episode.update(record.step, self._found(record, found))
        if record.loss is not None:
            self._loss.add(record.loss)
        self._norm.add(record.total_grad_norm)
        if record.inputs:
            self._usual.update(name for name, given in record.inputs.items() if is_bad(given))
        self._calm_steps += 1
        # A parameter or buffer that is not used for some steps shows only in full.
        is_over = self._calm_steps >= CALM_STEPS and record.full
        return self._episode.update(record.step, None) if is_over else ()

    def _no_step(self, step: int) -> Alert:
        why = ": the gradient scaler skips every step" if self._has_scaler else " after them"
        message = (
            f"{self.losses} losses in a row are NaN or infinite and the optimizer does not step"
            f"{why}, waiting will not help.\n"
            "People usually look for a NaN in the weights, go back to a checkpoint, and use "
            "bfloat16 or a lower learning rate."
        )
        return self._alert(step, None, self.losses, self.losses, message, "error")

    def _found(self, record: StepRecord, origin: Origin) -> Alert:
        where, advice = origin.where, origin.advice
        known = (("the loss", self._loss), ("the gradient norm", self._norm))
        what, growth = max(known, key=lambda pair: pair[1].times)
        if growth.times >= _OVERFLOWS:
            where += f", after {what} had grown {growth.times:.1g}-fold: the numbers overflowed"
            advice = _TOO_LARGE
        message, count = (
            f"NaN or infinity, first seen in {where}.\n{advice}",
            (~record.grad_finite).sum(),
        )
        return self._alert(record.step, origin.module_name, count, 0.0, message, "error")


@dataclass
class _Ends:
    """The first and the last of some magnitudes; those that are not finite are left out."""

    first: float = 0.0
    last: float = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self.last = abs(value)
            self.first = self.first or self.last

    @property
    def times(self) -> float:
        """How many times as large the last is as the first; 0 if that is not known."""
        return self.last / self.first if self.first else 0.0


_OVERFLOWS = 1e6  # by eye
_TOO_LARGE = (
    "People usually lower the learning rate or warm it up, clip gradients (clip_grad_norm_), and "
    "check the initial weights and custom backward functions; float16 ends at 65504."
)

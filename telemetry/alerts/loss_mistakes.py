"""Losses that are given something else than they expect; the gradients of the outputs tell."""

from __future__ import annotations

from math import e, log
from typing import NamedTuple

from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding
from telemetry.records import StepRecord
from telemetry.records.buckets import limits
from telemetry.records.sketch import Sketch
from telemetry.shared.plain_text import called


class LossGivenProbabilities(Detector):
    """Alerts when a loss that expects logits, or logarithms, is given probabilities.

    - ``CrossEntropyLoss`` and ``BCEWithLogitsLoss`` expect logits. Their derivative with respect to
      each is ``s - y``: its probability, and 0 or 1 for the target. The softmax of C numbers
      between 0 and 1 that add up to 1 lies between ``1 / (e + C - 1)`` and ``e`` times that, the
      sigmoid of a number between 0 and 1 between ``1 / 2`` and ``e / (e + 1)``. So all derivatives
      lie in two narrow ranges, one on either side of zero; those of other losses leave them soon.
    - ``NLLLoss`` and ``KLDivLoss`` expect logarithms. Their derivatives are ``-y``, and add up to
      -1 in each row. Those of the logarithm of a probability, ``-y / p``, add up to less, until all
      is learned.

    Args:
        steps: Number of steps from the beginning.
    """

    kind = "loss_given_probabilities"
    on = "full"
    confirm = 3
    steps = 20  # by eye; until then, a squared error of even probabilities may look alike

    def find(self, record: StepRecord, base: Baseline) -> Finding | None:
        last = _last(record)
        if last is None or base.age < self.steps:
            return None
        name, type_name, p, g, calls = last
        if type_name == "Softmax" and p.sum > 0:
            classes = p.finite_count / p.sum  # of each row, the sum is 1
            least, most = 1 / (e + classes - 1), e / (e + classes - 1)
        elif type_name == "Sigmoid":
            classes, least, most = 1, 1 / 2, e / (e + 1)
        else:
            return None
        # A loss is a sum or a mean over the rows, or over those of one of several micro-batches.
        rows = max(1, g.finite_count - g.zero_count) / classes
        if any(_are_errors(g, least, most, of) for of in (1, 1 / rows, calls / rows)):
            function, lowest = type_name.lower(), -log(most)
            return Finding(
                seen=f"The loss takes the {function} of what {called(name)} returns, which is one "
                f"already: it cannot fall below {lowest:.3g}",
                advice=f"Give the loss the logits, without the {type_name}: CrossEntropyLoss and "
                "BCEWithLogitsLoss have their own.",
                value=lowest,
                limit=0.0,
                module_name=name,
            )
        totals = (1, calls, p.sum, 1 / classes)  # the last one is KLDivLoss's own mean
        is_exact = any(abs(g.sum + total) < _EXACT * total for total in totals)
        if type_name != "Softmax" or g.max > 0 or not is_exact:
            return None
        if p.sum_squares > _LEARNED * p.sum:
            return None
        return Finding(
            seen=f"The loss takes the probabilities that {called(name)} returns for logarithms",
            advice="Return logarithms, by LogSoftmax, for NLLLoss and KLDivLoss.",
            value=g.sum,
            limit=0.0,
            module_name=name,
        )

    def lasts(self, record: StepRecord, base: Baseline) -> bool:
        return True  # as long as model and loss are what they are


class TargetsBroadcast(Detector):
    """A note when targets ``[N]`` meet outputs ``[N, 1]``: each meets the targets of all others.

    The squared error is then the mean over ``[N, N]``, and its derivative ``2 / N`` times an output
    less the mean of all targets. So over the batch, derivatives vary by exactly ``2 / N`` times
    what the outputs do. If all targets of a batch are the same they do, too; but then the loss is
    no more than follows from the outputs and their derivatives, if it is nothing else.

    Args:
        steps: For so many steps they do, before it is said.
    """

    kind = "targets_broadcast"
    severity = "note"
    on = "full"
    confirm = 3
    steps = 50  # by eye: returns may all be the same for some steps
    _since: int = -1

    def find(self, record: StepRecord, base: Baseline) -> Finding | None:
        found = self._compare(record)
        if found is None:
            self._since = -1
        elif self._since < 0:
            self._since = record.step
        return found if record.step - self._since >= self.steps else None

    def _compare(self, record: StepRecord) -> Finding | None:
        last = _last(record)
        if last is None or not record.loss:
            return None
        name, _, p, g, calls = last
        units, rows = record.activations[name].unit_max, p.count
        if units is None or len(units) > 1 or calls > 1 or rows < _FEWEST or not p.std:
            return None
        scale = g.std / p.std
        # Of a mean or a sum of squares, or half of it.
        if not any(abs(scale - of) < _EXACT * of for of in (2 / rows, 1 / rows, 2 * rows, rows)):
            return None
        error = 2 * record.loss / (rows * scale)
        of_targets = error - p.std**2 - (g.mean / scale) ** 2
        if of_targets < 0.01 * error:
            return None
        return Finding(
            seen=f"The loss compares each output of {called(name)} with the targets of the whole "
            f"batch: their gradients are {scale:.3g} times the outputs less one number",
            advice="Give the loss outputs and targets of one shape, by outputs.squeeze(1) for "
            f"example: [{rows}, 1] and [{rows}] broadcast to [{rows}, {rows}].",
            value=scale,
            limit=scale,
            module_name=name,
        )

    def lasts(self, record: StepRecord, base: Baseline) -> bool:
        return True  # as long as model and loss are what they are


class _Last(NamedTuple):
    """The last module that ran, what it returned and the gradients with respect to that."""

    name: str
    type_name: str
    outputs: Sketch
    grads: Sketch
    calls: int


def _last(record: StepRecord) -> _Last | None:
    name = next(reversed(record.activations), "")
    if name not in record.activation_grads:
        return None
    outputs, grads = record.activations[name], record.activation_grads[name]
    type_name = record.layout.modules[record.layout.position[name]].type_name
    if outputs.sketch.nonfinite_count or grads.sketch.nonfinite_count:
        return None
    return _Last(name, type_name, outputs.sketch, grads.sketch, grads.calls)


def _are_errors(grads: Sketch, least: float, most: float, scale: float) -> bool:
    """Whether some are within ``scale`` times these, some within these less 1, and no others."""
    left, right = limits(grads.buckets)
    negative, positive = left[grads.buckets < 0], right[grads.buckets > 0]
    if not negative.size or not positive.size:
        return False
    above = positive[0] > scale * least and grads.max < _ROUNDED * scale * most
    below = negative[-1] < scale * (most - 1) and grads.min > _ROUNDED * scale * (least - 1)
    return bool(above and below)


_ROUNDED = 1.01  # numbers in bfloat16 are off by 0.4 %
_EXACT = 1e-3  # of sums over a batch
_LEARNED = 0.9  # of the probabilities, the mean weighted by themselves: 1 if one of each row is
_FEWEST = 8  # rows; of fewer, the variance of a batch may happen to fit

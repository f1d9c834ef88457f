"""Losses with wrong inputs, recognized by the gradients of the outputs."""

from __future__ import annotations

from math import e, log
from typing import NamedTuple

from telemetry.alert import Severity
from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding
from telemetry.plain_text import called, figure
from telemetry.records import StepRecord, TensorRecord, once
from telemetry.records.buckets import limits
from telemetry.records.sketch import Sketch


class WrongLossInput(Detector):
    """Loss that expects logits or logarithms, and gets the output of an activation. A note for
    logarithms and for a softmax over the batch.

    Evidence: the activation, and the lowest loss that it allows.
    Causes: a softmax before ``CrossEntropyLoss``, or no ``log_softmax`` before ``NLLLoss``.
    Remedies: return logits; for ``NLLLoss``, use ``log_softmax``.
    Silent: other losses of the same outputs.
    Example: model.append(nn.Softmax(dim=1))  # before nn.CrossEntropyLoss()
    Args:
        steps: Steps before the first evaluation.

    The gradient of the last output decides:

    - Cross entropy: the derivative of a logit is ``s - y``, its probability minus 0 or 1. A softmax
      of C numbers in [0, 1] that add up to 1 lies between ``1 / (e + C - 1)`` and ``e`` times that;
      a sigmoid of [0, 1] between ``1 / 2`` and ``e / (e + 1)``. So all derivatives lie in two
      narrow ranges; those of other losses leave them soon.
    - They add up to 0, and one of each row is negative: so ReLU and tanh are recognized, too.
    - ``NLLLoss`` and ``KLDivLoss``: derivatives ``-y`` add up to -1 in each row. For logarithms,
      ``-y / p``, the sum is lower until training has converged. An expected reward has ``-y``, too.
    - A softmax over the batch: probabilities add up to the number of units, not of rows.
    """

    kind = "wrong_loss_input"
    on = "full"
    confirm_after = 3
    steps = 20  # chosen manually; until then, a squared error may have similar gradients

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        last = _last(record) if baseline.age >= self.steps else None
        if last is None or last.type_name not in ("Softmax", *_BOUNDS) or not last.is_finite:
            return None
        if (found := _mistake(last)) is None:
            return None
        taken, advice, severity = found
        return Finding(
            summary=f"The loss gets {taken}",
            advice=advice,
            severity=severity,
            value=last.grads.sketch.sum,
            threshold=0.0,
            module_name=last.name,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return True  # while the model and the loss are the same


def _mistake(last: _Last) -> tuple[str, tuple[str, ...], Severity] | None:
    """Return what the loss gets, the advice and the severity; None if nothing is wrong."""
    type_name, p, g = last.type_name, last.outputs.sketch, last.grads.sketch
    name = f"{called(last.name)} ({type_name})"
    logits = (
        f"Give the loss the logits, without the {type_name}",
        "CrossEntropyLoss has its own softmax, BCEWithLogitsLoss its own sigmoid",
    )
    columns = last.means[1] * last.units
    if type_name == "Softmax" and p.sum > 0:
        classes = p.finite_count / p.sum  # of each row, the sum is 1
        most = e / (e + classes - 1)
        if _are_errors(last, most / e, most, classes):
            again = f"the output of {name} and applies softmax again"
            return f"{again}: the loss cannot fall below {figure(-log(most))}", logits, "warning"
        totals = [p.sum, *last.means, last.means[0] / classes]  # the last is KLDivLoss's own mean
        are_targets = g.max <= 0 and any(abs(g.sum + all_) < _EXACT * all_ for all_ in totals)
        if are_targets and p.sum_squares < _LEARNED * p.sum:
            logarithms = ("Return logarithms, by LogSoftmax, for NLLLoss and KLDivLoss",)
            return f"probabilities of {name} where it expects logarithms", logarithms, "note"
        is_over_units = abs(classes - last.units) < _EXACT * last.units
        if not is_over_units and last.units > 1 and abs(p.sum - columns) < _EXACT * columns:
            over_batch = f"a softmax of {name} over the batch: columns add up to 1, not rows"
            return over_batch, _DIMENSION, "note"
    if type_name == "Sigmoid" and _are_errors(last, 1 / 2, e / (e + 1), 1):
        again = f"the output of {name} and applies sigmoid again"
        return f"{again}: the loss cannot fall below {figure(log(1 + 1 / e))}", logits, "warning"
    if type_name in _BOUNDS and _is_of_cross_entropy(g, last.units):
        return f"the output of {name} as logits: {_BOUNDS[type_name]}", logits, "warning"
    return None


class TargetsBroadcast(Detector):
    """Squared error that compares each output with all targets of the batch, for 50 steps.

    Evidence: the module and the two shapes.
    Causes: outputs ``[N, 1]`` and targets ``[N]`` broadcast to ``[N, N]``.
    Remedies: give both one shape: ``outputs.squeeze(1)``.
    Silent: batches with equal targets, gradient accumulation.
    Example: loss = nn.MSELoss()(outputs, targets)  # of shapes [64, 1] and [64]
    Args:
        steps: Steps over which this holds.

    The derivative is ``2 / N`` times an output minus the mean of all targets. So derivatives vary
    by exactly ``2 / N`` times the variation of the outputs, as for equal targets; but then the loss
    follows from both.
    """

    kind = "targets_broadcast"
    severity = "note"
    on = "full"
    confirm_after = 3
    steps = 50  # chosen manually: returns may all be equal for some steps
    _since: int = -1

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        found = self._compare(record)
        if found is None:
            self._since = -1
        elif self._since < 0:
            self._since = record.step
        return found if record.step - self._since >= self.steps else None

    def _compare(self, record: StepRecord) -> Finding | None:
        last = _last(record)
        if last is None or not record.loss or last.units != 1 or not last.is_finite:
            return None
        name, p, g = last.name, last.outputs.sketch, last.grads.sketch
        rows = p.count
        if last.means[1] > 1 or rows < _FEWEST or not p.std > 0:
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
            summary=f"The loss compares each output of {called(name)} with all {rows} targets",
            cause=f"Outputs [{rows}, 1] and targets [{rows}] broadcast to [{rows}, {rows}]",
            advice=("Give the loss outputs and targets of one shape: outputs.squeeze(1)",),
            value=scale,
            threshold=scale,
            module_name=name,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return True  # while the model and the loss are the same


class _Last(NamedTuple):
    """The last module that ran, its outputs and their gradients."""

    name: str
    type_name: str
    units: int
    outputs: TensorRecord
    grads: TensorRecord
    means: tuple[int, int]  # number of means over rows: one per rank, or per micro-batch

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite, and a gradient is not zero."""
        outputs, grads = self.outputs.sketch, self.grads.sketch
        return not (outputs.nonfinite_count or grads.nonfinite_count) and grads.rms > 0


@once
def _last(record: StepRecord) -> _Last | None:
    name = next(reversed(record.activations), "")
    if name not in record.activation_grads:
        return None
    outputs, grads = record.activations[name], record.activation_grads[name]
    ranks = 1 if record.ranks is None else len(record.ranks.measured)
    return _Last(
        name=name,
        type_name=record.layout.modules[record.layout.position[name]].type_name,
        units=int(record.activations.rows.unit_count[-1]),
        outputs=outputs,
        grads=grads,
        means=(ranks, ranks * grads.calls),
    )


def _are_errors(last: _Last, least: float, most: float, classes: float) -> bool:
    """Whether each gradient lies between the two limits, or between them minus 1.

    A loss that is a mean over rows divides all gradients by their number.
    """
    grads = last.grads.sketch
    left, right = limits(grads.buckets)
    negative, positive = left[grads.buckets < 0], right[grads.buckets > 0]
    if not negative.size or not positive.size:
        return False
    rows = (grads.finite_count - grads.zero_count) / classes
    for of in (1, *(means / rows for means in last.means)):
        above = positive[0] > of * least and grads.max < _ROUNDED * of * most
        below = negative[-1] < of * (most - 1) and grads.min > _ROUNDED * of * (least - 1)
        if above and below:
            return True
    return False


def _is_of_cross_entropy(grads: Sketch, units: int) -> bool:
    """Whether gradients add up to 0 and one of each row is negative, for three units or more."""
    negative = grads.counts[grads.buckets < 0].sum()
    of_each = negative / max(1, grads.counts[grads.buckets != 0].sum()) * units
    is_balanced = abs(grads.mean) < _EXACT * _EXACT * grads.rms
    return bool(units > 2 and is_balanced and abs(of_each - 1) < _ABOUT)


_DIMENSION = ("Use dim=1 or dim=-1", "Remove the softmax before CrossEntropyLoss")
_BOUNDS = {
    "ReLU": "no logit can be below 0",
    "Sigmoid": "all logits are between 0 and 1",
    "Tanh": "all logits are between -1 and 1",
}
_ROUNDED = 1.01  # numbers in bfloat16 are off by 0.4 %
_ABOUT = 0.02  # for counts of a sample
_EXACT = 1e-3  # of sums over a batch
_LEARNED = 0.9  # mean of the probabilities weighted by themselves: 1 if one of each row is 1
_FEWEST = 8  # rows; the variance of fewer may fit by chance

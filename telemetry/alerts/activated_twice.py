"""Probabilities that are given to a loss which expects logits."""

from __future__ import annotations

from math import e, log

from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding
from telemetry.records import StepRecord
from telemetry.records.buckets import limits
from telemetry.records.sketch import Sketch
from telemetry.shared.plain_text import called


class ActivatedTwice(Detector):
    """Alerts when a loss takes the softmax, or the sigmoid, of what is one already.

    ``CrossEntropyLoss`` and ``BCEWithLogitsLoss`` expect logits. Their derivative with respect to
    each is ``s - y``: its probability, and 0 or 1 for the target. The softmax of C numbers between
    0 and 1 that add up to 1 lies between ``1 / (e + C - 1)`` and ``e`` times that, the sigmoid of a
    number between 0 and 1 between ``1 / 2`` and ``e / (e + 1)``. So all derivatives lie in two
    narrow ranges, one on either side of zero; those of other losses leave them soon.

    Args:
        steps: Number of steps from the beginning.
    """

    kind = "activated_twice"
    on = "full"
    confirm = 3
    steps = 20  # by eye; until then, a squared error of even probabilities may look alike

    def find(self, record: StepRecord, base: Baseline) -> Finding | None:
        name = next(reversed(record.activations), "")
        if base.age < self.steps or name not in record.activation_grads:
            return None
        type_name = record.layout.modules[record.layout.position[name]].type_name
        outputs, grads = record.activations[name].sketch, record.activation_grads[name]
        if type_name == "Softmax" and outputs.sum > 0:
            classes = outputs.finite_count / outputs.sum  # of each row, the sum is 1
            least, most = 1 / (e + classes - 1), e / (e + classes - 1)
        elif type_name == "Sigmoid":
            classes, least, most = 1, 1 / 2, e / (e + 1)
        else:
            return None
        # A loss is a sum or a mean over the rows, or over those of one of several micro-batches.
        rows = max(1, grads.sketch.finite_count - grads.sketch.zero_count) / classes
        if not any(_lie(grads.sketch, least, most, of) for of in (1, 1 / rows, grads.calls / rows)):
            return None
        function = type_name.lower()
        return Finding(
            seen=f"The loss takes the {function} of what {called(name)} returns, which is one "
            f"already: its gradients are those of a {function} of numbers between 0 and 1, and it "
            f"cannot fall below {-log(most):.3g}",
            advice=f"Give the loss the logits, without the {type_name}: CrossEntropyLoss and "
            "BCEWithLogitsLoss have their own.",
            value=-log(most),
            limit=0.0,
            module_name=name,
        )

    def lasts(self, record: StepRecord, base: Baseline) -> bool:
        return True  # as long as the model and the loss are what they are


def _lie(grads: Sketch, least: float, most: float, scale: float) -> bool:
    """Whether some are within ``scale`` times these, some within these less 1, and no others."""
    left, right = limits(grads.buckets)
    negative, positive = left[grads.buckets < 0], right[grads.buckets > 0]
    if not negative.size or not positive.size:
        return False
    low, high, near = scale * least, scale * most, scale * (1 - most)
    farthest = _ROUNDED * scale * (1 - least)
    above = positive[0] > low and grads.max < _ROUNDED * high
    return bool(above and negative[-1] < -near and grads.min > -farthest)


_ROUNDED = 1.01  # in bfloat16 numbers are off by 0.4 %

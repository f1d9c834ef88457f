"""Mistakes in the training loop, and losses with wrong inputs, as the gradients of outputs show."""

from __future__ import annotations

import math
import re
from math import e, log
from typing import ClassVar, NamedTuple

from telemetry.alert import Alert, Severity
from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.plain_text import called, figure, steps_in_words
from telemetry.records import StepRecord, TensorRecord, once
from telemetry.records.buckets import limits
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of

# --- the loop -------------------------------------------------------------------------------------


class EvalMode(Detector):
    """Steps were taken in evaluation mode, 20 in a row, and the model has dropout or batch norm. Or
    new batch norms evaluate from the first step on, a note.

    Evidence: the types of modules that behave differently, or the first batch norm.
    Causes: no ``train()`` after a validation or ``from_pretrained()``.
    Remedies: call ``model.train()`` before training and after each validation.
    Silent: single modules in evaluation mode, such as frozen batch norms.
    Example: model.eval()  # and no train() before the next step

    New batch norms (gains of 1, biases of 0) have no statistics and return their inputs.
    """

    kind = "eval_mode"
    statistic = "activation_rms"
    confirm_after = "steps"
    # A step or two may be intended.
    steps: int = limit(shared.LATEST, "Consecutive steps in evaluation mode.")

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if not record.eval_mode:
            return _idle_norms(record) if baseline.age == 0 else None
        types = {module.type_name for module in record.layout.modules}
        if not (differ := sorted(filter(_DIFFER.search, types))):
            return None
        return Finding(
            summary="The model was in evaluation mode for "
            f"{steps_in_words(int(self.steps))}, which changes {', '.join(differ[:3])}",
            advice=("Call model.train() before training and after each validation",),
            value=self.steps,
            threshold=self.steps,
        )


def _idle_norms(record: StepRecord) -> Finding | None:
    """Return the finding of new batch norms that ignore the batch."""
    new, idle, before = 0, [], math.nan
    types = {module.name: module.type_name for module in record.layout.modules}
    for name, rms in figures_of(record.activations, rms_of).items():
        gain, bias = (record.weights.get(f"{name}.{part}") for part in ("weight", "bias"))
        if _BATCH_NORM.search(types[name]) and gain and bias:
            extremes = gain.sketch.min, gain.sketch.max, bias.sketch.min, bias.sketch.max
            if extremes == (1, 1, 0, 0):
                new += 1
                if abs(rms - before) <= shared.ROUNDED * rms and abs(rms - 1) > shared.ROUNDED:
                    idle.append(name)
        before = rms
    if len(idle) <= new / 2:
        return None
    return Finding(
        summary=f"{len(idle)} of {new} new batch norms are in evaluation mode, first "
        f"{called(idle[0])}",
        cause="They have no statistics yet, and normalize nothing",
        advice=("Call train() on them", "Freeze batch norms only after they have learned"),
        value=len(idle),
        threshold=new / 2,
        module_name=idle[0],
        severity="note",  # batch norms are frozen on purpose
        confirmed=True,
        momentary=True,
    )


_BATCH_NORM = re.compile(r"^(Lazy)?BatchNorm")

# Classes that behave differently in training, those of most libraries included.
_DIFFER = re.compile("BatchNorm|Drop|RReLU")


class SameBatch(Detector):
    """Inputs of the model have the same values at all full steps.

    Evidence: the step since which they are the same, and whether they are zero.
    Causes: a loader that is stuck, ``next(iter(loader))`` in the loop, inputs that are all zero.
    Remedies: iterate over the loader; check the inputs.
    Silent: loaders that repeat their batches each epoch; all data at once, until it overfits.
    Example: inputs, targets = next(iter(loader))  # in each step, without shuffling

    Distances of these steps have no common divisor, so that no loader's period explains them.
    Inputs that never differed may be all data, such as a graph: then it reports zeros at once, and
    other values when the loss shows overfitting.
    """

    kind = "same_batch"
    severity = "note"
    # Chosen manually: PPO takes up to 80 steps on one collected batch
    steps: int = limit(shared.LENGTH, "Distance of the first and the last compared step.")
    # The healthy gcn, trained on one graph with dropout, stays above 0.09; constant_batch and
    # first_batch_forever come to 0.0002 and ROUNDED.
    share: float = limit(
        0.05, "Share of the first losses below which the model overfits its only batch."
    )
    full_steps_in_a_row: int = state(2)  # their distance of 1 has no divisor
    _inputs: tuple[float, ...] = state(())
    _since: int = state(0)
    _divisor: int = state(0)
    _refuted: bool = state(False)
    _varied: bool = state(False)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        inputs, distance = record.fingerprints, record.step - self._since
        is_known = len(inputs) > 0 and all(map(math.isfinite, inputs))
        if is_known and inputs == self._inputs:
            self._divisor = math.gcd(self._divisor, distance)
        elif is_known:
            self._refuted, self._varied = self._refuted or self._divisor > 0, bool(self._inputs)
            self._inputs, self._since, self._divisor = inputs, record.step, 0
        is_zero = is_known and not any(inputs)
        # It overfits if the loss has fallen to almost zero, or none is logged.
        loss = baseline.loss
        overfits = not loss.latest or loss.median_of(shared.FEWEST) <= self.share * loss.first
        is_fault = self.active_alert is not None or self._varied or is_zero or overfits
        is_one = self._divisor == 1 and distance >= self.steps and is_fault
        # One more full step distinguishes a loader's period from a single batch.
        self.needs_full_step = self._divisor > 1 and not self._refuted
        if not is_known and self.active_alert is None:
            self.needs_full_step |= is_one
            return None
        if not is_one:
            return None
        what, advice = ("all zeros", _EMPTY) if is_zero else ("the same", _SAME_ONE)
        return Finding(
            summary=f"All inputs measured since step {self._since} are {what}",
            advice=advice,
            value=distance,
            threshold=self.steps,
        )


_SAME_ONE = (
    "Check that the loop takes a new batch at each step: next(iter(loader)) restarts",
    "Ignore it if the data are a single batch",
)
_EMPTY = ("Check how inputs are made: integer division, a mask, a buffer that stays empty",)


# --- inputs of the loss ---------------------------------------------------------------------------


class WrongLossInput(Detector):
    """Loss that gets other inputs than it expects, for 20 steps: the output of an activation where
    it expects logits or logarithms, or shapes that broadcast, so that a squared error compares each
    output with all targets. A note for logarithms and for a softmax over the batch.

    Evidence: the activation and the lowest loss that it allows, or the two shapes.
    Causes: a softmax before ``CrossEntropyLoss``, no ``log_softmax`` before ``NLLLoss``, outputs
        ``[N, 1]`` and targets ``[N]``.
    Remedies: return logits; for ``NLLLoss``, use ``log_softmax``; ``outputs.squeeze(1)``.
    Silent: other losses of the same outputs, functions that are applied outside of the model,
        batches with equal targets, broadcast in gradient accumulation.
    Example: model.append(nn.Softmax(dim=1))  # before nn.CrossEntropyLoss()

    The gradient of the last output decides:

    - Cross entropy: the derivative of a logit is ``s - y``, its probability minus 0 or 1. A softmax
      of C numbers in [0, 1] that add up to 1 lies between ``1 / (e + C - 1)`` and ``e`` times that;
      a sigmoid of [0, 1] between ``1 / 2`` and ``e / (e + 1)``. So all derivatives lie in two
      narrow ranges; those of other losses leave them soon.
    - They add up to 0, and one of each row is negative: so ReLU and tanh are recognized, too.
    - ``NLLLoss`` and ``KLDivLoss``: derivatives ``-y`` add up to -1 in each row. For logarithms,
      ``-y / p``, the sum is lower until training has converged. An expected reward has ``-y``, too.
    - A softmax over the batch: probabilities add up to the number of units, not of rows.
    - A squared error that broadcasts: the derivative is ``2 / N`` times an output minus the mean of
      all targets. So derivatives vary by exactly ``2 / N`` times the variation of the outputs, as
      for equal targets; but then the loss follows from both.
    """

    kind = "wrong_loss_input"
    statistic = "activation_rms"
    on = "full"
    confirm_after = shared.SEVERAL
    # Chosen manually; for some steps a squared error may have such gradients, or returns be equal
    steps: int = limit(shared.LATEST, "Steps over which this holds.")
    _since: int = state(-1)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        found, last = None, _last(record)
        if last is not None and (mistake := _mistake(last)):
            given, advice, severity = mistake
            found = Finding(
                summary=f"The loss gets {given}",
                advice=advice,
                severity=severity,
                value=last.grads.sketch.sum,
                module_name=last.name,
            )
        elif last is not None:
            found = _broadcast(record, last)
        if found is None:
            self._since = -1
        elif self._since < 0:
            self._since = record.step
        return found if record.step - self._since >= self.steps else None

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return True  # while the model and the loss are the same


def _mistake(last: _Last) -> tuple[str, tuple[str, ...], Severity] | None:
    """Return what the loss gets where it expects something else, advice and severity."""
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
        are_targets = g.max <= 0 and any(abs(g.sum + n) < shared.TINY * n for n in totals)
        if are_targets and p.sum_squares < (1 - shared.FEW) * p.sum:
            return f"probabilities of {name} where it expects logarithms", _LOGARITHMS, "note"
        is_over_units = abs(classes - last.units) < shared.TINY * last.units
        is_over_batch = abs(p.sum - columns) < shared.TINY * columns
        if not is_over_units and last.units > 1 and is_over_batch:
            over_batch = f"a softmax of {name} over the batch: columns add up to 1, not rows"
            return over_batch, _DIMENSION, "note"
    if type_name == "Sigmoid" and _are_errors(last, 1 / 2, e / (e + 1), 1):
        again = f"the output of {name} and applies sigmoid again"
        return f"{again}: the loss cannot fall below {figure(log(1 + 1 / e))}", logits, "warning"
    # Of a cross entropy, gradients add up to 0 and one of each row is negative.
    negative, others = (g.counts[of].sum() for of in (g.buckets < 0, g.buckets != 0))
    is_one = last.units > 2 and abs(negative / max(1, others) * last.units - 1) < 2 * shared.ROUNDED
    if type_name in _BOUNDS and is_one and abs(g.mean) < shared.TINY**2 * g.rms:
        return f"the output of {name} as logits: {_BOUNDS[type_name]}", logits, "warning"
    return None


ONE_SHAPE = ("Give the loss outputs and targets of one shape: outputs.squeeze(1)",)


def _broadcast(record: StepRecord, last: _Last) -> Finding | None:
    """Return the finding of a squared error of outputs ``[N, 1]`` and targets ``[N]``."""
    name, p, g = last.name, last.outputs.sketch, last.grads.sketch
    rows = p.count
    is_judged = record.loss and last.units == 1 and last.means[1] == 1
    if not is_judged or rows < shared.FEW_SAMPLES or not p.std > 0:
        return None
    scale = g.std / p.std
    # Of a mean or a sum of squares, or half of it.
    factors = (2 / rows, 1 / rows, 2 * rows, rows)
    if not any(abs(scale - of) < shared.TINY * of for of in factors):
        return None
    error = 2 * (record.loss or 0.0) / (rows * scale)
    of_targets = error - p.std**2 - (g.mean / scale) ** 2
    if of_targets < shared.ROUNDED * error:
        return None
    return Finding(
        summary=f"The loss compares each output of {called(name)} with all {rows} targets",
        cause=f"Outputs [{rows}, 1] and targets [{rows}] broadcast to [{rows}, {rows}]",
        advice=ONE_SHAPE,
        value=scale,
        threshold=scale,
        module_name=name,
    )


class _Last(NamedTuple):
    """The last module that ran, its outputs and their gradients."""

    name: str
    type_name: str
    units: int
    outputs: TensorRecord
    grads: TensorRecord
    means: tuple[int, int]  # number of means over rows: one per rank, or per micro-batch


@once
def _last(record: StepRecord) -> _Last | None:
    """Return the last module if it is judged, and its gradients are finite and not all zero."""
    name = next(reversed(record.activations), "")
    if name not in record.activation_grads:
        return None
    type_name = record.layout.modules[record.layout.position[name]].type_name
    units = int(record.activations.rows.unit_count[-1])
    if units != 1 and type_name not in ("Softmax", *_BOUNDS):
        return None
    outputs, grads = record.activations[name], record.activation_grads[name]
    if outputs.sketch.nonfinite_count or grads.sketch.nonfinite_count or not grads.sketch.rms > 0:
        return None
    ranks = 1 if record.ranks is None else len(record.ranks.measured)
    return _Last(
        name=name,
        type_name=type_name,
        units=units,
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
    some = 1 + shared.ROUNDED
    return any(
        positive[0] > of * least
        and grads.max < some * of * most
        and negative[-1] < of * (most - 1)
        and grads.min > some * of * (least - 1)
        for of in (1, *(means / rows for means in last.means))
    )


_LOGARITHMS = ("Return logarithms, by LogSoftmax, for NLLLoss and KLDivLoss",)
_DIMENSION = ("Use dim=1 or dim=-1", "Remove the softmax before CrossEntropyLoss")
_BOUNDS = {
    "ReLU": "no logit can be below 0",
    "Sigmoid": "all logits are between 0 and 1",
    "Tanh": "all logits are between -1 and 1",
}


# --- kinds that only telemetry.check reports, before training -----------------------------------


class CheckKind(Detector):
    """A kind that no step of a run is judged for."""

    threshold: ClassVar[float] = 0.0
    advice: ClassVar[tuple[str, ...]]

    @classmethod
    def alert(cls, summary: str, value: float, *, threshold: float | None = None) -> Alert:
        """Return the alert of the model at step 0."""
        limit = cls.threshold if threshold is None else threshold
        found = Finding(summary=summary, value=value, threshold=limit, advice=cls.advice)
        return cls()._report(0, found)[0]


class LossAtStart(CheckKind):
    """The cross entropy of a model before training is more than six times ln C, the loss of a
    random guess among C classes. Only ``telemetry.check`` reports it.

    Evidence: the loss, and that of a guess.
    Causes: large initial weights in the last layer, inputs that are not scaled.
    Remedies: make the weights of the last layer smaller; scale its inputs; check the targets.
    Silent: losses that are not known to be a cross entropy of classes.
    Example: model[-1].weight.data.mul_(50.0)
    """

    kind = "loss_at_start"
    # Times ln C: torchvision's new MNASNet has up to 5.7, logits 50 times as large 7.4 or more.
    factor: ClassVar[float] = 6.0
    advice = (
        "Make the initial weights of the last layer smaller, or scale its inputs",
        "For a trained model, check that inputs and targets belong to it",
    )


class InputIgnored(CheckKind):
    """The outputs of a model do not depend on its inputs. Only ``telemetry.check`` reports it.

    Evidence: the outputs of all samples are equal, and have no gradient with respect to the inputs.
    Causes: a factor of zero, dead units, a ``forward`` that ignores its input.
    Remedies: follow the input through ``forward``.
    Silent: weight matrices that start at zero, inputs or outputs without a gradient.
    Example: model.forward = lambda x: torch.zeros_like(x)
    """

    kind = "input_ignored"
    advice = (
        "Check for a factor of zero, and for dead units",
        "Check that forward() uses its input",
    )


class InputScale(CheckKind):
    """The inputs of a model are far from standardized. Only ``telemetry.check`` reports it.

    Evidence: mean and standard deviation of the inputs.
    Causes: pixels that are not divided by 255, or twice, a wrong mean or deviation, mixed units.
    Remedies: standardize the inputs: mean 0 and standard deviation 1.
    Silent: integers, a normalization as the first layer.
    Example: inputs = 256 * inputs
    """

    kind = "input_scale"
    # Root mean square of the values that are not zero: pixels in [0, 1] have 0.1 to 0.8.
    largest: ClassVar[float] = 10.0
    smallest: ClassVar[float] = 0.02
    varies: ClassVar[float] = 0.02  # share of the standard deviation in the root mean square
    advice = (shared.STANDARDIZE,)


def unusual_inputs(record: StepRecord) -> tuple[str, float]:
    """Describe the model's inputs if they are far from standardized; else an empty text.

    Also returns the root mean square of the values that are not zero.
    """
    given, owning = record.inputs.get(""), record.layout.owning
    if given is None or not len(owning) or not given.sketch.finite_count > given.sketch.zero_count:
        return "", 0.0
    sketch, first = given.sketch, record.layout.modules[owning[0]].type_name
    size = math.sqrt(sketch.sum_squares / (sketch.finite_count - sketch.zero_count))
    fits = InputScale.smallest <= size <= InputScale.largest
    if "Norm" in first or (fits and sketch.std >= InputScale.varies * sketch.rms):
        return "", size
    mean, std = figure(sketch.mean), figure(sketch.std)
    return f"The inputs have a mean of {mean} and a standard deviation of {std}", size


class BatchLeak(CheckKind):
    """The output of one sample depends on another sample of the batch, in evaluation mode. A note
    if the first axis may be time or samples are related. Only ``telemetry.check`` reports it.

    Evidence: the two samples.
    Causes: a mean, a softmax, a norm or a reshape over the first axis, ``batch_first=False``.
    Remedies: reduce over other axes; set ``batch_first=True``.
    Silent: batch norm, which depends on other samples in training only.
    Example: outputs = model(inputs).softmax(dim=0)
    """

    kind = "batch_leak"
    advice = (
        "Check for a mean, a softmax, a norm or a reshape over the first axis",
        "Set batch_first=True if attention expects the sequence there",
        "Move in-batch negatives into the loss",
    )


CHECK_KINDS = {check.kind: check for check in (LossAtStart, InputIgnored, InputScale, BatchLeak)}

"""Mistakes in the training loop: evaluation mode, a repeated batch, a learning rate of zero."""

from __future__ import annotations

import math
import re
from collections import deque
from statistics import median_high

from telemetry.alerts.baseline import Baseline, finite_loss
from telemetry.alerts.detector import Detector, Finding
from telemetry.alerts.window import FEWEST
from telemetry.plain_text import called, figure, steps_in_words
from telemetry.records import StepRecord
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of


class EvalMode(Detector):
    """Steps were taken in evaluation mode, 20 in a row, and the model has dropout or batch norm. Or
    new batch norms evaluate from the first step on.

    Evidence: the types of modules that behave differently, or the first batch norm.
    Causes: no ``train()`` after a validation or ``from_pretrained()``.
    Remedies: call ``model.train()`` before training and after each validation.
    Silent: single modules in evaluation mode, such as frozen batch norms.
    Example: model.eval()  # and no train() before the next step
    Args:
        steps: Consecutive steps in evaluation mode.

    New batch norms (gains of 1, biases of 0) have no statistics and return their inputs.
    """

    kind = "eval_mode"
    severity = "note"
    confirm_after = "steps"
    steps = 20  # chosen manually: a step or two may be intended

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if (
            baseline.age == 0
            and not record.eval_mode
            and (found := _idle_norms(record)) is not None
        ):
            return found
        types = {m.type_name for m in record.layout.modules} if record.eval_mode else set()
        if not (differ := sorted(filter(_DIFFER.search, types))):
            return None
        return Finding(
            summary=f"{steps_in_words(int(self.steps))} in evaluation mode, which changes "
            f"{', '.join(differ[:3])}",
            advice=("Call model.train() before training and after each validation",),
            value=self.steps,
            threshold=self.steps,
        )


def _idle_norms(record: StepRecord) -> Finding | None:
    """Return the finding of new batch norms that ignore the batch."""
    new, idle = 0, []
    types = {module.name: module.type_name for module in record.layout.modules}
    before = math.nan
    for name, rms in figures_of(record.activations, rms_of).items():
        gain, bias = (record.weights.get(f"{name}.{part}") for part in ("weight", "bias"))
        if _BATCH_NORM.search(types[name]) and gain and bias:
            gains, biases = gain.sketch, bias.sketch
            is_new = (gains.min, gains.max, biases.min, biases.max) == (1, 1, 0, 0)
            new += is_new
            if is_new and abs(rms - before) <= _SAME * rms and abs(rms - 1) > _SAME:
                idle.append(name)
        before = rms
    if not new or len(idle) <= new / 2:
        return None
    return Finding(
        summary=f"{len(idle)} of {new} new batch norms are in evaluation mode, first "
        f"{called(idle[0])}",
        cause="They have no statistics yet, and normalize nothing",
        advice=("Call train() on them", "Freeze batch norms only after they have learned"),
        value=len(idle),
        threshold=new / 2,
        module_name=idle[0],
        confirmed=True,
        momentary=True,
    )


_BATCH_NORM = re.compile(r"^(Lazy)?BatchNorm")
_SAME = 0.01  # of a value; rounding in bfloat16 is half of that

# Classes that behave differently in training, those of most libraries included.
_DIFFER = re.compile("BatchNorm|Drop|RReLU")


class SameBatch(Detector):
    """Inputs of the model have the same values at all full steps.

    Evidence: the step since which they are the same, and whether they are zero.
    Causes: a loader that is stuck, ``next(iter(loader))`` in the loop, inputs that are all zero.
    Remedies: iterate over the loader; check the inputs.
    Silent: loaders that repeat their batches each epoch, training on all data at once.
    Example: inputs, targets = next(iter(loader))  # in each step, without shuffling
    Args:
        steps: Distance of the first and the last compared step.
        share: Share of the first losses below which the model overfits its only batch.

    Distances of these steps have no common divisor, so that no loader's period explains them.
    Inputs that never differed may be all data, such as a graph: then it reports zeros at once, and
    other values when the loss shows overfitting.
    """

    kind = "same_batch"
    severity = "note"
    steps = 100  # chosen manually: PPO takes up to 80 steps on one collected batch
    # The healthy gcn, trained on one graph with dropout, stays above 0.09; constant_batch and
    # first_batch_forever come to 0.0002 and 0.01.
    share = 0.05
    full_steps_in_a_row = 2  # their distance of 1 has no divisor
    _inputs: tuple[float, ...] = ()
    _since: int = 0
    _divisor: int = 0
    _refuted: bool = False
    _varied: bool = False
    _losses: deque[float]

    def set_up(self) -> None:
        self._losses = deque(maxlen=FEWEST)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if (loss := finite_loss(record)) is not None:
            self._losses.append(loss)
        inputs, distance = record.fingerprints, record.step - self._since
        is_known = len(inputs) > 0 and all(map(math.isfinite, inputs))
        if is_known and inputs == self._inputs:
            self._divisor = math.gcd(self._divisor, distance)
        elif is_known:
            self._refuted, self._varied = self._refuted or self._divisor > 0, bool(self._inputs)
            self._inputs, self._since, self._divisor = inputs, record.step, 0
        is_one = self._divisor == 1 and distance >= self.steps
        is_zero = is_known and not any(inputs)
        may_report = self.active_alert is not None or self._varied or is_zero
        is_one &= may_report or self._overfits(baseline)
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

    def _overfits(self, baseline: Baseline) -> bool:
        """Whether the loss has fallen to almost zero; True if none is logged."""
        return not self._losses or median_high(self._losses) <= self.share * baseline.loss.first


_SAME_ONE = (
    "Check that the loop takes a new batch at each step: next(iter(loader)) restarts",
    "Ignore it if the data are a single batch",
)
_EMPTY = ("Check how inputs are made: integer division, a mask, a buffer that stays empty",)


class LearningRateZero(Detector):
    """Steps continue though the learning rate of all groups is 0, or a millionth of the highest.

    Evidence: the rate, its highest value, and the first of these steps.
    Causes: a schedule made for fewer steps, or one made for epochs that advances at each step.
    Remedies: check for how many steps the schedule was made.
    Silent: the first steps of a warm-up, the last ones of a schedule.
    Example: scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # at each step
    Args:
        fraction: Share of the highest learning rate that counts as zero.
        steps: Consecutive steps at that rate.
    """

    kind = "learning_rate_zero"
    severity = "note"
    confirm_after = "steps"
    # A million such steps equal one at the peak. Schedules usually end at 0.1 to 0.001 of it.
    fraction = 1e-6
    steps = 20  # chosen manually: a schedule that ends at 0 has one or two such steps
    _highest: float = 0.0

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        rate = max(record.learning_rates, default=math.nan)
        if not math.isfinite(sum(record.learning_rates, rate)):
            return None  # the optimizer has no learning rate, or adapts it
        self._highest = max(self._highest, rate)
        limit = self.fraction * self._highest
        if rate > limit:
            return None
        before = f", after up to {figure(self._highest)}" if self._highest else ""
        return Finding(
            summary=f"The learning rate is {figure(rate)} since step "
            f"{record.step - int(self.steps) + 1}{before}",
            advice=(
                "Check the number of steps of the schedule",
                "Advance the schedule once for each of its steps",
            ),
            value=rate,
            threshold=limit,
        )

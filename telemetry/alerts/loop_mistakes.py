"""Mistakes in the training loop: evaluation mode, one batch again and again, a rate of zero."""

from __future__ import annotations

import math
import re
from collections import deque
from statistics import median_high

from telemetry.alerts.baseline import FEWEST, Baseline, finite_loss
from telemetry.alerts.detector import Detector, Finding
from telemetry.plain_text import called, steps_in_words
from telemetry.records import StepRecord
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of


class EvalMode(Detector):
    """A note when optimizer steps are taken while the whole model is in evaluation mode.

    That is usual after ``from_pretrained()`` or a validation, where ``train()`` was forgotten.
    Silent where only some modules are in evaluation mode, as batch norms that are frozen on
    purpose, and where no module does anything else in training: the model has neither dropout nor
    batch norm. But batch norms that are new (gains of 1, biases of 0) and evaluate from the first
    step on have learned no statistics, and do nothing: they return what the module before them did.

    Args:
        steps: Number of such steps in a row.
    """

    kind = "eval_mode"
    severity = "note"
    confirm_after = "steps"
    steps = 20  # by eye: a step or two may be an experiment

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
            advice=(
                "Call model.train() before training and after each validation, unless this is "
                "meant to be so.",
            ),
            value=self.steps,
            threshold=self.steps,
        )


def _idle_norms(record: StepRecord) -> Finding | None:
    """Batch norms that have learned nothing and do not look at the batch."""
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
        summary=f"{len(idle)} of {new} new batch norms, {called(idle[0])} the first, are in "
        "evaluation mode, with the statistics that they were made with: they normalize nothing",
        advice=("Call train() on them, too; to freeze batch norms helps where they have learned.",),
        value=len(idle),
        threshold=new / 2,
        module_name=idle[0],
        confirmed=True,
        momentary=True,
    )


_BATCH_NORM = re.compile(r"^(Lazy)?BatchNorm")
_SAME = 0.01  # of a value; rounding in bfloat16 is half of that

# What torch's own modules that look at ``training`` are called, and most of other libraries.
_DIFFER = re.compile("BatchNorm|Drop|RReLU")


class SameBatch(Detector):
    """A note when the model was given the same values at all steps that were looked at.

    A loader that begins anew after each epoch repeats its batches, too. So steps are compared whose
    distances have no common divisor: then no period but that of a single batch explains it.

    Where the values were other ones before, the loader is stuck. Where they are the same from the
    first step on, the data set may be a single batch, as a graph is; then it is silent until the
    loss says that this batch is being learned by heart, or if all values are zero.

    Args:
        steps: Distance of the first and the last of these steps, at least.
        share: Of the first losses; below it, a batch that was the only one is known by heart.
    """

    kind = "same_batch"
    severity = "note"
    steps = 100  # by eye: PPO takes up to 80 steps on what it has collected
    # The healthy gcn, trained on one graph with dropout, stays above 0.09; constant_batch and
    # first_batch_forever come to 0.0002 and 0.01.
    share = 0.05
    full_steps_in_a_row = 2  # whose distance has no divisor
    _given: tuple[float, ...] = ()
    _begun: int = 0
    _divisor: int = 0
    _refuted: bool = False
    _varied: bool = False
    _losses: deque[float]

    def set_up(self) -> None:
        self._losses = deque(maxlen=FEWEST)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if (loss := finite_loss(record)) is not None:
            self._losses.append(loss)
        given, distance = record.fingerprints, record.step - self._begun
        is_known = len(given) > 0 and all(map(math.isfinite, given))
        if is_known and given == self._given:
            self._divisor = math.gcd(self._divisor, distance)
        elif is_known:
            self._refuted, self._varied = self._refuted or self._divisor > 0, bool(self._given)
            self._given, self._begun, self._divisor = given, record.step, 0
        is_one = self._divisor == 1 and distance >= self.steps
        is_zero = is_known and not any(given)
        is_told = self.active_alert is not None or self._varied or is_zero
        is_one &= is_told or self._is_known_by_heart(baseline)
        # One more step would tell a loader's period from a single batch, or is the one to tell it.
        self.needs_full_step = self._divisor > 1 and not self._refuted
        if not is_known and self.active_alert is None:
            self.needs_full_step |= is_one
            return None
        if not is_one:
            return None
        what, advice = ("nothing but zeros", _EMPTY) if is_zero else ("the same values", _SAME_ONE)
        return Finding(
            summary=f"The model was given {what} at each step that was measured since step "
            f"{self._begun}",
            advice=advice,
            value=distance,
            threshold=self.steps,
        )

    def _is_known_by_heart(self, baseline: Baseline) -> bool:
        """Whether the loss has come down to next to nothing; True if none is logged."""
        return not self._losses or median_high(self._losses) <= self.share * baseline.loss.first


_SAME_ONE = (
    "Check that the loop takes a new batch at each step (next(iter(loader)) begins anew), unless "
    "the data are a single batch.",
)
_EMPTY = (
    "Look at how inputs are made: a division of integers, a mask, a buffer that nobody fills.",
)


class LearningRateZero(Detector):
    """A note when training goes on though the learning rate of all parameter groups has run out.

    Usual causes are a schedule that was made for fewer steps, and one made for epochs that is
    advanced at each step. Silent in the first steps of a warm-up and the last ones of a schedule.

    Args:
        fraction: Of the highest learning rate so far; below it nothing more is learned.
        steps: Number of such steps in a row.
    """

    kind = "learning_rate_zero"
    severity = "note"
    confirm_after = "steps"
    # A million such steps do what one did. Usual schedules end at 0.1 to 0.001 of their peak.
    fraction = 1e-6
    steps = 20  # by eye: a schedule that ends at 0 has one or two such steps
    _highest: float = 0.0

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        rate = max(record.learning_rates, default=math.nan)
        if not math.isfinite(sum(record.learning_rates, rate)):
            return None  # an optimizer without one, which works it out itself
        self._highest = max(self._highest, rate)
        limit = self.fraction * self._highest
        if rate > limit:
            return None
        before = f", after up to {self._highest:.3g}" if self._highest else ""
        return Finding(
            summary=f"The learning rate is {rate:.3g} since step "
            f"{record.step - int(self.steps) + 1}{before}: steps go on and change nothing",
            advice=(
                "Check how many steps the schedule was made for, and that it is advanced once "
                "for each of them.",
            ),
            value=rate,
            threshold=limit,
        )

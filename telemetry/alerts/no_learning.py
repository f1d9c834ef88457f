"""Runs and parameters that learn nothing.

The weights do not move, the loss does not fall, the learning rate is 0, or parameters get no
gradient or no optimizer.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, compress
from statistics import median_high

import numpy as np

from telemetry.alert import Alert, Severity
from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline, Figures, Marks, matrix_ratios, matrix_sizes
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.alerts.mistakes import unusual_inputs
from telemetry.layers import table
from telemetry.plain_text import called, called_all, figure, steps_in_words
from telemetry.records import Layout, StepRecord
from telemetry.records.moments import rms_of


class NoLearning(Detector):
    """Steps from the first on move no weight noticeably. Or all gradients are exactly 0 for 50
    steps. Or losses are logged and no optimizer of this model steps.

    Evidence: the largest update ratio, the number of steps or losses, the layer that passes no
        gradient on.
    Causes: a tiny learning rate, a mask that hides all targets, an optimizer of another model.
    Remedies: raise the learning rate; check masks; call ``logger.step()`` for other optimizers.
    Silent: warm-up, the end of a schedule, converged runs.
    Example: optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    It resolves as soon as a weight moves. Rounding does not make all gradients zero.
    """

    kind = "no_learning"
    statistic = "update_ratio"
    explained_by = shared.LOST
    # A thousand such steps move a weight by 0.3 % of its size. At 3e-7 mlp_lr_low is missed;
    # tried 3e-5.
    update_ratio: float = limit(3e-6, "Largest update ratio that counts as no movement.")
    # Chosen manually; tried 15 and 60, which move the alert
    steps: int = limit(30, "Steps from the first on.")
    # triplet_siamese, which has fitted all examples, has 4
    zero_steps: int = limit(shared.LONG, "Consecutive steps whose gradients are all zero.")
    # More micro-batches per step are unusual.
    losses: int = limit(shared.LENGTH, "Losses logged before any optimizer step.")
    full_steps_in_a_row: int = state(shared.SEVERAL)
    _norms: deque[float] = state(deque(maxlen=shared.RECENT))
    _before: float = state(0.0)
    _largest_ratio: float = state(0.0)
    _evaluations: int = state(0)
    _is_measured: bool = state(True)  # full steps measure updates
    _losses: int = state(0)
    _zeros: int = state(0)
    _end: str | None = state(None)  # module behind which no gradient was, at the last full step

    def find_in_loss(self, step: int, loss: float) -> Finding | None:
        if self._norms:
            return None
        self._losses += 1
        if self._losses != self.losses:
            return None
        return Finding(
            summary=f"{self._losses} losses were logged, and no optimizer stepped this model",
            cause="Neither a torch.optim optimizer of its parameters nor logger.step() was called",
            advice=(
                "Call logger.step() after each step of an optimizer that is not PyTorch's",
                "Check that the optimizer has the parameters of this model, not of a copy",
            ),
            value=0.0,
            threshold=self.update_ratio,
            momentary=True,
        )

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self._norms.append(record.total_grad_norm)
        self._before = record.total_grad_norm_before_clipping or self._before
        if record.full:
            self._is_measured = bool(record.update_ratios)
            self._end = _end_of_gradients(record)
        if record.update_ratios:
            self._evaluations += 1
            self._largest_ratio = max(self._largest_ratio, *matrix_ratios(record).values(), 0.0)
        is_zero = record.total_grad_norm == 0 and bool(record.grad_present.any())
        self._zeros = self._zeros + 1 if is_zero else 0
        end = self._end and f"{called(self._end)} gets a gradient and passes none on"
        if self._zeros >= self.zero_steps:
            loss = "" if record.loss is None else f", at a loss of {figure(record.loss, 4)}"
            return Finding(
                summary=f"All gradients have been exactly 0 for {self._zeros} steps{loss}",
                cause=end,
                advice=(
                    "Check masks and weights of the loss, and that it depends on the parameters",
                    "End training if nothing is left to learn",
                ),
                value=self._zeros,
                threshold=self.zero_steps,
                module_name=self._end,
            )
        ratio, steps, now = self._largest_ratio, baseline.age + 1, median_high(self._norms)
        few = self._evaluations < shared.SEVERAL and ratio <= self.update_ratio
        is_late = steps >= self.steps - shared.SEVERAL
        self.needs_full_step = few and is_late and self._is_measured
        self.needs_full_step |= self._zeros == self.zero_steps - shared.FEWEST
        if few or steps < self.steps or ratio > self.update_ratio or record.loss == 0:
            return None
        if not now >= _FADED * baseline.norm.usual or baseline.rate > baseline.lowest_rate:
            return None
        summary, cause, advice = "No parameter gets a gradient", end, _GRADIENT
        if now > 0:
            cause = None
            size = f" by more than {figure(ratio, 1)} of its size" if ratio else ""
            summary, advice = f"No step in {steps} steps moved any weight{size}", _RATE
            if record.learning_rates and not any(record.learning_rates):
                cause = "The learning rate is 0"
        if now < shared.TINY * self._before:
            left, advice = (f"clipping leaves {figure(now, 2)}", _CLIP) if now > 0 else _ZEROED
            cause = f"The gradient norm is {figure(self._before, 2)} after backward(), and {left}"
        return Finding(
            summary=summary,
            cause=cause,
            advice=advice,
            value=ratio,
            threshold=self.update_ratio,
            module_name=self._end if cause == end else None,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return self._largest_ratio <= self.update_ratio


def _end_of_gradients(record: StepRecord) -> str | None:
    """Return the first module whose output gets a gradient, where no parameter gets one."""
    if record.total_grad_norm > 0 or record.total_grad_norm_before_clipping:
        return None
    grads = record.activation_grads
    return next(
        (name for name, size in zip(grads, rms_of(grads.rows), strict=True) if size > 0), None
    )


# Chosen manually.
_FADED = 0.3  # tried 0.15 and 0.6

_GRADIENT: tuple[str, ...] = (
    "Check that the loss depends on the parameters of this model",
    "Check for detach(), no_grad(), item(), another copy of the model",
)
_ZEROED = (
    "0 when the optimizer steps",
    ("Call zero_grad() before backward(), not between backward() and step()",),
)
_CLIP = (
    "Check the limit of the clipping",
    "With a GradScaler, call unscale_() before clipping",
    "Raise the learning rate if the limit is intended",
)
_RATE = (
    "Raise the learning rate, and check its schedule",
    "Check that the optimizer has the parameters that should move",
)


class LossStuck(Detector):
    """Loss that after 200 steps is still that of the first steps, or ln C for C classes, though the
    weights move. Or it is the same at each step though the batches differ. A note, but for ln C.

    Evidence: the loss of the last steps, and its value for a guess.
    Causes: targets of other inputs, strong weight decay, a wrong learning rate, a constant output.
    Remedies: check pairs of inputs and targets; overfit one batch.
    Silent: losses that drift, as those of GANs and reinforcement learning.
    Example: targets = targets[torch.randperm(len(targets))]

    The losses must be noise: both halves have the same mean, and consecutive losses are
    independent. If the size of the weights is exactly the same at two full steps, though steps move
    them, something else writes them back.
    """

    kind = "loss_stuck"
    statistic = "update_ratio"
    severity = "note"
    clear_after = shared.AGAIN
    explained_by = frozenset(
        ["learning_rate_zero", "no_learning", "dead_units", "vanishing_gradient"]
    ).union(["wrong_loss_input", "exponential_trend"])
    after = explained_by
    reduction: float = limit(
        shared.NOISE, "Share by which the loss must have fallen to count as learning."
    )
    steps: int = limit(shared.LENGTH, "Evaluated losses; as many must precede them.")
    _losses: deque[float] = state(deque)
    _given: tuple[float, ...] = state(())
    _varies: bool = state(False)
    _sizes: dict[str, float] = state(dict)
    _is_written_back: bool = state(False)
    _unusual_inputs: str = state("")  # of the last full step
    _since: int = state(0)  # the loss has been what it is since about this step

    def set_up(self) -> None:
        self._losses = deque(maxlen=int(2 * self.steps))

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if record.update_ratios:
            sizes = matrix_sizes(record)
            self._is_written_back, self._sizes = sizes == self._sizes != {}, sizes
        if record.full:
            self._unusual_inputs, _ = unusual_inputs(record)
        if record.fingerprints:
            self._varies = self._given != () and record.fingerprints != self._given
            self._given = record.fingerprints
        if (loss := record.finite_loss) is not None:
            self._losses.append(loss)
        return None if self.still_present(record, baseline) else self._judge(record, baseline)

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        """Whether this step is not evaluated: an evaluation is slow."""
        known = record.finite_loss is not None
        return not known or len(self._losses) < 2 * self.steps or record.step % self.steps > 0

    def may_follow(self, cause: Alert) -> bool:
        """Whether it may: units that die later, or not all of them, do so without a target."""
        is_whole = cause.severity == "error" and cause.step <= self._since + shared.LATEST
        return cause.kind != "dead_units" or is_whole

    def _judge(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        losses, first = np.array(self._losses), baseline.loss.first
        latest, parts = losses[-int(self.steps) :], np.array_split(losses, shared.FEWEST)
        now = float(latest.mean())
        off = [i for i, p in enumerate(parts) if abs(p.mean() - now) > self.reduction * abs(now)]
        stuck = sum(map(len, parts[max(off, default=-1) + 1 :]))
        self._since = round(record.step - stuck * baseline.interval)
        is_constant = latest.std() <= _ROUNDING * abs(now)
        classes, cause = baseline.classes, None
        guess = math.log(classes) if classes > 2 else math.nan
        if self._varies and is_constant and now > _NOTHING * abs(first):
            reference, what = now, "the same at each step though the batches differ"
        elif not (is_constant or _is_noise(latest)) or baseline.step_ratio <= _MOVES:
            return None
        else:
            cause = f"Each step moves the weights by {figure(baseline.step_ratio, 1)} of their norm"
            if self._is_written_back:
                cause += ", and something else writes the old weights back"
            least = min(map(np.median, parts))
            if abs(now - guess) < self.reduction * guess:
                what = f"as high as for a guess among {classes} classes (ln {classes})"
                reference = guess
            elif least > (1 - self.reduction) * first and now < (1 + self.reduction) * first:
                reference, what = first, "as high as in the first steps"
            else:
                return None
        advice: tuple[str, ...] = ()
        if self._unusual_inputs:
            cause, advice = self._unusual_inputs, (shared.STANDARDIZE,)
        return Finding(
            severity="warning" if abs(now - guess) < shared.ROUNDED * guess else None,
            summary=f"The loss of the last {self.steps} steps is {figure(now, 4)}, {what}",
            cause=cause,
            advice=(
                *advice,
                "Check that each target belongs to its input",
                "Check that the output depends on the input",
                "Check the weight decay and the learning rate",
                "Check that nothing writes the weights back, such as a copy or an average",
                "Test that the model overfits a small part of the data in some hundred steps",
            ),
            value=now,
            threshold=(1 - self.reduction) * reference,
        )


def _is_noise(losses: Figures) -> bool:
    """Whether the losses have no trend and are independent of each other."""
    off = losses - losses.mean()
    first, second = np.array_split(off, 2)
    # Four standard errors of the difference of two means.
    trend = abs(first.mean() - second.mean()) > 4 * 2 * losses.std() / len(losses) ** 0.5
    return not trend and float(off[1:] @ off[:-1]) < _CORRELATED * float(off @ off)


_MOVES = 1e-5  # ten thousand such steps move a weight by a tenth; no_learning covers less
_ROUNDING = 1e-5
_NOTHING = 0.05  # of the first loss: left where all examples are fitted; chosen manually
_CORRELATED = 0.3  # three standard errors of the correlation of 100 independent losses


class LearningRateZero(Detector):
    """Steps continue though the learning rate of all groups is 0, or a millionth of the highest.

    Evidence: the rate, its highest value, and the first of these steps.
    Causes: a schedule made for fewer steps, or one made for epochs that advances at each step.
    Remedies: check for how many steps the schedule was made.
    Silent: the first steps of a warm-up, the last ones of a schedule.
    Example: scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # at each step
    """

    kind = "learning_rate_zero"
    statistic = "update_ratio"
    confirm_after = "steps"
    # A million such steps equal one at the peak. Schedules usually end at 0.1 to 0.001 of it.
    fraction: float = limit(1e-6, "Share of the highest learning rate that counts as zero.")
    # A schedule that ends at 0 has one or two such steps.
    steps: int = limit(shared.LATEST, "Consecutive steps at that rate.")
    _highest: float = state(0.0)

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


class UntrainedParameters(Detector):
    """Parameters require a gradient and got none in 90 steps, or they get gradients and no
    optimizer steps them. A note if they are few and unused.

    Evidence: names, grouped by module.
    Causes: ``detach()``, ``no_grad()``, an optimizer that was made before a module was replaced.
    Remedies: pass all parameters to the optimizer, after the model is complete; freeze unused ones.
    Silent: frozen parameters, experts that are selected rarely, optimizers that step rarely.
    Example:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.head = nn.Linear(64, 10)  # the optimizer has the old head

    Gradients that no optimizer uses are a warning. Modules that did not run while similar ones
    learn do not count. Parameters unfrozen later are a note if an optimizer stepped them before.
    """

    kind = "untrained_parameters"
    statistic = "training_state"
    explained_by = frozenset({"vanishing_gradient"})
    share: float = limit(
        shared.PART, "Share of the trainable elements from which missing gradients are a warning."
    )
    # Chosen manually: rare parts have run by then, and it is within 100 steps
    steps: int = limit(90, "Steps until it reports, once.")
    # Full steps; a step of one optimizer of several says too little
    evaluations: int = limit(shared.AGAIN, "Full steps until it reports.")
    full_steps_in_a_row: int = state(shared.AGAIN)
    _steps: int = state(0)
    _evaluations: int = state(0)
    _is_new: bool = state(False)  # a parameter is trainable that was not before
    # trained, reached by a gradient, held by an optimizer, ran: [4, parameters]
    _marks: Marks = state(np.zeros((4, 0), bool))
    _trainable: Marks = state(np.zeros(0, bool))
    _reported: Marks = state(np.zeros(0, bool))
    _trained_before: Marks = state(np.zeros(0, bool))

    def _begin(self, count: int, *, is_new: bool = True) -> None:
        """Start a new observation of ``count`` parameters."""
        self._steps = self._evaluations = 0
        self._marks, self._is_new = np.zeros((4, count), bool), is_new

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        layout, count = record.layout, len(record.layout.parameters)
        if len(self._reported) != count:
            self._begin(count)
            self._trainable = self._reported = self._trained_before = np.zeros(count, bool)
        if len(record.trainable) == count:
            if not self._is_new and (record.trainable & ~self._trainable).any():
                self._begin(count)
            self._evaluations += 1
            ran = table(record).ran[layout.owners]
            self._marks[1:] |= np.array([record.reached, record.held, ran])
            self._trainable = record.trainable
        self._steps += 1
        self._marks[0] |= record.grad_present
        (trained, reached, _, ran), trainable = self._marks, self._trainable
        left, few = trainable & ~trained & ~self._reported, self._evaluations < self.evaluations
        is_late = abs(self._steps - self.steps) < shared.FEWEST
        self.needs_full_step = few and is_late and bool(left.any())
        if few or self._steps < self.steps or record.total_grad_norm == 0:
            return None
        left &= reached | ~self._trained_before
        # Names that differ from a trained one only in numbers.
        kinds = [(_NUMBER.sub(".*", f".{p.name}"), p.shape) for p in layout.parameters]
        known = {*compress(kinds, trained)}
        left &= reached | ran | np.array([kind not in known for kind in kinds], bool)
        found = self._found(layout, left) if left.any() else None
        self._reported, self._trained_before = self._reported | left, self._trained_before | trained
        self._begin(count, is_new=False)
        return found

    def _found(self, layout: Layout, left: Marks) -> Finding:
        (_, reached, held, _), trainable = self._marks, self._trainable
        share = float(layout.sizes[left].sum() / layout.sizes[trainable].sum())
        names = list(_groups(layout, left, trainable))
        comes, steps = bool((left & reached).any()), steps_in_words(self._steps)
        s = "s" if len(names) == 1 else ""
        if self._trained_before[left].all():
            severity: Severity = "note"
            what = f"get{s} gradients, and no optimizer has stepped it for {steps}"
        elif comes:
            severity, what = "warning", f"get{s} gradients, but no optimizer steps it"
        else:
            severity = "warning" if share >= self.share and (left & held).any() else "note"
            what = f"require{s} a gradient, but got none in {steps}"
        return Finding(
            summary=f"{called_all(names, shared.NAMED)} ({share:.1%} of the trainable elements) "
            f"{what}",
            advice=_NOT_STEPPED if comes else _NOT_REACHED,
            value=share,
            threshold=self.share,
            module_name=names[0],
            severity=severity,
            momentary=True,
        )


_FREEZE = "Freeze parameters that should not learn by requires_grad_(False)"
_NOT_STEPPED = (
    "Create the optimizer after the last change of the model, with all parameters, and step it",
    _FREEZE,
)
_NOT_REACHED = (
    "Check for detach() and no_grad() between it and the loss",
    "Check that its output is used",
    _FREEZE,
)
_NUMBER = re.compile(r"\.\d+(?=\.)")


def _groups(layout: Layout, left: Marks, trainable: Marks) -> Iterable[str]:
    """Return the largest modules all of whose trainable parameters are left, in forward order."""
    owners = [parameter.module_name for parameter in layout.parameters]
    learns = {name for owner in compress(owners, trainable & ~left) for name in _within(owner)}
    groups: dict[str, None] = {}
    for index in layout.depth_order[left[layout.depth_order]].tolist():
        path = [name for name in _within(owners[index]) if name not in learns]
        groups.setdefault(path[0] if path else layout.parameters[index].name)
    return groups


def _within(name: str) -> list[str]:
    """Return all modules that contain the module, the largest first, and itself."""
    return ["", *accumulate(name.split("."), "{}.{}".format)] if name else [""]

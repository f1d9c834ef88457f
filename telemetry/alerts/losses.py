"""Losses that jump, diverge, or fall without bound."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline, Logged, LossJump, Rise
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.alerts.exploding import Stretch, grown_gradients
from telemetry.layers.onset import Onset
from telemetry.plain_text import called, called_owner, figure, steps_in_words
from telemetry.records import StepRecord
from telemetry.records.moments import rms_of


class LossSpike(Detector):
    """Losses jump far above the last hundred, because the learning rate jumped, gradients left
    their baseline first, or one batch is bad. A note without a reason, or for a loss around 0.

    Evidence: the step of the jump, the highest loss, the five layers that changed first.
    Causes: a schedule, an optimizer state, a batch with a wrong unit, label or mask.
    Remedies: cap the schedule, clip gradients, check that batch.
    Silent: warm restarts, losses with heavy tails, jumps below 3 % of the first loss.

    A range is the highest minus the lowest of a hundred losses, without the latest. A harder task
    also lets the loss jump: a note, once per hundred steps and ten steps later, as an explosion may
    explain it. So is a jump that stays for 20 steps where half of the progress is lost. A new task
    changes gradients in the same step, broken weights change them before. With tails without a mean
    (Pareto, index 1), one loss exceeds the highest of ``n`` by ``k`` with probability
    ``1 / (k n)``: for a single batch, fewer losses and heavy tails need more ranges. It resolves
    when :class:`Rise` is undone, or at a usual loss while the rate is still high.
    """

    kind = "loss_spike"
    on = "loss"
    clear_after = shared.RECENT
    explained_by = shared.EXPLOSIONS | {
        *("loss_divergence", "dead_units", "saturated_units", "nonfinite", "weight_jump")
    }
    # GANs and PPO stay below 0.3
    distance: float = limit(2.0, "Ranges above the window, where gradients changed first.")
    # A batch with one example of a rare class, weighted 100 times (rare_class_1to200), is 5 above;
    # targets in a wrong unit (target_spike) are 80,000.
    batch_distance: float = limit(100.0, "Ranges above the window, for a single batch.")
    _before: tuple[Logged, ...] = state(())
    _highest_batch: float = state(-math.inf)
    _jumped_at: int = state(-shared.NEVER)
    _noted_at: int = state(-shared.NEVER)
    # A rise that only the inputs explain, unless an explosion is found in the next full steps.
    _unexplained: LossJump | None = state(None)
    _rise: Rise | None = state(None)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        found, jump = self._judge(record, baseline), self._unexplained
        is_due = jump is not None and record.step - jump.first.step >= shared.FEWEST
        if jump is None or not (found or is_due):
            return found
        self._unexplained = None
        return found or self._of_others(jump, record, baseline)

    def _judge(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        loss, is_active = baseline.loss, self.active_alert is not None
        high, before = tuple(loss.high), self._before
        self._before = high
        explained = baseline.has_more_examples if high or loss.losses_lost else False
        self.needs_full_step = explained is None
        if 0 <= max(value for _, value in (*before, *high, loss.latest[-1])) < loss.floor:
            return None
        jumped_at = baseline.rate_jump_step
        is_new = baseline.since_rate_jump <= shared.FEWEST and jumped_at != self._jumped_at
        if is_new and (len(high) >= 2 or loss.is_worse):
            self._jumped_at = jumped_at
            jump = loss.jump_since(jumped_at + 1)
            onsets = baseline.layers.onsets(jump.first.step)
            lost = any(onset.factor == 0 and onset.step <= jumped_at for onset in onsets)
            times = figure(baseline.rate_after_jump / baseline.rate_before_jump)
            self._rise = self._rise if is_active else loss.rise(jump.peak.loss)
            return _found(
                jump,
                baseline,
                cause=f"The learning rate jumped {times}-fold to {baseline.new_rate_in_words} at "
                f"step {jumped_at}" + (_OTHER_LOSS if lost else ""),
                severity="note" if lost else None,
                module_name=next(iter(baseline.jumped), None),
                advice=shared.FIX_RATE,
                escalates=is_active,
            )
        if before and not high:
            return self._of_batch(before, record, baseline)
        if explained is not False:
            return None
        smallest = min([value for _, value in high], default=-math.inf)
        least = loss.window.ranges_above(smallest) * len(loss.window) / shared.LENGTH
        if is_active or len(high) != shared.SEVERAL or least < self.distance:
            return self._for_good(record, baseline)
        since, jump = high[0].step, loss.jump_since(high[0].step)
        batch = since - record.loss_delay
        # Falling gradients belong to a low loss.
        onsets = baseline.layers.onsets(since)
        early = [onset for onset in onsets if onset.step < batch and onset.factor > 1]
        if len(early) >= shared.FEW * len(baseline.layers.names):
            self._rise = loss.rise(jump.peak.loss)
            lowest = min(loss.window.extremes[0], *[value for _, value in loss.latest])
            ago = steps_in_words(batch - early[0].step)
            return _found(
                jump,
                baseline,
                cause=f"Gradients left their baseline {ago} earlier",
                # A loss around 0, as of a policy, need not fall, and rises with new rewards.
                severity="note" if lowest < 0 < loss.window.highest else None,
                advice=(
                    "Clip gradients, or lower the learning rate or Adam's beta2",
                    f"Resume from a checkpoint before step {since}, without the batches around it",
                ),
                batch_steps=range(early[0].step, batch + 1),
            )
        self._wait(jump, record, baseline)
        return None

    def _for_good(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """Return a lasting loss of half of the progress."""
        loss, steps = baseline.loss, (shared.LATEST + shared.RECENT // 2) * baseline.interval
        # With fewer losses, the best is luck.
        is_lost = loss.losses_lost == shared.LATEST and baseline.age > shared.LENGTH
        if self.active_alert is not None or not is_lost:
            return None
        jump = loss.jump_since(round(record.step - steps))
        # A GAN's loss drifts.
        is_jump = loss.median_of(shared.LATEST) > jump.limit
        if is_jump:
            self._wait(jump, record, baseline)
        return None

    def _wait(self, jump: LossJump, record: StepRecord, baseline: Baseline) -> None:
        """Note a rise without a reason later."""
        is_known = record.step - self._noted_at <= shared.LENGTH * baseline.interval
        self._noted_at = record.step
        if baseline.since_rate_jump > shared.FEWEST and not is_known:
            self._unexplained = jump

    def _of_others(self, jump: LossJump, record: StepRecord, baseline: Baseline) -> Finding:
        """Return a rise that only the inputs explain."""
        return _found(
            jump,
            baseline,
            cause="Something else changed: batches, targets, loss or weights",
            advice=(
                "Check inputs and labels from this step on, their order and their unit",
                "Check whether something else than the optimizer wrote to the weights",
                "Ignore it if the task or the loss changed on purpose",
            ),
            severity="note",
            momentary=True,
            batch_steps=[jump.first.step - record.loss_delay],
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        if self._rise is None or record.loss is None:
            return False
        is_undone = self._rise.is_undone(record.loss)
        if baseline.rate >= baseline.rate_after_jump > 0:
            return record.loss > self._rise.usual
        return not is_undone

    def _of_batch(
        self, high: Sequence[Logged], record: StepRecord, baseline: Baseline
    ) -> Finding | None:
        """Return high losses of single batches: the loss is usual again."""
        window, highest = baseline.loss.window, max(loss for _, loss in high)
        above = window.ranges_above(highest)
        if self.active_alert is not None or len(high) > shared.RECENT or not above > 0:
            return None
        _, deviation = window.of_latest(shared.LENGTH)
        deviations = window.range / deviation if deviation else 0.0
        least = max(self.batch_distance * shared.LENGTH / len(window), deviations**2)
        known = max(window.highest, self._highest_batch)
        self._highest_batch = max(self._highest_batch, highest)
        lowest = window.highest - window.range
        if above < least or highest - known < least * (known - lowest):
            return None
        return _found(
            baseline.loss.jump_since(high[0].step),
            baseline,
            cause=f"The batch: the loss was usual again {steps_in_words(len(high))} later",
            advice=(
                "Check that batch: inputs and targets in another unit, a wrong label or mask",
                shared.CLIP,
            ),
            resolved=True,
            batch_steps=[step - record.loss_delay for step, _ in high],
        )


_OTHER_LOSS = ", and layers get no gradient any more, as from another loss"


def _found(jump: LossJump, baseline: Baseline, **more: Any) -> Finding:
    (step, loss), peak = jump.first, jump.peak
    rise = f", and to {figure(peak.loss, 4)} at step {peak.step}" if peak.loss > loss else ""
    first = _in_words(baseline.layers.onsets(step), len(baseline.layers.names))
    origin = _origin(step, baseline) if more.get("module_name") is None else None
    if origin is not None:
        more |= {"module_name": origin.first, "cause": origin.growth}
    return Finding(
        summary=f"The loss jumped from {figure(jump.before, 4)} to {figure(loss, 4)} at step "
        f"{step}{rise}{first}",
        value=peak.loss,
        threshold=baseline.loss.window.highest,
        started_at=step,
        **more,
    )


def _origin(step: int, baseline: Baseline) -> Stretch | None:
    """Return the layer whose gradient shows that its weights or its gradients jumped first."""
    is_known = not baseline.follows_rate_jump and step in baseline.layers.steps
    grown = grown_gradients(baseline.layers, step) if is_known else None
    return grown.origin if grown is not None and grown.is_sure else None


def _in_words(onsets: Sequence[Onset], count: int) -> str:
    """Return the first layers that left their baseline, to end a sentence."""
    first = [onset for onset in onsets if onset.step == onsets[0].step]
    if len(first) > max(shared.FEW * count, shared.NAMED):
        some = f"All {count}" if len(first) == count else f"{len(first)} of {count}"
        return f". {some} layers left their baseline at step {first[0].step}"
    named = [
        f"{called_owner(o.name)} ({_ratio(o.factor)} at step {o.step})"
        for o in onsets[: shared.NAMED]
    ]
    return f". First layers out of their usual range: {', '.join(named)}" if named else ""


def _ratio(factor: float) -> str:
    if not factor < 1:
        return f"{figure(factor)}x above usual"
    return f"{figure(1 / factor)}x below usual" if factor else "no gradient"


class UnboundedLoss(Detector):
    """Loss below zero falls because the outputs become larger. It begins at -ln C for C classes, or
    keeps falling while the last layer's output becomes 20 times as large.

    Evidence: the loss, and the growth of the output.
    Causes: a wrong sign, ``nll_loss`` without ``log_softmax``.
    Remedies: check the sign of each term.
    Silent: densities, rewards and critics, which settle.
    Example: loss = nn.functional.nll_loss(logits, targets)

    A loss of -ln C, a guess with the wrong sign, must have fallen by a tenth. Or the second half of
    the run falls no slower than the first, while the output is above 10 and grows.
    """

    kind = "unbounded_loss"
    statistic = "activation_rms"
    on = "loss"
    clear_after = shared.NEVER
    explained_by = shared.DIVERGED | {"nonfinite"}
    # wgan_gradient_penalty, whose outputs settle, has 8
    growth: float = limit(20.0, "Growth of the last layer's output.")
    # step, size of the outputs, loss
    _points: deque[tuple[int, float, float]] = state(deque(maxlen=shared.LENGTH))

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        first, recent = baseline.loss.first, baseline.loss.recent
        measured = record.full and len(record.activations) > 0
        if measured:
            output = float(rms_of(record.activations.rows)[-1])
            if math.isfinite(output + recent) and output > 0:
                self._points.append((record.step, output, recent))
        is_low = not measured and recent < 0 and recent < first
        self.needs_full_step = is_low and self._needs_points(baseline.age)
        classes = baseline.classes
        guess = -math.log(classes) if classes > 2 else math.nan
        if abs(first - guess) < _NEAR_GUESS * -guess and recent < (1 + shared.FEW) * min(
            first, guess
        ):
            return self._found(
                recent, guess, f"started near -ln {classes} = {figure(guess, 4)} and falls"
            )
        if not recent < 0 or not measured or len(self._points) < shared.RECENT:
            return None
        steps, sizes, losses = np.array(self._points).T
        middle = (steps[0] + steps[-1]) / 2
        size, loss = np.interp(middle, steps, sizes), np.interp(middle, steps, losses)
        grows = sizes[-1] > max(self.growth * sizes[0], shared.HALF_MORE * size, shared.LARGE_INPUT)
        falls = losses[0] > loss and loss - losses[-1] >= shared.MOST * (losses[0] - loss)
        # Between full steps it may have risen again.
        best = baseline.loss.best
        falls &= recent <= best + shared.FEW * (first - best)
        if not grows or not falls or steps[-1] - steps[0] < shared.LONG:
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
        if len(self._points) > shared.RECENT or age < shared.LONG // 2 - shared.SOON:
            return False
        sizes = [size for _, size, _ in self._points]
        return len(sizes) < 2 or sizes[-1] > shared.HALF_MORE * sizes[0]

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


_NEAR_GUESS = 0.15  # of ln C: large first weights guess worse than all alike


class LossDivergence(Detector):
    """Steps move the weights by too large a share of their norm. The loss stays far above its past
    or loses half of its progress. Or gradients are never zeroed and add up.

    Evidence: the learning rate, and the value before it rose.
    Causes: a learning rate that is too large; inputs that are not standardized; a missing
        ``optimizer.zero_grad()``.
    Remedies: divide the learning rate by 3 to 10, warm it up; zero gradients in every step.
    Silent: a harder task, an annealed term, gradients that jumped first.
    Example: optimizer = torch.optim.SGD(model.parameters(), lr=100.0)

    Healthy update ratios are 0.001 to 0.01, and larger in the first steps while the loss falls. The
    losses must rise within 20 steps of a large one.
    """

    kind = "loss_divergence"
    statistic = "update_ratio"
    clear_after = shared.FEWEST
    explained_by = shared.EXPLOSIONS | {"loss_spike", "dead_units", "saturated_units", "nonfinite"}
    after = frozenset({"loss_spike"})
    update_ratio: float = limit(
        shared.LARGE_STEP, "Share of its norm by which a step moves the median weight matrix."
    )
    # At 6 mlp_lr_high, cnn_lr30 and mlp_adam_lr_high are missed; tried 1
    losses: int = limit(shared.SEVERAL, "Consecutive losses far above those before.")
    _ratio: float = state(0.0)
    _large_at: int = state(-shared.NEVER)
    _unzeroed_steps: int = state(0)  # full steps in a row at which gradients were added to others
    _norms: tuple[float, ...] = state(())  # of the first steps
    _may_add_up: bool = state(False)  # as those norms grow, which the next full step explains
    _rise: Rise | None = state(None)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self._look_for_sums(record)
        ratio = baseline.step_ratio if record.update_ratios else baseline.ratio_now
        if ratio >= self.update_ratio:
            self._large_at, self._ratio = record.step, ratio
        loss = baseline.loss
        rises = loss.high or loss.losses_lost == shared.RECENT
        follows_jump = baseline.since_rate_jump <= shared.SOON
        is_candidate = follows_jump or bool(rises and not record.full)
        self.needs_full_step = is_candidate and self.active_alert is None
        self.needs_full_step |= self._may_add_up or self._unzeroed_steps == 1
        self.full_steps_in_a_row = shared.SEVERAL if follows_jump else 1
        if self._unzeroed_steps >= shared.AGAIN:
            norm, active = record.total_grad_norm, self.active_alert
            return Finding(
                summary=f"Gradients add up from step to step: their norm is {figure(norm)}",
                cause=_NEVER_ZEROED,
                advice=(
                    "Call optimizer.zero_grad() in every step, before backward()",
                    "To accumulate gradients, step once for all of them, and zero them then",
                ),
                value=norm,
                # The learning rate was blamed before.
                escalates=active is not None and active.cause != _NEVER_ZEROED,
            )
        now = record.finite_loss
        if self.active_alert is not None or now is None:
            return None
        is_new = baseline.age < shared.RECENT and loss.excess > shared.JUMP
        enough = loss.as_rare_as(self.losses) - (is_new or baseline.follows_rate_jump)
        # With fewer than a hundred steps, the best loss may be luck.
        lost = loss.losses_lost >= shared.RECENT and baseline.age > shared.LENGTH
        is_high = len(loss.high) >= enough or lost
        if not is_high or record.step - self._large_at > shared.LATEST or baseline.gradients_led:
            return None
        if (explained := baseline.has_more_examples) is not False:
            self.needs_full_step |= explained is None
            return None
        self._rise = loss.rise(loss.window.usual)
        rate, lowest = baseline.rate, baseline.risen_from
        cause = f"The learning rate is {figure(rate)}" if rate > 0 else None
        if 0 < lowest * shared.JUMP <= rate:
            cause = f"The learning rate rose from {figure(lowest)} to {figure(rate)}"
        moved = f"{self._ratio:.0%} of" if self._ratio < 10 else f"{figure(self._ratio, 2)}x"
        name, too_large = baseline.large_start
        inputs = baseline.large_inputs
        return Finding(
            summary=f"The loss rose to {figure(now, 4)}, and one optimizer step moves the "
            f"weights by {moved} their norm",
            cause=too_large or inputs or cause,
            advice=_INITIALIZE if name else (shared.STANDARDIZE, *_LOWER) if inputs else _LOWER,
            value=self._ratio,
            threshold=self.update_ratio,
            module_name=name or None,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        if (loss := record.finite_loss) is None:
            return True
        return self._rise is not None and not self._rise.is_undone(loss)

    def _look_for_sums(self, record: StepRecord) -> None:
        """Note whether gradients are added to those of the step before, which are not zeroed."""
        if len(self._norms) <= _RISING:  # sums grow at each of the first steps
            self._norms = (*self._norms, record.total_grad_norm)
            rises = len(self._norms) > _RISING and bool(np.all(np.diff(self._norms) > 0))
            self._may_add_up = rises and self._norms[-1] > _SUMMED * self._norms[0]
        if record.full:
            added = record.not_zeroed
            if added.size:
                added = added[record.held & record.grad_present]
            is_sum = added.size > 0 and bool(added.mean() > shared.HALF)
            self._unzeroed_steps = self._unzeroed_steps + 1 if is_sum else 0
            self._may_add_up = False


# Five random norms rise at each step once in 120 times: that costs a full step, no alert.
_RISING = 4  # consecutive steps with a larger norm than the one before
_SUMMED = 2.0  # times the first norm; five independent gradients add up to 2.2
_NEVER_ZEROED = "They are not zeroed between these steps"
_LOWER = ("Divide the learning rate by 3 to 10", "Warm it up")
_INITIALIZE = (
    "Make these weights smaller: PyTorch's defaults start at 0.4x He initialization",
    *_LOWER,
)

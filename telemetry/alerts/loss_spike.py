"""Losses that jump far above the hundred before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from telemetry.alerts.baseline import FEW, NEVER, Baseline
from telemetry.alerts.detector import EXPLOSIONS, RATE_ADVICE, Detector, Finding
from telemetry.alerts.window import FEWEST, LATEST, LENGTH, RECENT, Logged, LossJump, Rise
from telemetry.layers.onset import Onset
from telemetry.plain_text import called, figure, steps_in_words
from telemetry.records import StepRecord


class LossSpike(Detector):
    """Losses jump far above the last hundred, because the learning rate jumped, gradients left
    their baseline first, or one batch is bad. A note without a reason.

    Evidence: the step of the jump, the highest loss, the five layers that changed first.
    Causes: a schedule, an optimizer state, a batch with a wrong unit, label or mask.
    Remedies: cap the schedule, clip gradients, check that batch.
    Silent: warm restarts, losses with heavy tails, jumps below 3 % of the first loss.
    Args:
        distance: Ranges above the window, where gradients changed first.
        batch_distance: Ranges above the window, for a single batch.

    A range is the highest minus the lowest of a hundred losses, without the latest. A harder task
    also lets the loss jump: a note, once per hundred steps, as is a jump that stays for 20 steps
    where half of the progress is lost. Reasons of a warning:

    - The learning rate is three times the highest that the run survived, and two losses are far
      above the window, or the last five are worse (the range is wide after a fast fall).
    - Gradients changed before the loss, and three consecutive losses are ``distance`` above. A new
      task changes both in one step, broken weights change gradients first.
    - One to five losses are ``batch_distance`` above, and the next is usual. With tails without a
      mean (Pareto, index 1), one loss exceeds the highest of ``n`` by ``k`` with probability
      ``1 / (k n)``: fewer losses, and heavy tails, need more ranges.

    It resolves when :class:`Rise` is undone, or at a usual loss while the rate is still high.
    """

    kind = "loss_spike"
    on = "loss"
    clear_after = RECENT
    explained_by = EXPLOSIONS | {"loss_divergence", "dead_units", "saturated_units", "nonfinite"}
    distance = 2.0  # GANs and PPO stay below 0.3
    # A batch with one example of a rare class, weighted 100 times (rare_class_1to200), is 5 above;
    # targets in a wrong unit (target_spike) are 80,000.
    batch_distance = 100.0
    _before: tuple[Logged, ...] = ()
    _highest_batch: float = -math.inf
    _jumped_at: int = -NEVER
    _noted_at: int = -NEVER
    _rise: Rise | None = None

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        high, before = tuple(baseline.loss.high), self._before
        self._before = high
        if baseline.loss.is_floor(
            max(loss for _, loss in (*before, *high, baseline.loss.latest[-1]))
        ):
            return None
        jumped_at = record.step - baseline.since_rate_jump
        is_new = baseline.since_rate_jump <= FEWEST and jumped_at != self._jumped_at
        if is_new and (len(high) >= 2 or baseline.loss.is_worse):
            self._jumped_at = jumped_at
            jump = baseline.loss.jump_since(jumped_at + 1)
            times = figure(baseline.rate_after_jump / baseline.rate_before_jump)
            if self.active_alert is None:
                self._rise = _rise(jump, baseline)
            return _found(
                jump,
                baseline,
                cause=f"The learning rate jumped {times}-fold to {baseline.new_rate_in_words} at "
                f"step {jumped_at}",
                module_name=baseline.jumped[0] if baseline.jumped else None,
                advice=RATE_ADVICE,
                escalates=self.active_alert is not None,
            )
        if not high:
            return (
                self._of_batch(before, record, baseline)
                if before
                else self._for_good(record, baseline)
            )
        window = baseline.loss.window
        least = min(window.ranges_above(loss) for _, loss in high) * len(window) / LENGTH
        if self.active_alert is not None or len(high) != _IN_A_ROW or least < self.distance:
            return self._for_good(record, baseline)
        since = high[0].step
        jump = baseline.loss.jump_since(since)
        # Falling gradients belong to a low loss.
        onsets = baseline.layers.onsets(since)
        early = [onset for onset in onsets if onset.step < since and onset.factor > 1]
        if len(early) >= FEW * len(baseline.layers.names):
            self._rise = _rise(jump, baseline)
            ago = steps_in_words(since - early[0].step)
            return _found(
                jump,
                baseline,
                cause=f"Gradients left their baseline {ago} earlier",
                advice=(
                    "Clip gradients, or lower the learning rate or Adam's beta2",
                    f"Resume from a checkpoint before step {since}, without the batches around it",
                ),
                batch_steps=range(early[0].step, since + 1),
            )
        return self._of_others(jump, record, baseline)

    def _for_good(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """Return a lasting loss of half of the progress."""
        # With fewer losses, the best is luck.
        is_lost = baseline.loss.losses_lost == LATEST and baseline.age > LENGTH
        if self.active_alert is not None or not is_lost:
            return None
        jump = baseline.loss.jump_since(
            round(record.step - (LATEST + RECENT // 2) * baseline.interval)
        )
        if not baseline.loss.median_of(LATEST) > jump.limit:  # it drifts, as a GAN's
            return None
        return self._of_others(jump, record, baseline)

    def _of_others(self, jump: LossJump, record: StepRecord, baseline: Baseline) -> Finding | None:
        """Return a rise that only the inputs explain."""
        is_known = record.step - self._noted_at <= LENGTH * baseline.interval
        self._noted_at = record.step
        if baseline.since_rate_jump <= FEWEST or is_known:
            return None
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
        loss = record.loss
        if self._rise is None or loss is None:
            return False
        is_undone = self._rise.is_undone(loss)
        return (
            loss > self._rise.usual
            if baseline.rate >= baseline.rate_after_jump > 0
            else not is_undone
        )

    def _of_batch(
        self, high: Sequence[Logged], record: StepRecord, baseline: Baseline
    ) -> Finding | None:
        """Return high losses of single batches: the loss is usual again."""
        window, highest = baseline.loss.window, max(loss for _, loss in high)
        if (
            self.active_alert is not None
            or len(high) > RECENT
            or not window.ranges_above(highest) > 0
        ):
            return None
        _, deviation = window.of_latest(LENGTH)
        deviations = window.range / deviation if deviation else 0.0
        least = max(self.batch_distance * LENGTH / len(window), deviations**2)
        known = max(window.highest, self._highest_batch)
        self._highest_batch = max(self._highest_batch, highest)
        lowest = window.highest - window.range
        if window.ranges_above(highest) < least or highest - known < least * (known - lowest):
            return None
        return _found(
            baseline.loss.jump_since(high[0].step),
            baseline,
            cause=f"The batch: the loss was usual again {steps_in_words(len(high))} later",
            advice=(
                "Check that batch: inputs and targets in another unit, a wrong label or mask",
                "Clip gradients (clip_grad_norm_)",
            ),
            resolved=True,
            batch_steps=[step - record.loss_delay for step, _ in high],
        )


_IN_A_ROW = 3  # losses
_NAMED = 5  # layers


class LossBurst(Detector):
    """Losses of 3 to 20 steps in a row were far above the hundred before, and then as before.

    Evidence: the steps, and the highest loss.
    Causes: a broken shard, a batch of another task, other masks.
    Remedies: check the data of these steps.
    Silent: single hard batches, and the third time and later.
    Args:
        losses: Consecutive high losses, at least; at most 20.

    The loss jumps up and back at once, by half of the range of the hundred before: the weights are
    not the cause. It is reported after ten losses below three quarters of that range.
    """

    kind = "loss_burst"
    on = "loss"
    severity = "note"
    explained_by = EXPLOSIONS | {"loss_divergence", "loss_spike", "nonfinite"}
    losses = 3  # three consecutive ones above a hundred independent losses are one in 200,000
    _before: float = math.nan
    _high: tuple[Logged, ...] = ()  # of consecutive bursts
    _latest: tuple[Logged, ...] = ()
    _longest: int = 0
    _normal: int = 0
    _bursts: int = 0

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        high, loss, window = tuple(baseline.loss.high), record.loss or 0.0, baseline.loss.window
        if high:
            self._latest, self._normal = high, 0
            return None
        self._normal += 1
        if (latest := self._latest) and self._normal == 1:
            jump = min(latest[0].loss - self._before, latest[-1].loss - loss)
            is_abrupt = len(window) == LENGTH and jump >= window.range / 2
            if is_abrupt and len(latest) <= LATEST:
                self._high += latest
                self._longest = max(self._longest, len(latest))
            self._latest = ()
        self._before = loss
        if self._normal != FEWEST or not self._high:
            return None
        first, last = self._high[0].step, self._high[-1].step
        steps = [step - record.loss_delay for step, _ in self._high]
        highest, self._high = max(loss for _, loss in self._high), ()
        longest, self._longest = self._longest, 0
        usual = sorted(window.values)[3 * len(window) // 4]
        is_over = baseline.loss.median_of(FEWEST) <= usual and not baseline.loss.is_floor(highest)
        if longest < self.losses or not is_over:
            return None
        self._bursts += 1
        if self._bursts > _REPORTED or baseline.since_rate_jump < record.step - first + FEWEST:
            return None
        return Finding(
            summary=f"The loss was up to {figure(highest, 4)} from step {first} to {last}, and at "
            f"most {figure(window.highest, 4)} in the hundred steps before",
            cause="Other batches, targets or another loss: the loss is usual again",
            advice=("Check these batches: a broken file, shuffled labels, another task",),
            value=highest,
            threshold=window.highest,
            started_at=first,
            momentary=True,
            batch_steps=steps,
        )


_REPORTED = 2  # bursts; more are usual for the data


def _rise(jump: LossJump, baseline: Baseline) -> Rise:
    return Rise(first=baseline.loss.first, usual=baseline.loss.window.usual, peak=jump.peak.loss)


def _found(jump: LossJump, baseline: Baseline, **more: Any) -> Finding:
    (step, loss), peak = jump.first, jump.peak
    rise = f", and to {figure(peak.loss, 4)} at step {peak.step}" if peak.loss > loss else ""
    first = _in_words(baseline.layers.onsets(step), len(baseline.layers.names))
    return Finding(
        summary=f"The loss jumped from {figure(jump.before, 4)} to {figure(loss, 4)} at step "
        f"{step}{rise}{first}",
        value=peak.loss,
        threshold=baseline.loss.window.highest,
        started_at=step,
        **more,
    )


def _in_words(onsets: Sequence[Onset], count: int) -> str:
    """Return the first five layers that left their baseline, to end a sentence."""
    if not onsets:
        return ""
    first = [onset for onset in onsets if onset.step == onsets[0].step]
    if len(first) > FEW * count and len(first) > _NAMED:
        some = f"All {count}" if len(first) == count else f"{len(first)} of {count}"
        return f". {some} layers left their baseline at step {first[0].step}"
    named = ", ".join(
        f"{called(onset.name)} ({_ratio(onset.factor)} at step {onset.step})"
        for onset in onsets[:_NAMED]
    )
    return f". First layers out of their usual range: {named}"


def _ratio(factor: float) -> str:
    if factor == 0:
        return "no gradient"
    if not factor < 1:
        return f"{figure(factor)}x above usual"
    return f"{figure(1 / factor)}x below usual"

"""A loss that jumps far above its past."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from telemetry.alerts.baseline import (
    FEW,
    FEWEST,
    LATEST,
    LENGTH,
    NEVER,
    RECENT,
    Baseline,
    Jump,
    Logged,
    Rise,
)
from telemetry.alerts.detector import EXPLOSIONS, Detector, Finding
from telemetry.layers.onset import Onset
from telemetry.plain_text import called, steps_in_words
from telemetry.records import StepRecord


class LossSpike(Detector):
    """Alerts when the loss of some steps lies far above all of the hundred before, for a reason.

    How far a loss lies above its past is counted in ranges: highest minus lowest of a hundred
    losses, the latest ones left out. A jump alone is no fault: a harder task, other data or another
    weight of a term do the same, so it gives a note, one in a hundred steps. A loss that jumps and
    stays for 20 steps where half of what was learned is lost gives one, too, however wide its range
    was. What remains below 3 % of the first loss is no spike. A warning takes one of three
    reasons:

    - The learning rate has just jumped to three times all that the run has survived, and two losses
      are far above the past, or the last five are worse than that (a range is wide where the loss
      was falling fast). A warm restart returns to a rate that it has survived.
    - Gradients rose out of their past before the loss did, and three losses in a row are
      ``distance`` ranges above. Where the task or the data change, gradients change in the same
      step as the loss, because both are of the same batch; if the weights went wrong, gradients
      went first.
    - One to five losses are ``batch_distance`` ranges above a hundred losses, and the next one is
      back: the batch. Where tails are so heavy that there is no mean (Pareto, index 1), one loss
      exceeds the highest of ``n`` by ``k`` times with a probability of ``1 / (k n)``: above fewer
      losses it must be more ranges. And if the past has such tails, as many as the square of the
      deviations that its range has (about 5 if it is normal).

    A further jump of the rate makes it worse. It is over when :class:`Rise` is undone; while the
    learning rate is still what made the loss jump, when the loss is what it usually was.
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
            jump = baseline.loss.jump(jumped_at + 1)
            times = baseline.rate_after_jump / baseline.rate_before_jump
            reason = f"after the learning rate had jumped {times:.3g}-fold to "
            if self.active_alert is None:
                self._rise = _rise(jump, baseline)
            return _found(
                jump,
                baseline,
                reason=f"{reason}{baseline.jump}",
                module_name=baseline.jumped[0] if baseline.jumped else None,
                advice=(
                    "Limit what the schedule can return, lower the learning rate or warm it up, "
                    "and go on from a checkpoint before the spike.",
                ),
                escalates=self.active_alert is not None,
            )
        if not high:
            return self._of_batch(before, baseline) if before else self._for_good(record, baseline)
        past = baseline.loss.past
        least = min(past.ranges_above(loss) for _, loss in high) * len(past) / LENGTH
        if self.active_alert is not None or len(high) != _IN_A_ROW or least < self.distance:
            return self._for_good(record, baseline)
        since = high[0].step
        jump = baseline.loss.jump(since)
        # Gradients that fall are those of a low loss.
        onsets = baseline.layers.onsets(since)
        early = [onset for onset in onsets if onset.step < since and onset.factor > 1]
        if len(early) >= FEW * len(baseline.layers.names):
            self._rise = _rise(jump, baseline)
            ago = steps_in_words(since - early[0].step)
            return _found(
                jump,
                baseline,
                reason=f"and gradients had left their past {ago} before",
                advice=(
                    "People usually clip gradients, lower the learning rate or Adam's beta2, "
                    "and go on from a checkpoint before the spike without the batches around it.",
                ),
            )
        return self._of_others(jump, record, baseline)

    def _for_good(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """The loss has lost half of what was learned, for as many steps as make a past."""
        # The best of fewer losses is luck.
        is_lost = baseline.loss.losses_lost == LATEST and baseline.age > LENGTH
        if self.active_alert is not None or not is_lost:
            return None
        jump = baseline.loss.jump(record.step - LATEST - RECENT // 2)
        if not baseline.loss.median_of(LATEST) > jump.limit:  # it wanders, as a GAN's
            return None
        return self._of_others(jump, record, baseline)

    def _of_others(self, jump: Jump, record: StepRecord, baseline: Baseline) -> Finding | None:
        """A rise that nothing explains but what the model is given."""
        is_known, self._noted_at = record.step - self._noted_at <= LENGTH, record.step
        if baseline.since_rate_jump <= FEWEST or is_known:
            return None
        return _found(
            jump,
            baseline,
            reason="though neither the learning rate nor gradients had grown before: "
            "the batches, their targets, the loss or the weights are others",
            advice=(
                "Check inputs and labels from this step on, their order and their unit",
                "Check whether something else than the optimizer wrote to the weights",
                "Ignore it if the task or the loss changed on purpose",
            ),
            severity="note",
            momentary=True,
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

    def _of_batch(self, high: Sequence[Logged], baseline: Baseline) -> Finding | None:
        """The loss is usual again: high ones before it were those of single batches."""
        past, highest = baseline.loss.past, max(loss for _, loss in high)
        if (
            self.active_alert is not None
            or len(high) > RECENT
            or not past.ranges_above(highest) > 0
        ):
            return None
        _, deviation = past.of_latest(LENGTH)
        deviations = past.range / deviation if deviation else 0.0
        least = max(self.batch_distance * LENGTH / len(past), deviations**2)
        known = max(past.highest, self._highest_batch)
        self._highest_batch = max(self._highest_batch, highest)
        lowest = past.highest - past.range
        if past.ranges_above(highest) < least or highest - known < least * (known - lowest):
            return None
        return _found(
            baseline.loss.jump(high[0].step),
            baseline,
            reason=f"and was back {steps_in_words(len(high))} later: it was the batch",
            advice=(
                "Look at that batch: inputs and targets in another unit, a wrong label or mask. "
                "People usually clip gradients so that one batch cannot do harm.",
            ),
            resolved=True,
        )


_IN_A_ROW = 3  # losses

_NAMED = 5


class LossBurst(Detector):
    """A note when the loss of some steps in a row was far above all before, and then as before.

    It jumps up at once and comes back at once, by half of the range of the hundred losses before;
    so it was not the weights, but other data, targets or masks: a broken shard, a batch of another
    task. It is over after ten losses that are no higher than three quarters of those before it.
    Single hard batches are none, nor is what comes again and again: the third is not told.

    Args:
        losses: Number of high losses in a row, at least; at most 20.
    """

    kind = "loss_burst"
    on = "loss"
    severity = "note"
    explained_by = EXPLOSIONS | {"loss_divergence", "loss_spike", "nonfinite"}
    losses = 3  # of independent losses, three in a row above a hundred are one in 200,000
    _before: float = math.nan
    _high: tuple[Logged, ...] = ()  # of bursts that follow each other
    _latest: tuple[Logged, ...] = ()
    _longest: int = 0
    _normal: int = 0
    _bursts: int = 0

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        high, loss, past = tuple(baseline.loss.high), record.loss or 0.0, baseline.loss.past
        if high:
            self._latest, self._normal = high, 0
            return None
        self._normal += 1
        if (latest := self._latest) and self._normal == 1:
            jump = min(latest[0].loss - self._before, latest[-1].loss - loss)
            is_abrupt = len(past) == LENGTH and jump >= past.range / 2
            if is_abrupt and len(latest) <= LATEST:
                self._high += latest
                self._longest = max(self._longest, len(latest))
            self._latest = ()
        self._before = loss
        if self._normal != FEWEST or not self._high:
            return None
        first, last = self._high[0].step, self._high[-1].step
        highest, self._high = max(loss for _, loss in self._high), ()
        longest, self._longest = self._longest, 0
        usual = sorted(past.values)[3 * len(past) // 4]
        is_over = baseline.loss.median_of(FEWEST) <= usual and not baseline.loss.is_floor(highest)
        if longest < self.losses or not is_over:
            return None
        self._bursts += 1
        if self._bursts > _TOLD or baseline.since_rate_jump < record.step - first + FEWEST:
            return None
        return Finding(
            summary=f"The loss was up to {highest:.4g} from step {first} to {last}, at most "
            f"{past.highest:.4g} in a hundred steps before, and is as before since: other batches, "
            "other targets or another loss",
            advice=(
                "Look at what these batches were made of: a broken file, labels in another "
                "order, an augmentation, another task.",
            ),
            value=highest,
            threshold=past.highest,
            started_at=first,
            momentary=True,
        )


_TOLD = 2  # bursts; more are how the data are


def _rise(jump: Jump, baseline: Baseline) -> Rise:
    return Rise(first=baseline.loss.first, usual=baseline.loss.past.usual, peak=jump.peak.loss)


def _found(
    jump: Jump, baseline: Baseline, *, reason: str, advice: tuple[str, ...], **more: Any
) -> Finding:
    (step, loss), peak = jump.first, jump.peak
    rise = f", and to {peak.loss:.4g} at step {peak.step}" if peak.loss > loss else ""
    return Finding(
        summary=f"The loss, {jump.before:.4g} before, jumped to {loss:.4g} at step {step}{rise}, "
        f"{reason}{_in_words(baseline.layers.onsets(step), len(baseline.layers.names))}",
        advice=advice,
        value=peak.loss,
        threshold=baseline.loss.past.highest,
        started_at=step,
        **more,
    )


def _in_words(onsets: Sequence[Onset], count: int) -> str:
    """For a message: at most five layers; nothing if there are none."""
    if not onsets:
        return ""
    first = [onset for onset in onsets if onset.step == onsets[0].step]
    if len(first) > FEW * count and len(first) > _NAMED:
        return f". {len(first)} of {count} layers moved first, together at step {first[0].step}"
    named = ", ".join(
        f"{called(onset.name)} ({onset.factor:.3g} times at step {onset.step})"
        for onset in onsets[:_NAMED]
    )
    return f". First to move: {named}"

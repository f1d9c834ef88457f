"""Activations and gradients that explode: over the depth of the network, and over time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from operator import attrgetter
from statistics import median_high

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.alerts.growth import (
    Blame,
    Stretch,
    backward_growth,
    confined_growth,
    forward_growth,
    gain,
)
from telemetry.plain_text import called, figure
from telemetry.records import Output, StepRecord
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of


class ExplodingActivation(Detector):
    """Outputs of a module vary 100 times more than ever before, and the loss has risen. Or
    activations multiply through the network from the first step on.

    Evidence: the module, its variation, and the largest RMS before.
    Causes: weights that grew, a missing normalization, a learning rate that is too large.
    Remedies: lower the learning rate or warm it up, clip gradients, add normalization.
    Silent: a falling loss, outputs that are the same for every input.
    """

    kind = "exploding_activation"
    statistic = "activation_rms"
    on = "full"
    confirm_after = 2
    clear_after = 3  # chosen manually: one more than start it
    explained_by = shared.RISEN_LOSSES | {"exploding_gradient", "saturated_units", "dead_units"}
    after = explained_by
    explained_by_rate_jump = True
    # chosen manually; tried 10 and 1000
    factor: float = limit(
        100.0, "Multiple of the largest RMS before, at two consecutive full steps."
    )
    depth_factor: float = limit(
        shared.DEPTH, "Growth through the network, at the first two full steps."
    )
    _highest: dict[Output, float] = state(dict)
    _began_deep: bool = state(True)  # at all full steps up to now

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        grown = list[tuple[str, float]]()
        sizes = figures_of(record.outputs, rms_of)
        for output, now in figures_of(record.outputs, attrgetter("variation")).items():
            highest = self._highest.get(output, 0.0)
            if highest and now > self.factor * highest and baseline.loss.is_worse:
                grown.append((output.module_name, now / highest))
            elif highest < sizes[output] < math.inf:
                self._highest[output] = sizes[output]
        self._began_deep &= self._is_deep(record)
        # After non-finite gradients there is no second evaluation.
        certain = not record.all_grads_finite
        if grown:
            name, times = grown[0]
            return Finding(
                summary=f"The output of {called(name)} is {figure(times, 2)}x as large as ever "
                "before",
                advice=(shared.WARM_UP, "Clip gradients", "Add normalization"),
                value=times,
                threshold=self.factor,
                module_name=name,
                confirmed=certain,
            )
        if not self._began_deep:
            return None
        growth = forward_growth(record)
        where, times = _began_large(baseline) or growth.stretch, 10**growth.decades
        assert where is not None
        return Finding(
            summary=f"Activations grow {figure(times, 2)}-fold through the network",
            cause=where.growth,
            advice=(_INITIALIZE, "Scale the inputs", "Add normalization"),
            value=times,
            threshold=self.depth_factor,
            module_name=where.first,
            confirmed=certain,
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return self._began_deep or not record.all_grads_finite

    def _is_deep(self, record: StepRecord) -> bool:
        return forward_growth(record).decades > math.log10(self.depth_factor)


class ExplodingGradient(Detector):
    """Gradients have a total norm far above the highest of the last 100 steps. Or they grow with
    the activations from layer to layer in the first steps.

    Evidence: the norm and its baseline; the layer with most of the growth, its range, or the batch.
    Causes: a learning rate that is too large, a bad batch, large initial weights, no clipping.
    Remedies: clip gradients, lower or warm up the learning rate, normalize, use He initialization.
    Silent: heavy-tailed data, warm restarts, a jump of the learning rate, a new weight of the loss.

    *Over time* it takes ``factor`` at three consecutive steps, or tenfold that at one; or fivefold
    the maximum, then a step of a fifth of the weights' norm and a loss above all before; or
    ``lasting_factor`` at ten more steps than not, and a risen loss. Growth that comes from the loss
    does not count: the first full step shows how much the gradient of the output grew.

    *Over depth*, either growth alone is common: each must have a third of the decades, at the first
    full step and one more, or be thirty times larger at one. Later, where clipping hides the norm,
    both must have grown tenfold and the loss must have risen.
    """

    kind = "exploding_gradient"
    severity = "error"
    clear_after = 50
    explained_by = shared.RISEN_LOSSES | {"exploding_activation", "saturated_units"}
    after = shared.RISEN_LOSSES | {"saturated_units"}
    explained_by_rate_jump = True
    # Healthy runs stay within 10; tried 100 and 10,000
    factor: float = limit(1000.0, "Multiple of the highest past norm.")
    lasting_factor: float = limit(
        shared.THIRTYFOLD, "Multiple of the norm 20 steps before, if it stays."
    )
    depth_factor: float = limit(shared.DEPTH, "Growth through the network, forward times backward.")
    _depths: deque[float] = state(deque(maxlen=50))
    _gains: deque[float] = state(deque(maxlen=10))
    _from_loss: float | None = state(None)
    _may_be_from_loss: bool = state(False)
    _blame: Blame = state(Blame)
    _steps_far_above: int = state(0)
    _steps_lasting: int = state(0)
    _amplified: deque[float] = state(deque(maxlen=shared.LENGTH))
    _unclipped: deque[float] = state(deque(maxlen=shared.LENGTH))
    _amplified_steps: int = state(0)
    _deep_steps: int = state(0)
    _began_deep: bool = state(True)  # at all full steps up to now
    _is_deep: bool = state(False)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        found = None
        if not record.all_grads_finite:  # it may have overflowed before it was confirmed
            just_jumped = baseline.gradients_led and baseline.since_norm_jump < shared.FEWEST
            if self.active_alert is None and (self._deep_steps or just_jumped):
                summary = "The gradients grew until they overflowed"
                found = self._found(baseline, summary, math.inf, self.depth_factor)
        else:
            self._blame.add(record, baseline)
            found = (
                self._in_time(record, baseline)
                or self._before_clipping(record, baseline)
                or self._over_depth(record, baseline)
            )
        is_candidate = baseline.since_norm_jump < shared.FEWEST and not record.full
        is_candidate |= self._amplified_steps == 1 or self._deep_steps > 0 or self._may_be_from_loss
        self.needs_full_step = self.active_alert is None and is_candidate
        blamed, alert = self._blame.stretch, self.active_alert
        if found is None or alert is None or not self._blame.is_corrected:
            return found
        self._blame.is_corrected = False
        return replace(found, escalates=blamed is not None and blamed.first != alert.module_name)

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return self._is_deep or self._amplified_steps > 0 or not record.all_grads_finite

    def _in_time(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        norm, loss = baseline.norm, baseline.loss
        is_unbounded = loss.is_unbounded
        lasting = shared.FAR_ABOVE if is_unbounded else math.log10(self.lasting_factor)
        lasts = norm.above_window >= lasting
        self._add_gain(record, baseline, large=lasts)
        self._may_be_from_loss = lasts and self._from_loss is None and len(self._gains) > 0
        from_loss, decades = self._from_loss or 0.0, math.log10(self.factor)
        far_above = norm.above_all - from_loss >= decades
        lasts &= norm.above_window - from_loss >= lasting
        self._steps_far_above = self._steps_far_above + 1 if far_above else 0
        # A single batch with small gradients does not reset the count.
        self._steps_lasting = max(0, self._steps_lasting + (1 if lasts else -1))
        # Near the end of training, a norm that is large now was usual once.
        is_large = record.total_grad_norm >= norm.first or loss.losses_lost > 0
        lost = (loss.is_worse and is_large) or is_unbounded
        explodes = norm.above_all >= decades + shared.TENFOLD
        explodes |= self._steps_far_above >= shared.SEVERAL
        # Without a jump, no full step has shown yet how much came from the loss.
        explodes |= self._steps_lasting >= shared.FEWEST and lost and not self._may_be_from_loss
        led = baseline.gradients_led and baseline.large_step >= norm.jump_step
        explodes |= led and len(loss.high) >= _LOSSES
        if (
            not explodes or baseline.since_rate_jump < shared.RECENT
        ):  # loss_divergence needs some losses
            return None
        total = record.total_grad_norm
        falls = ", while the loss falls without bound" if is_unbounded else ""
        return self._found(
            baseline,
            f"The gradient norm is {figure(total)}, {figure(total / norm.usual)}x above usual"
            f"{falls}",
            total,
            norm.usual * self.lasting_factor,
            confined=confined_growth(record, norm.usual),
            advice=_UNBOUNDED if is_unbounded else (),
        )

    def _before_clipping(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """Return an explosion that clipping hides from the optimizer, at full steps."""
        norm, usual = record.total_grad_norm_before_clipping, self._amplified
        amplified = gain(record, norm)
        if norm is None or math.isnan(amplified):
            return None
        # The gradient of the last module alone falls if it is of another head, or of an expert
        # without samples: then the norm has not grown.
        far = (
            len(usual) >= 2
            and amplified >= max(usual) + math.log10(self.factor)
            and norm > 10**shared.TENFOLD * max(self._unclipped)
        )
        self._amplified_steps = self._amplified_steps + 1 if far else 0
        if not far:
            usual.append(amplified)
            self._unclipped.append(norm)
        if self._amplified_steps < 2:
            return None
        times = 10 ** (amplified - max(usual))
        scale = norm / record.total_grad_norm if record.total_grad_norm > 0 else 1.0
        is_clipped = scale > 1 + shared.TINY
        what = "Before clipping the gradient norm" if is_clipped else "The gradient norm"
        return self._found(
            baseline,
            f"{what} is {figure(norm)}, {figure(times, 2)}x the usual for such a gradient of the "
            "loss",
            norm,
            norm / times * self.factor,
            confined=confined_growth(record, norm / times, scale),
        )

    def _add_gain(self, record: StepRecord, baseline: Baseline, *, large: bool) -> None:
        """Measure once how much of a large norm comes from the loss."""
        now = gain(record)
        if not large:
            self._from_loss = None
            if not math.isnan(now):
                self._gains.append(now)
        elif self._from_loss is None and not math.isnan(now) and self._gains:
            self._from_loss = max(baseline.norm.above_window - now + median_high(self._gains), 0.0)

    def _over_depth(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if not record.outputs or not record.output_grads:
            return None
        forward, backward = forward_growth(record), backward_growth(record)
        product = forward.decades + backward.decades
        smaller, least = min(forward.decades, backward.decades), math.log10(self.depth_factor)
        certain = False
        deep = self._is_deep = product >= least and smaller >= least * _SMALLER_SHARE
        self._began_deep &= deep
        if self._began_deep:
            certain = product >= least + math.log10(shared.THIRTYFOLD)
        else:
            usual = median_high(self._depths) if self._depths else smaller
            deep = smaller >= usual + shared.TENFOLD and baseline.loss.is_worse
        self._deep_steps = self._deep_steps + 1 if deep else 0
        if not deep:
            self._depths.append(smaller)
        if self._deep_steps < 2 and not certain:
            return None
        return self._found(
            baseline,
            f"Activations grow {figure(10**forward.decades, 2)}-fold in the forward pass, and "
            f"gradients {figure(10**backward.decades, 2)}-fold in the backward pass",
            10**product,
            self.depth_factor,
            statistic="activation_grad_rms",
            where=_began_large(baseline) or forward.stretch,
            advice=_WEIGHTS if self._began_deep else _STEPS_TOO_LARGE,
        )

    def _found(
        self,
        baseline: Baseline,
        summary: str,
        value: float,
        threshold: float,
        *,
        where: Stretch | None = None,
        confined: Stretch | None = None,
        advice: tuple[str, ...] = (),
        statistic: str | None = None,
    ) -> Finding:
        """Return a finding that blames ``where``, else the batch or the first growth."""
        cause, batch, batch_steps = None, 0.0, list[int]()
        if where is None and not baseline.follows_rate_jump:
            where, batch = self._blame.stretch, self._blame.batch
            if where is None and confined is None and baseline.since_norm_jump <= shared.LATEST:
                batch_steps = [baseline.norm.jump_step]
            if self._blame.is_alike and confined is None:
                cause = "All gradients grew alike: because of the batch or of several layers"
        if batch:
            cause = f"The values of the batch are {figure(batch, 2)}x as large as before"
        elif confined is not None and where in (None, confined):
            where, advice = confined, advice or _ONE_LAYER
            cause = f"Only the gradient of {confined} grew: without it the norm would be as before"
        elif where is not None:
            cause = where.growth
            if self._blame.by_norms and where is self._blame.stretch:
                cause += ", whose gradient alone did not grow"
        return Finding(
            summary=summary,
            cause=cause,
            advice=advice or (_BATCH if batch else _STEPS_TOO_LARGE),
            value=value,
            threshold=threshold,
            module_name=where.first if where is not None else None,
            batch_steps=batch_steps,
            statistic=statistic,
        )


def _began_large(baseline: Baseline) -> Stretch | None:
    name, _ = baseline.large_start
    return Stretch.of(name) if name else None


_LOSSES = 2  # tried 1 and 4
_SMALLER_SHARE = 1 / 3  # at 2/3 resnet_nonorm_explodes is missed; tried 1/6

_INITIALIZE = "Make the initial weights smaller (He or Xavier initialization)"
_WEIGHTS = (_INITIALIZE, "Scale down the branches of residual blocks", "Add normalization")
_BATCH = ("Check the data and the normalization of that batch", shared.CLIP)
_UNBOUNDED = ("Check for a term of the loss with the wrong sign, or without a lower limit",)
_ONE_LAYER = (
    "Check for a term of the loss, a backward function or a hook of this layer",
    shared.CLIP,
)
_STEPS_TOO_LARGE = (shared.CLIP, shared.WARM_UP, "Check the batch")

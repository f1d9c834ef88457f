"""Activations and gradients that grow far beyond what they were, or from layer to layer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import median_high

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.baseline import FAR_ABOVE, FEW, FEWEST, LENGTH, RECENT, TENFOLD, Baseline
from telemetry.alerts.detector import RISEN_LOSSES, Detector, Finding
from telemetry.alerts.growth import Growth, Stretch, backward_growth, forward_growth, gain
from telemetry.plain_text import called
from telemetry.records import Output, StepRecord
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of


class ExplodingActivation(Detector):
    """Compares the variation of each module's output with the largest RMS that it has had.

    The variation (:attr:`TensorRecord.variation`), because what is the same for every input is no
    activation, however large it is: the layers before it may be dead.

    It alerts when an output is ``factor`` times larger than ever before, in two full measurements
    in a row, and the loss has risen as well; or when activations grow ``depth_factor``-fold through
    the network at the very first and at a second one of the first steps.
    """

    kind = "exploding_activation"
    on = "full"
    confirm_after = 2
    clear_after = 3  # by eye: one more than begin it
    explained_by = RISEN_LOSSES | {"exploding_gradient", "saturated_units", "dead_units"}
    explained_by_rate_jump = True
    factor = 100.0  # by eye; tried 10 and 1000
    depth_factor = 1e4  # as in ExplodingGradient; tried 1e3 and 1e5
    _highest: dict[Output, float]
    _began_deep: bool | None = None

    def set_up(self) -> None:
        self._highest = {}

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        found = None
        sizes = figures_of(record.outputs, rms_of)
        for output, now in figures_of(record.outputs, attrgetter("variation")).items():
            highest = self._highest.get(output, 0.0)
            if highest and now > self.factor * highest and baseline.loss.is_worse:
                found = found or self._grown(output.module_name, now / highest)
            elif highest < sizes[output] < math.inf:
                self._highest[output] = sizes[output]
        deep = self._is_deep(record)
        self._began_deep = deep if self._began_deep is None else self._began_deep
        if found is None and baseline.is_young and deep and self._began_deep:
            found = self._deep(forward_growth(record), baseline)
        # Where gradients are not finite there will be no second look.
        certain = not record.all_grads_finite
        return replace(found, confirmed=certain) if found is not None else None

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return bool(self._began_deep) and self._is_deep(record)

    def _is_deep(self, record: StepRecord) -> bool:
        return forward_growth(record).decades > math.log10(self.depth_factor)

    def _grown(self, name: str, times: float) -> Finding:
        return Finding(
            summary=f"The output of {called(name)} is {times:.2g} times as large as ever before",
            advice=(
                "People usually lower the learning rate or warm it up, clip gradients, and add "
                "normalization.",
            ),
            value=times,
            threshold=self.factor,
            module_name=name,
        )

    def _deep(self, growth: Growth, baseline: Baseline) -> Finding:
        where, times = _began_large(baseline) or growth.stretch, 10**growth.decades
        assert where is not None
        return Finding(
            summary=f"Activations grow {times:.2g}-fold through the network, most of all in "
            f"{where.shared}",
            advice=(
                "People usually make the initial weights smaller (He or Xavier initialization), "
                "scale the inputs, and add normalization.",
            ),
            value=times,
            threshold=self.depth_factor,
            module_name=where.first,
        )


class ExplodingGradient(Detector):
    """Compares the gradients with the run's own past, and the layers with each other.

    *In time*: the total norm is compared with the highest of the last 100 steps. Heavy-tailed data,
    rare classes and warm restarts stay within ten times their own maximum. The gradients explode if

    - the norm exceeds that maximum ``factor``-fold at three steps in a row, or ten times as much at
      one; or
    - it exceeds it fivefold, the optimizer then moves the weights by a fifth of their norm, and the
      loss is far above all before; or
    - it is for ten steps ``lasting_factor`` times what it was more than 20 steps ago (ten more
      than it is not), while the loss has risen, and it is at least that of the first steps or half
      of what was learned is lost; or five times, while the loss falls without bound.

    Growth that comes from the loss does not count: if the loss gets another weight or unit, the
    gradient of the network's output grows as much as those of the parameters. The first full
    measurement shows how much. If the learning rate has just jumped, ``loss_divergence`` decides
    first.

    *Over depth*: an explosion from the beginning multiplies activations from layer to layer on the
    way forward, and gradients on the way back. Either alone is common: small inputs, outputs in
    large units, side branches with small gradients. It alerts if the product of both growths is at
    least ``depth_factor``, if each has at least a third of its decades, and if this holds at the
    first measurement, before training can have caused it. It takes two measurements, or one that is
    thirty times larger. Later, where clipping hides the norm, both must have grown tenfold and the
    loss must have risen.
    """

    kind = "exploding_gradient"
    severity = "error"
    clear_after = 50
    explained_by = RISEN_LOSSES | {"exploding_activation", "saturated_units"}
    explained_by_rate_jump = True
    factor = 1000.0  # healthy runs stay within 10; tried 100 and 10,000
    lasting_factor = 30.0  # by eye; tried 6 and 300
    depth_factor = 1e4  # at 1e5 resnet_nonorm_explodes is found a step later; tried 1e3
    _depths: deque[float]
    _gains: deque[float]
    _from_loss: float | None = None
    _may_be_from_loss: bool = False
    _blame: Blame
    _steps_far_above: int = 0
    _steps_lasting: int = 0
    _amplified: deque[float]
    _looks_amplified: int = 0
    _deep_looks: int = 0
    _began_deep: bool | None = None
    _is_deep: bool = False

    def set_up(self) -> None:
        self._depths, self._gains = deque(maxlen=50), deque(maxlen=10)
        self._amplified = deque(maxlen=LENGTH)
        self._blame = Blame()

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if not record.all_grads_finite:
            found = self._cut_short(baseline)
        else:
            self._blame.add(record, baseline)
            found = (
                self._in_time(record, baseline)
                or self._before_clipping(record, baseline)
                or self._over_depth(record, baseline)
            )
        just_jumped = baseline.norm.since_jump < _LASTING and not record.full
        asks = (
            just_jumped
            or self._looks_amplified == 1
            or self._deep_looks > 0
            or self._may_be_from_loss
        )
        self.needs_full_step = self.active_alert is None and asks
        blamed, alert = self._blame.stretch, self.active_alert
        if found is None or alert is None or not self._blame.is_corrected:
            return found
        self._blame.is_corrected = False
        return replace(found, escalates=blamed is not None and blamed.first != alert.module_name)

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return self._is_deep or self._looks_amplified > 0 or not record.all_grads_finite

    def _in_time(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        norm, loss = baseline.norm, baseline.loss
        is_unbounded = loss.is_unbounded
        lasting = FAR_ABOVE if is_unbounded else math.log10(self.lasting_factor)
        lasts = norm.far_above >= lasting
        self._see_gain(record, baseline, large=lasts)
        self._may_be_from_loss = lasts and self._from_loss is None and len(self._gains) > 0
        from_loss, decades = self._from_loss or 0.0, math.log10(self.factor)
        far_above = norm.above - from_loss >= decades
        lasts &= norm.far_above - from_loss >= lasting
        self._steps_far_above = self._steps_far_above + 1 if far_above else 0
        # One batch without a gradient in between is no end: all may be right for once.
        self._steps_lasting = max(0, self._steps_lasting + (1 if lasts else -1))
        # Where next to nothing is left to learn, what is large now was usual once.
        is_large = record.total_grad_norm >= norm.first or loss.losses_lost > 0
        lost = (loss.is_worse and is_large) or is_unbounded
        explodes = norm.above >= decades + TENFOLD
        explodes |= self._steps_far_above >= _STEPS
        # Where it grew without a jump, no measurement has told yet how much came from the loss.
        explodes |= self._steps_lasting >= _LASTING and lost and not self._may_be_from_loss
        led = baseline.gradients_led and baseline.since_large_step <= norm.since_jump
        explodes |= led and len(loss.high) >= _LOSSES
        if not explodes or baseline.since_rate_jump < RECENT:  # loss_divergence needs some losses
            return None
        total = record.total_grad_norm
        falls = ", while the loss falls without bound" if is_unbounded else ""
        return self._found(
            baseline,
            value=total,
            threshold=norm.usual * self.lasting_factor,
            summary=f"The gradient norm is {total:.3g}; it used to be {norm.usual:.3g}{falls}",
            confined=_confined(record, norm.usual),
            advice=_UNBOUNDED if falls else (),
        )

    def _before_clipping(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        """An explosion that clipping hides from the optimizer, at full measurements."""
        norm, usual = record.total_grad_norm_before_clipping, self._amplified
        amplified = gain(record, norm)
        if norm is None or math.isnan(amplified):
            return None
        far = len(usual) >= 2 and amplified >= max(usual) + math.log10(self.factor)
        self._looks_amplified = self._looks_amplified + 1 if far else 0
        if not far:
            usual.append(amplified)
        if self._looks_amplified < 2:
            return None
        times = 10 ** (amplified - max(usual))
        scale = norm / record.total_grad_norm if record.total_grad_norm > 0 else 1.0
        what = "Before clipping the gradient norm" if scale > _IS_CLIPPED else "The gradient norm"
        return self._found(
            baseline,
            value=norm,
            threshold=norm / times * self.factor,
            summary=f"{what} is {norm:.3g}, {times:.2g} times what it used to be for such a "
            "gradient of the loss",
            confined=_confined(record, norm / times, scale),
        )

    def _see_gain(self, record: StepRecord, baseline: Baseline, *, large: bool) -> None:
        """When the norm has become large, measure once how much of that came from the loss."""
        now = gain(record)
        if not large:
            self._from_loss = None
            if not math.isnan(now):
                self._gains.append(now)
        elif self._from_loss is None and not math.isnan(now) and self._gains:
            self._from_loss = max(baseline.norm.far_above - now + median_high(self._gains), 0.0)

    def _over_depth(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        if not record.outputs or not record.output_grads:
            return None
        forward, backward = forward_growth(record), backward_growth(record)
        product = forward.decades + backward.decades
        smaller, least = min(forward.decades, backward.decades), math.log10(self.depth_factor)
        certain = False
        deep = self._is_deep = product >= least and smaller >= least * _SMALLER_SHARE
        if baseline.is_young:
            self._began_deep = deep if self._began_deep is None else self._began_deep
            deep &= self._began_deep
            certain = deep and product >= least + _CERTAIN
        else:
            usual = median_high(self._depths) if self._depths else smaller
            deep = smaller >= usual + TENFOLD and baseline.loss.is_worse
        self._deep_looks = self._deep_looks + 1 if deep else 0
        if not deep:
            self._depths.append(smaller)
        if self._deep_looks < 2 and not certain:
            return None
        return self._found(
            baseline,
            value=10**product,
            threshold=self.depth_factor,
            summary=(
                f"Activations grow {10**forward.decades:.2g}-fold through the network and their "
                f"gradients {10**backward.decades:.2g}-fold on the way back"
            ),
            where=_began_large(baseline) or forward.stretch,
            advice=_WEIGHTS if baseline.is_young else _STEPS_TOO_LARGE,
        )

    def _cut_short(self, baseline: Baseline) -> Finding | None:
        """An explosion that was about to be reported when the numbers overflowed."""
        just_jumped = baseline.gradients_led and baseline.norm.since_jump < _LASTING
        if self.active_alert is not None or not (self._deep_looks or just_jumped):
            return None
        return self._found(
            baseline,
            value=math.inf,
            threshold=self.depth_factor,
            summary="Gradients grew until the numbers overflowed",
        )

    def _found(
        self,
        baseline: Baseline,
        *,
        value: float,
        threshold: float,
        summary: str,
        where: Stretch | None = None,
        confined: Stretch | None = None,
        advice: tuple[str, ...] = (),
    ) -> Finding:
        """A finding that blames the layers in ``where``, else the batch or what grew first."""
        batch = 0.0
        if where is None and not baseline.follows_rate_jump:
            where, batch = self._blame.stretch, self._blame.batch
            if self._blame.is_alike and confined is None:
                summary += ", in all layers alike: because of the batch, or of several layers"
        if batch:
            summary += (
                f", because of the batch: its values are {batch:.2g} times as large as before"
            )
        elif confined is not None and where in (None, confined):
            where, advice = confined, advice or _ONE_LAYER
            summary += f", and without {confined} it would be nearly the same"
        elif where is not None:
            summary += f", most likely because of {where.shared}"
            if self._blame.by_norms and where is self._blame.stretch:
                summary += ", whose gradient alone did not grow"
        return Finding(
            summary=summary,
            advice=advice or (_BATCH if batch else _STEPS_TOO_LARGE),
            value=value,
            threshold=threshold,
            module_name=where.first if where is not None else None,
        )


def _began_large(baseline: Baseline) -> Stretch | None:
    name, _ = baseline.large_start
    return Stretch(name, name) if name else None


_LASTING = FEWEST  # steps; tried 2 and 50
_IS_CLIPPED = 1 + 1e-3  # less is rounding
_STEPS = 3  # by eye; tried 1, which finds cnn_scaled_batch a step earlier, and 6
_LOSSES = 2  # by eye; tried 1, which finds cnn_scaled_batch a step earlier, and 4
_CERTAIN = 1.5  # a factor of 30: resnet_nonorm_explodes overflows before a second look
_SMALLER_SHARE = 1 / 3  # at 2/3 resnet_nonorm_explodes is missed; tried 1/6

_WEIGHTS = (
    "People usually make the initial weights smaller (He or Xavier initialization), scale down the "
    "branches of residual blocks, and add normalization.",
)
_BATCH = (
    "Look at how that batch was made and normalized. People usually clip gradients "
    "(clip_grad_norm_), so that one batch cannot do harm.",
)
_UNBOUNDED = (
    "Look for a term of the loss with the wrong sign, or that nothing limits from below.",
)
_ONE_LAYER = (
    "Look at what only this layer's gradient contains: a term of the loss, a backward function, a "
    "hook. People usually clip gradients (clip_grad_norm_), too.",
)
_STEPS_TOO_LARGE = (
    "People usually clip gradients (clip_grad_norm_), lower the learning rate or warm it up, and "
    "check the batch.",
)


class Blame:
    """Which modules caused a sudden growth of the gradients; the first evidence counts.

    If a module's weights grew, so do its outputs and those of all behind it, which a full
    measurement shows: to blame is where most of the growth comes about, be it in one module, in
    several that grew alike, or in the batch already. The norms alone show a single one, too: in a
    network of ReLUs all gradients grow except its own, which does not contain its weight. If none
    stands out among several, and it is not known what the outputs were, it is the batch or all of
    them. A step or two later everything has changed.
    """

    stretch: Stretch | None = None  # the culprits; None while nothing grows or they are not known
    batch: float = 0.0  # how many times as large as before its values are, if it is to blame
    is_alike: bool = False  # all gradients grew alike, and nothing else is known
    by_norms: bool = False  # the culprit was found by the norms alone
    is_corrected: bool = False  # a full measurement has just shown that it is another one
    _outputs: dict[str, float]
    _gradients: dict[str, float]

    def __init__(self) -> None:
        self._outputs, self._gradients = {}, {}

    def add(self, record: StepRecord, baseline: Baseline) -> None:
        """Add a step whose gradients are finite."""
        outputs = self._grown_outputs(record) if record.inputs or record.outputs else None
        growth, first = _growth(baseline), self._first_grown(record) if record.full else None
        entered = _entered(baseline)
        if growth is None and outputs is None and entered is None:
            self.stretch, self.batch, self.is_alike = None, 0.0, False
        elif self.by_norms and record.full and outputs is None and first is not None:
            # No weight has grown, or its output would have: it came from behind, and the layer
            # that did not grow is on another branch.
            self.stretch, self.by_norms, self.is_corrected = Stretch(first, first), False, True
        elif self.stretch is None and not self.batch and not self.is_alike:
            self.stretch = entered
            if growth is not None:
                self.stretch = _all_but_one(baseline.layers.names, growth)
            if self.stretch is None and outputs is not None:
                self.stretch = outputs.stretch
            if outputs is not None and outputs.levels[0] > max(outputs.levels) / 2:
                self.stretch, self.batch = None, 10 ** outputs.levels[0]
            several = len(baseline.layers.names) > _FEWEST
            self.by_norms = self.stretch is not None and entered is None and not record.full
            self.is_alike = self.stretch is None and not record.full and several

    def _grown_outputs(self, record: StepRecord) -> Growth | None:
        """How far the batch and then each output are above what they were; None if none is."""
        given = record.inputs.get("")
        levels = [
            0.0 if given is None else self._above(_BATCH_KEY, given.variation, given.sketch.rms)
        ]
        sizes = figures_of(record.activations, rms_of)
        now = figures_of(record.activations, attrgetter("variation"))
        levels += [self._above(name, variation, sizes[name]) for name, variation in now.items()]
        return Growth(names=["", *now], levels=levels) if max(levels) > TENFOLD else None

    def _first_grown(self, record: StepRecord) -> str | None:
        """Of the modules whose outputs' gradients have grown tenfold, the first on the way back."""
        grown = []
        for name, now in figures_of(record.activation_grads, rms_of).items():
            if now > 10**TENFOLD * self._gradients.get(name, math.inf):
                grown.append(name)
            elif 0 < now < math.inf:
                self._gradients[name] = now
        return max(grown, key=record.layout.position.__getitem__, default=None)

    def _above(self, name: str, now: float, rms: float) -> float:
        """log10 of how far a variation is above a usual RMS; 0 if that is not known."""
        usual = self._outputs.get(name, math.nan)
        level = math.log10(now / usual) if 0 < now < math.inf and usual > 0 else 0.0
        if level <= TENFOLD and 0 < rms < math.inf:
            self._outputs[name] = rms
        return level


def _growth(baseline: Baseline) -> NDArray[np.float64] | None:
    """log10 of how far each norm is above its usual one, if most have grown tenfold."""
    growth = baseline.layers.growth
    known = growth[np.isfinite(growth)]
    is_grown = 2 * np.count_nonzero(known > TENFOLD) > len(known) >= _FEWEST
    return growth if is_grown else None


def _entered(baseline: Baseline) -> Stretch | None:
    """Where a few gradients alone have grown a hundredfold: the layer where that came in.

    That is the last of them, of which those before it are given theirs.
    """
    growth = baseline.layers.growth
    known, grown = np.isfinite(growth), np.flatnonzero(growth > 2 * TENFOLD)
    are_apart = not (known & (growth > TENFOLD / 2) & (growth <= 2 * TENFOLD)).any()
    if not 0 < 2 * len(grown) <= np.count_nonzero(known) or not are_apart:
        return None
    name = baseline.layers.names[grown[-1]]
    return Stretch(name, name)


def _all_but_one(names: Sequence[str], growth: NDArray[np.float64]) -> Stretch | None:
    """The layer whose gradient grew far less than all others."""
    known = np.isfinite(growth)
    least, next_least = np.sort(growth[known])[:2]
    if next_least - least <= TENFOLD:
        return None
    name = names[int(np.where(known, growth, np.inf).argmin())]
    return Stretch(name, name)


def _confined(record: StepRecord, usual: float, scale: float = 1.0) -> Stretch | None:
    """Where gradients have grown if few have: without those, the norm is nearly as it was.

    On its way back through the network such a gradient begins at the last of the modules.

    Args:
        record: A step whose gradients are finite and have grown.
        usual: Their norm before.
        scale: What clipping has divided them by.
    """
    norms = record.owner_grad_norms * scale
    order = norms.argsort()
    others = np.sqrt(np.cumsum(norms[order] ** 2))
    grown = order[others > 10**TENFOLD * usual]
    if not 0 < len(grown) <= max(1, FEW * len(norms)) or len(norms) < _FEWEST:
        return None
    name = record.layout.owner_names[int(grown.max())]
    return Stretch(name, name)


_BATCH_KEY = "(batch)"
_FEWEST = 3  # fewer modules have no majority; tried 1 and 6

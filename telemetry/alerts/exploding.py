"""Activations and gradients that grow far beyond what they were, or from layer to layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

from telemetry.alert import Alert
from telemetry.alerts.course import FAR_ABOVE
from telemetry.alerts.episode import EpisodeRule
from telemetry.alerts.growth import Blame, Stretch, backward_growth, forward_growth, gain
from telemetry.alerts.history import History
from telemetry.records import Output, StepRecord
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of
from telemetry.shared.plain_text import called


class ExplodingActivation(EpisodeRule):
    """Compares the variation of each module's output with the largest RMS that it has had.

    The variation (:attr:`TensorRecord.variation`), because what is the same for every input is no
    activation, however large it is: the layers before it may be dead.

    It alerts when an output is ``factor`` times larger than ever before, in two full measurements
    in a row, and the loss has risen as well; or when activations grow ``depth_factor``-fold through
    the network at the very first and at a second one of the first steps.

    Args:
        factor: Ratio to the largest RMS that the module's output has had.
        depth_factor: Ratio of the largest variation in the network to the RMS of the first module.
    """

    name = "exploding_activation"
    factor = 100.0  # by eye; tried 10 and 1000
    depth_factor = 1e4  # as in ExplodingGradient; tried 1e3 and 1e5
    _calm = 3  # by eye: one more than begin it
    _highest: dict[Output, float]
    _looks: int = 0
    _began_deep: bool | None = None

    def _set_up(self) -> None:
        self._highest = {}

    @property
    def wants_full(self) -> bool:
        """Whether one measurement was large and a second one would decide."""
        return self._looks == 1

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.course.follow(record)
        if not record.outputs:
            return ()
        found = self._grown(record)
        self._looks = self._looks + 1 if found else 0
        overflown = not record.all_grads_finite  # there will be no second look
        certain = self._looks >= 2 or overflown
        if not found and self._began_deep and self._is_deep(record):
            return ()  # as in the beginning
        return self._episode.update(record.step, found if certain else None)

    def _grown(self, record: StepRecord) -> Alert | None:
        found = None
        sizes = figures_of(record.outputs, rms_of)
        for output, now in figures_of(record.outputs, attrgetter("variation")).items():
            name = output.module_name
            highest = self._highest.get(output, 0.0)
            if highest and now > self.factor * highest and self.course.loss.is_worse:
                times = now / highest
                if found is None:
                    seen = f"The output of {called(name)} is {times:.2g} times as large as ever"
                    message = f"{seen} before.\n{_SMALLER_STEPS}"
                    found = self._alert(record.step, name, times, self.factor, message)
            elif highest < sizes[output] < math.inf:
                self._highest[output] = sizes[output]
        growth = forward_growth(record)
        deep = self._is_deep(record)
        self._began_deep = deep if self._began_deep is None else self._began_deep
        if found is None and self.course.is_young and deep and self._began_deep:
            where, times = growth.stretch, 10**growth.decades
            assert where is not None
            seen = f"Activations grow {times:.2g}-fold through the network, most of all in "
            message = f"{seen}{where.shared}.\n{_SMALLER_WEIGHTS}"
            found = self._alert(record.step, where.first, times, self.depth_factor, message)
        return found

    def _is_deep(self, record: StepRecord) -> bool:
        return forward_growth(record).decades > math.log10(self.depth_factor)


_SMALLER_WEIGHTS = (
    "People usually make the initial weights smaller (He or Xavier initialization), scale the "
    "inputs, and add normalization."
)
_SMALLER_STEPS = (
    "People usually lower the learning rate or warm it up, clip gradients, and add normalization."
)


class ExplodingGradient(EpisodeRule):
    """Compares the gradients with the run's own past, and the layers with each other.

    *In time*: the rule compares the total norm with the highest of the last 100 steps.
    Heavy-tailed data, rare classes and warm restarts stay within ten times their own maximum. The
    gradients explode if

    - the norm exceeds that maximum ``factor``-fold at three steps in a row, or ten times as much at
      one; or
    - it exceeds it fivefold, the optimizer then moves the weights by a fifth of their norm, and the
      loss is far above all before; or
    - it is for ten steps ``lasting_factor`` times what it was more than 20 steps ago (ten more
      than it is not), while the loss has risen and does not recover (harder data raise both as
      well, then the loss falls again); or five times, while the loss falls without bound.

    Growth that comes from the loss does not count: if the loss gets another weight or unit, the
    gradient of the network's output grows as much as those of the parameters. The first full
    measurement shows how much. If the learning rate has just jumped, ``loss_divergence`` decides
    first.

    *Over depth*: an explosion from the beginning multiplies activations from layer to layer on the
    way forward, and gradients on the way back. Either alone is common: small inputs, outputs in
    large units, side branches with small gradients. The rule alerts if the product of both growths
    is at least ``depth_factor``, if each has at least a third of its decades, and if this holds at
    the first measurement, before training can have caused it. It takes two measurements, or one
    that is thirty times larger. Later, where clipping hides the norm, both must have grown tenfold
    and the loss must have risen.

    Args:
        factor: Ratio to the highest norm of the last 100 steps, at three steps in a row.
        lasting_factor: Ratio to that of older steps, for ten steps with a loss that has risen.
        depth_factor: Growth of activations from the first module to the largest, times that of
            their gradients on the way back.
    """

    name = "exploding_gradient"
    factor = 1000.0  # healthy runs stay within 10; tried 100 and 10,000
    lasting_factor = 30.0  # by eye; tried 6 and 300
    depth_factor = 1e4  # at 1e5 resnet_nonorm_explodes is found a step later; tried 1e3
    _calm = 50  # after which NormTrend takes a norm for usual
    _depths: History
    _gains: History
    _from_loss: float = 0.0
    _is_explained: bool = False
    _blame: Blame
    _steps_far_above: int = 0
    _steps_lasting: int = 0
    _deep_looks: int = 0
    _began_deep: bool | None = None
    _remains: bool = False

    def _set_up(self) -> None:
        self._decades = math.log10(self.factor)
        self._lasting_decades = math.log10(self.lasting_factor)
        self._depth_decades = math.log10(self.depth_factor)
        self._depths = History(50)
        self._gains = History(10)
        self._blame = Blame()

    @property
    def wants_full(self) -> bool:
        """Whether a full measurement would help to decide."""
        just_jumped = self.course.norm.since_jump < _LASTING
        return not self._episode.is_on and (just_jumped or self._deep_looks > 0)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.course.follow(record)
        if not record.all_grads_finite:
            found = self._cut_short(record)
            return self._episode.update(record.step, found) if found else ()
        self._blame.add(record)
        found = self._in_time(record) or self._over_depth(record)
        if found is None and self._remains:
            return ()
        return self._episode.update(record.step, found)

    def _in_time(self, record: StepRecord) -> Alert | None:
        course, norm, loss = self.course, self.course.norm, self.course.loss
        is_unbounded = loss.is_unbounded
        lasting = FAR_ABOVE if is_unbounded else self._lasting_decades
        lasts = norm.far_above >= lasting
        self._see_gain(record, large=lasts)
        far_above = norm.above - self._from_loss >= self._decades
        lasts &= norm.far_above - self._from_loss >= lasting
        self._steps_far_above = self._steps_far_above + 1 if far_above else 0
        # One batch without a gradient in between is no end: all may be right for once.
        self._steps_lasting = max(0, self._steps_lasting + (1 if lasts else -1))
        lost = (loss.is_worse and not loss.is_recovering) or is_unbounded
        explodes = norm.above >= self._decades + _AT_ONCE
        explodes |= self._steps_far_above >= _STEPS or (self._steps_lasting >= _LASTING and lost)
        explodes |= (
            course.gradients_led
            and course.since_large_step <= norm.since_jump
            and loss.steps_far_above >= _LOSSES
        )
        if not explodes or course.since_rate_jump < _WAIT_FOR_RATE:
            return None
        total = record.total_grad_norm
        falls = ", while the loss falls without bound" if is_unbounded else ""
        return self._found(
            record,
            value=total,
            threshold=norm.usual * 10**self._lasting_decades,
            seen=f"The gradient norm is {total:.3g}; it used to be {norm.usual:.3g}{falls}",
            confined=self._blame.confined(record, norm.usual),
            advice=_UNBOUNDED if falls else "",
        )

    def _see_gain(self, record: StepRecord, *, large: bool) -> None:
        """When the norm has become large, measure once how much of that came from the loss."""
        now = gain(record)
        if not large:
            self._from_loss, self._is_explained = 0.0, False
            if not math.isnan(now):
                self._gains.add(now)
        elif not self._is_explained and not math.isnan(now) and len(self._gains):
            risen = now - self._gains.median
            self._from_loss = max(self.course.norm.far_above - risen, 0.0)
            self._is_explained = True

    def _over_depth(self, record: StepRecord) -> Alert | None:
        if not record.outputs or not record.output_grads:
            return None
        forward, backward = forward_growth(record), backward_growth(record)
        product = forward.decades + backward.decades
        smaller = min(forward.decades, backward.decades)
        certain = False
        deep = product >= self._depth_decades and smaller >= self._depth_decades * _SMALLER_SHARE
        self._remains = self._episode.is_on and deep
        if self.course.is_young:
            self._began_deep = deep if self._began_deep is None else self._began_deep
            deep &= self._began_deep
            certain = deep and product >= self._depth_decades + _CERTAIN
        else:
            usual = self._depths.median if len(self._depths) else smaller
            deep = smaller >= usual + _DEEPER and self.course.loss.is_worse
        self._deep_looks = self._deep_looks + 1 if deep else 0
        if not deep:
            self._depths.add(smaller)
        if self._deep_looks < 2 and not certain:
            return None
        return self._found(
            record,
            value=10**product,
            threshold=10**self._depth_decades,
            seen=(
                f"Activations grow {10**forward.decades:.2g}-fold through the network and their "
                f"gradients {10**backward.decades:.2g}-fold on the way back"
            ),
            where=forward.stretch,
            advice=_WEIGHTS if self.course.is_young else _STEPS_TOO_LARGE,
        )

    def _cut_short(self, record: StepRecord) -> Alert | None:
        """An explosion that was about to be reported when the numbers overflowed."""
        just_jumped = self.course.gradients_led and self.course.norm.since_jump < _LASTING
        if self._episode.is_on or not (self._deep_looks or just_jumped):
            return None
        return self._found(
            record,
            value=math.inf,
            threshold=10**self._depth_decades,
            seen="Gradients grew until the numbers overflowed",
        )

    def _found(
        self,
        record: StepRecord,
        *,
        value: float,
        threshold: float,
        seen: str,
        where: Stretch | None = None,
        confined: Stretch | None = None,
        advice: str = "",
    ) -> Alert:
        """An alert that blames the layers in ``where``, else the batch or what grew first."""
        blame, batch = self._blame, 0.0
        if where is None and not self.course.follows_rate_jump:
            where, batch = blame.stretch, blame.batch
            if blame.is_alike and confined is None:
                seen += ", in all layers alike: because of the batch, or of several layers"
        if batch:
            seen += f", because of the batch: its values are {batch:.2g} times as large as before"
        elif where is not None:
            seen += f", most likely because of {where.shared}"
        elif confined is not None:
            where, advice = confined, advice or _ONE_LAYER
            seen += f", and without {confined} it would be nearly the same"
        message = f"{seen}.\n{advice or (_BATCH if batch else _STEPS_TOO_LARGE)}"
        place = where.first if where is not None else None
        return self._alert(record.step, place, value, threshold, message, "error")


_LASTING = 10  # by eye, in steps; tried 2 and 50
_STEPS = 3  # by eye; tried 1, which finds cnn_scaled_batch a step earlier, and 6
_AT_ONCE = 1.0  # ten times as much, by eye; tried 0.5 and 2
_LOSSES = 2  # by eye; tried 1, which finds cnn_scaled_batch a step earlier, and 4
_SMALLER_SHARE = 1 / 3  # at 2/3 resnet_nonorm_explodes is missed; tried 1/6
_DEEPER = 1.0  # at 0.5 gpt_lr100, which diverges, is called exploding, too; tried 2
_WAIT_FOR_RATE = 5  # by eye, in steps: loss_divergence needs three losses; tried 1 and 25
_CERTAIN = 1.5  # a factor of 30, by eye; tried 0.75 and 3

_WEIGHTS = (
    "People usually make the initial weights smaller (He or Xavier initialization), scale down the "
    "branches of residual blocks, and add normalization."
)
_BATCH = (
    "Look at how that batch was made and normalized. People usually clip gradients "
    "(clip_grad_norm_), so that one batch cannot do harm."
)
_UNBOUNDED = "Look for a term of the loss with the wrong sign, or that nothing limits from below."
_ONE_LAYER = (
    "Look at what only this layer's gradient contains: a term of the loss, a backward function, a "
    "hook. People usually clip gradients (clip_grad_norm_), too."
)
_STEPS_TOO_LARGE = (
    "People usually clip gradients (clip_grad_norm_), lower the learning rate or warm it up, and "
    "check the batch."
)

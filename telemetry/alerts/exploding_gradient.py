"""Gradients that grow far beyond what they were, or from layer to layer."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.alerts.course import FAR_ABOVE, CourseRule
from telemetry.alerts.depth import backward_growth, forward_growth, gain
from telemetry.alerts.episode import Episode
from telemetry.alerts.history import History, leading
from telemetry.alerts.modules import Modules
from telemetry.plain_text import called
from telemetry.records import LightSteps, Output, StepRecord


class ExplodingGradient(CourseRule):
    """Compares the gradients with the run's own past, and the layers with each other.

    *In time*: the rule compares the total norm with the highest of the last 100 steps.
    Heavy-tailed data, rare classes and warm restarts stay within ten times their own maximum. The
    gradients explode if

    - the norm exceeds that maximum ``factor``-fold at three steps in a row, or ten times as much at
      one; or
    - it exceeds it fivefold, the optimizer then moves the weights by a fifth of their norm, and the
      loss is far above all before; or
    - it is for ten steps ``lasting_factor`` times what it was more than 20 steps ago, while the
      loss has risen and does not recover. (Harder data raise both as well; then the loss falls
      again.)

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
    _depths: History
    _gains: History
    _from_loss: float
    _is_explained: bool
    _blame: _Blame
    _steps_far_above: int
    _steps_lasting: int
    _deep_looks: int
    _began_deep: bool | None
    _episode: Episode

    def __init__(
        self,
        *,
        factor: float = 1000.0,  # healthy runs stay within 10; tried 100 and 10,000
        lasting_factor: float = 30.0,  # by eye; tried 6 and 300
        # At 1e5 resnet_nonorm_explodes is found a step later; tried 1e3.
        depth_factor: float = 1e4,
    ) -> None:
        super().__init__()
        self._decades = math.log10(factor)
        self._lasting_decades = math.log10(lasting_factor)
        self._depth_decades = math.log10(depth_factor)
        self._depths = History(50)
        self._gains = History(10)
        self._from_loss = 0.0
        self._is_explained = False
        self._blame = _Blame()
        self._steps_far_above = 0
        self._steps_lasting = 0
        self._deep_looks = 0
        self._began_deep = None
        self._episode = Episode(_CALM_STEPS)

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
        return self._episode.update(record.step, self._in_time(record) or self._over_depth(record))

    def quiet_steps(self, steps: LightSteps) -> int:
        if self._episode.is_on or min(self._decades, self._lasting_decades) < FAR_ABOVE:
            return 0
        return min(super().quiet_steps(steps), self._blame.quiet_steps(steps))

    def pass_over(self, steps: LightSteps) -> None:
        super().pass_over(steps)
        self._from_loss, self._is_explained = 0.0, False
        self._steps_far_above = self._steps_lasting = 0
        self._blame.pass_over(steps)

    def _in_time(self, record: StepRecord) -> Alert | None:
        course, norm, loss = self.course, self.course.norm, self.course.loss
        lasts = norm.far_above >= self._lasting_decades
        self._see_gain(record, large=lasts)
        far_above = norm.above - self._from_loss >= self._decades
        lasts &= norm.far_above - self._from_loss >= self._lasting_decades
        self._steps_far_above = self._steps_far_above + 1 if far_above else 0
        self._steps_lasting = self._steps_lasting + 1 if lasts else 0
        lost = loss.is_worse and not loss.is_recovering
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
        return _alert(
            record,
            module_name=self._blame.module_name,
            value=total,
            threshold=norm.usual * 10**self._lasting_decades,
            seen=f"The gradient norm is {total:.3g}; it used to be {norm.usual:.3g}",
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
        if self.course.is_young:
            deep = (
                product >= self._depth_decades and smaller >= self._depth_decades * _SMALLER_SHARE
            )
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
        return _alert(
            record,
            module_name=forward.module_name,
            value=10**product,
            threshold=10**self._depth_decades,
            seen=(
                f"Activations grow {10**forward.decades:.2g}-fold through the network and their "
                f"gradients {10**backward.decades:.2g}-fold on the way back"
            ),
        )

    def _cut_short(self, record: StepRecord) -> Alert | None:
        """An explosion that was about to be reported when the numbers overflowed."""
        just_jumped = self.course.gradients_led and self.course.norm.since_jump < _LASTING
        if self._episode.is_on or not (self._deep_looks or just_jumped):
            return None
        return _alert(
            record,
            module_name=self._blame.module_name,
            value=math.inf,
            threshold=10**self._depth_decades,
            seen="Gradients grew until the numbers overflowed",
        )


_LASTING = 10  # by eye, in steps; tried 2 and 50
_STEPS = 3  # by eye; tried 1, which finds cnn_scaled_batch a step earlier, and 6
_AT_ONCE = 1.0  # ten times as much, by eye; tried 0.5 and 2
_LOSSES = 2  # by eye; tried 1, which finds cnn_scaled_batch a step earlier, and 4
_SMALLER_SHARE = 1 / 3  # at 2/3 resnet_nonorm_explodes is missed; tried 1/6
_DEEPER = 1.0  # at 0.5 gpt_lr100, which diverges, is called exploding, too; tried 2
_WAIT_FOR_RATE = 5  # by eye, in steps: loss_divergence needs three losses; tried 1 and 25
_CERTAIN = 1.5  # a factor of 30, by eye; tried 0.75 and 3
_CALM_STEPS = 50  # by eye


class _Blame:
    """Which module caused a sudden growth of the gradients; the first evidence counts.

    If a module's weights grew, so do its outputs, which a full measurement shows: it is the first
    of the modules whose outputs grew. The norms alone show it, too: in a network of ReLUs all
    gradients grow except its own, which does not contain its weight. A step or two later everything
    has changed.

    Attributes:
        module_name: The culprit; None while nothing grows or it is not known.
    """

    module_name: str | None
    _modules: Modules
    _norms: NDArray[np.float64]
    _outputs: dict[Output, float]

    def __init__(self) -> None:
        self.module_name = None
        self._modules = Modules()
        self._norms = np.zeros(0)
        self._outputs = {}

    def add(self, record: StepRecord) -> None:
        before = self._modules
        if before.layout is not record.layout:
            self._modules = Modules.of(record.layout)
            self._norms = self._modules.carry(self._norms, before.names, np.nan)
        by_output = self._first_grown_output(record)
        grown, by_norm = self._all_but_one(self._modules, self._modules.grad_norms(record))
        if by_output is not None or grown:
            self.module_name = self.module_name or by_norm or by_output
        else:
            self.module_name = None

    def quiet_steps(self, steps: LightSteps) -> int:
        """How many of the first steps pass before most gradients have grown."""
        if self._modules.layout is not steps.layout:
            return 0
        norms = self._modules.grad_norms(steps)
        lowest = np.minimum(norms.min(axis=0), self._norms)
        might = np.count_nonzero(norms.max(axis=0) > _NEARLY_GROWN * lowest)
        if lowest.min(initial=np.inf) > 0 and 2 * might < len(lowest):
            return len(steps)
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = norms / self._before(norms)
        known = np.count_nonzero(np.isfinite(growth) & (growth > 0), axis=1)
        grown = np.count_nonzero(growth > _NEARLY_GROWN, axis=1)
        return leading((2 * grown < known) | (known == 0))

    def pass_over(self, steps: LightSteps) -> None:
        """Add steps at which nothing has grown."""
        self.module_name = None
        norms = self._modules.grad_norms(steps)
        if not norms.all():
            norms = self._before(np.concatenate([norms, norms[-1:]]))
        self._norms = norms[-1].copy()

    def _before(self, norms: NDArray[np.float64]) -> NDArray[np.float64]:
        """The last norm of each module before each of these, ``[n, modules]``; 0 does not count."""
        before = np.concatenate([self._norms[np.newaxis], norms[:-1]])
        if np.isnan(before[0]).any() or not norms.all():
            for i in range(1, len(before)):
                seen = np.isnan(before[i - 1]) | (before[i] > 0)
                before[i] = np.where(seen, before[i], before[i - 1])
        return before

    def _all_but_one(self, modules: Modules, norms: NDArray[np.float64]) -> tuple[bool, str | None]:
        """Whether gradients grew tenfold, and the module whose gradient grew far less than all."""
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = np.log10(norms / self._norms)
        known = np.isfinite(growth)
        count = np.count_nonzero(known)
        # The median is not computed where fewer than half have grown so much.
        have_grown = count >= _FEWEST and 2 * np.count_nonzero(growth > _ALL_GROWN) >= count
        if not have_grown or np.median(growth[known]) <= _ALL_GROWN:
            seen = np.isnan(self._norms) | (norms > 0)
            self._norms = np.where(seen, norms, self._norms)
            return False, None
        least, next_least = np.sort(growth[known])[:2]
        if next_least - least <= _FAR_LESS:
            return True, None
        return True, modules.names[int(np.where(known, growth, np.inf).argmin())]

    def _first_grown_output(self, record: StepRecord) -> str | None:
        first = None
        for output, tensor in record.outputs.items():
            rms = tensor.sketch.rms
            before = self._outputs.get(output)
            if before is not None and rms > _GROWN * before:
                first = first if first is not None else output.module_name
            elif 0 < rms < math.inf:
                self._outputs[output] = rms
        return first


_FEWEST = 3  # fewer modules have no majority; tried 1 and 6
_NEARLY_GROWN = 9.9  # a little less than 10**_ALL_GROWN, for a quick look
_ALL_GROWN = 1.0  # ten times, by eye; tried 0.5 and 2
_FAR_LESS = 1.0  # by eye; tried 0.5 and 2
_GROWN = 10.0  # by eye; tried 2 and 50


def _alert(
    record: StepRecord, *, module_name: str | None, value: float, threshold: float, seen: str
) -> Alert:
    where = f", most likely because of {called(module_name)}" if module_name else ""
    return Alert(
        kind=ExplodingGradient.name,
        severity="error",
        step=record.step,
        module_name=module_name,
        value=value,
        threshold=threshold,
        message=(
            f"{seen}{where}.\n"
            "People usually clip gradients (clip_grad_norm_), lower the learning rate or warm it "
            "up, check the batch and the initialization, and add normalization."
        ),
    )

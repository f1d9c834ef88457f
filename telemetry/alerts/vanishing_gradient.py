"""Layers whose gradients are so much smaller than the others' that they do not learn."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.alerts.course import FAR_ABOVE, CourseRule
from telemetry.alerts.episode import CALM_STEPS, Episode
from telemetry.alerts.growth import Stretch
from telemetry.alerts.modules import Modules, Shares
from telemetry.plain_text import called
from telemetry.records import StepRecord


class VanishingGradient(CourseRule):
    """Compares the modules' gradient norms with the largest of them, at each step.

    Where that has exploded, what it was before counts.

    A module's gradient has vanished when its norm is below 1 / ``factor`` of the largest for
    ``steps`` steps in a row, and its update ratio below 1 / ``update_factor`` of the largest at the
    last full measurement. Norms are compared rather than RMS, which is small anyway in wide layers
    and in embeddings with unused rows.

    Gradients vanish on their way back, so all layers from some layer down to the first are
    affected. If layers before it learn, a module is on a side branch (attention scores, gates,
    experts): then both ratios must be ``branch_factor`` smaller, for ``branch_steps`` steps; and
    if the module had a gradient before, the loss must have risen when it lost it.

    A gradient that is exactly zero has vanished altogether, if a full measurement shows that the
    module ran and requires one: its state is forgotten, its output is detached, the gradient is too
    small for a number. This must last ``zero_steps`` steps, while layers behind the module learn.
    If layers before it do, too, it must have no gradient at all, and ``zero_share`` of the
    trainable elements: the weight of a term of the loss may be zero, experts are chosen rarely.

    Silent where all norms are small together, because the loss is small or has a large unit; where
    an optimizer that scales its steps (Adam) moves the module nevertheless; where a small norm was
    exactly zero within the last ten steps (an expert that is not chosen); where the norm is still
    rising, as in branches whose scale begins at zero.

    Args:
        factor: Ratio of the gradient norms.
        update_factor: Ratio of the update ratios.
        branch_factor: Additional factor on both for a side branch.
        steps: Number of steps in a row.
        branch_steps: The same for a side branch.
        zero_steps: The same for a gradient of exactly zero.
        zero_share: Share of the trainable elements of a side branch whose gradient is that.
    """

    name = "vanishing_gradient"
    _modules: Modules
    _state: Shares
    _undecided: bool
    _episode: Episode

    def __init__(
        self,
        *,
        factor: float = 300.0,  # at 30 the healthy cnn_sigmoid_ok alarms; tried 3000
        update_factor: float = 300.0,  # by eye, as factor; tried 30 and 3000
        branch_factor: float = 30.0,  # by eye; tried 3 and 300
        steps: int = 3,  # at 6 mlp_overwrite_tiny is missed; tried 1
        branch_steps: int = 10,  # by eye; tried 5 and 20
        # Zero at the first step alone are lora and resnet_zero_gamma, at every other one gan_ring.
        zero_steps: int = 20,
        zero_share: float = 0.2,  # as in UntrainedParameters; multitask_switch has a tenth
    ) -> None:
        super().__init__()
        self._decades = math.log10(factor)
        self._update_decades = math.log10(update_factor)
        self._branch_decades = math.log10(branch_factor)
        self._steps = steps
        self._branch_steps = branch_steps
        self._zero_steps = zero_steps
        self._zero_share = zero_share
        self._modules = Modules()
        self._state = Shares.of(0)
        self._undecided = False
        self._episode = Episode(CALM_STEPS)

    @property
    def wants_full(self) -> bool:
        """Whether the update ratio of a module with a small gradient is unknown."""
        return self._undecided and not self._episode.is_on

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.course.follow(record)
        modules = self._follow(record)
        state = self._state
        norms = record.owner_grad_norms
        largest = float(norms.max(initial=0.0))
        if not 0 < largest < np.inf or not record.all_grads_finite:
            return ()
        with np.errstate(divide="ignore"):
            share = np.log10(norms / largest) + self._exploded_decades
        state.add(share, -self._decades, self.course.loss.is_worse)
        if record.update_ratios:
            state.update_share = _update_share(modules, record)
        self._undecided = False
        found = None
        if state.faint_steps.any():
            faint = (state.faint_steps > 0) & (state.since_zero > _SINCE_ZERO)
            self._undecided = bool((faint & np.isnan(state.update_share)).any())
            fading = self._from_the_first(faint, share, norms > 0) | self._on_branches(faint, share)
            found = self._alert(record, modules, share, fading) if fading.any() else None
        never = state.largest_share == -np.inf
        self._undecided |= bool((never & (state.zero_steps == self._zero_steps)).any())
        if found is None and record.full:
            found = self._zero(record, modules)
        if found is None and self._lasts(modules, norms):
            return ()
        return self._episode.update(record.step, found)

    @property
    def _exploded_decades(self) -> float:
        """How far the norms are beyond what they were: others only seem so much smaller."""
        far_above = self.course.norm.far_above
        return far_above if far_above >= FAR_ABOVE else 0.0

    def _lasts(self, modules: Modules, norms: NDArray[np.float64]) -> bool:
        """Whether the gradient that was reported is still small, or has become zero."""
        name = self._episode.module_name
        if name not in modules.names:
            return False
        at, state = modules.names.index(name), self._state
        moves = bool(state.update_share[at] >= -self._update_decades)
        return bool(norms[at] == 0 or (state.faint_steps[at] > 0 and not moves))

    def _from_the_first(
        self, faint: NDArray[np.bool_], share: NDArray[np.float64], used: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Vanished gradients from the first module on without a gap; unused modules are no gap."""
        state = self._state
        fading = faint & (state.faint_steps >= self._steps)
        fading &= state.update_share < -self._update_decades
        fading &= np.logical_and.accumulate(fading | ~used)
        return _unless_rising(fading, share, state.mark_before)

    def _on_branches(
        self, faint: NDArray[np.bool_], share: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        state = self._state
        fading = faint & (state.faint_steps >= self._branch_steps)
        fading &= share < -self._decades - self._branch_decades
        fading &= state.update_share < -self._update_decades - self._branch_decades
        fading &= state.was_lost > 0
        # A branch whose scale begins at zero and goes up and down has had larger ones.
        small_at_first = state.first_share < -self._decades
        fading &= ~small_at_first | (share > state.largest_share - _STEADY_DECADES)
        return _unless_rising(fading, share, state.first_share)

    def _zero(self, record: StepRecord, modules: Modules) -> Alert | None:
        """Modules that ran and have had no gradient for long, though layers behind them have."""
        zero = self._state.zero_steps >= self._zero_steps
        if not zero.any() or len(record.trainable) != len(record.grad_present):
            return None
        ran = np.array([name in record.activations for name in modules.names])
        # Where gradients come and no optimizer takes them, untrained_parameters tells that.
        idle = modules.any_of(record.reached & ~record.grad_present)
        # What belongs to another optimizer may have its turn later, as the generator of a GAN.
        counts = modules.any_of(record.trainable & record.held) & ran & ~idle
        gone = zero & counts
        gone[np.flatnonzero(~zero)[-1] :] = False
        first = gone & np.logical_and.accumulate(gone | ~counts)
        branch, sizes = gone & ~first & ~modules.any_of(record.reached), modules.sizes()
        if sizes[branch].sum() < self._zero_share * sizes[modules.any_of(record.trainable)].sum():
            branch[:] = False
        gone = first | branch
        return self._alert_of_zero(record, modules, gone) if gone.any() else None

    def _follow(self, record: StepRecord) -> Modules:
        before = self._modules
        if before.layout is not record.layout:
            self._modules = Modules.of(record.layout)
            self._state = self._state.carried(before, self._modules)
        return self._modules

    def _alert(
        self,
        record: StepRecord,
        modules: Modules,
        share: NDArray[np.float64],
        fading: NDArray[np.bool_],
    ) -> Alert:
        first = int(np.flatnonzero(fading)[0])
        name, times = modules.names[first], 10 ** -share[first]
        return Alert(
            kind=self.name,
            severity="warning",
            step=record.step,
            module_name=name,
            value=float(10 ** share[first]),
            threshold=10**-self._decades,
            message=(
                f"The gradient of {called(name)} is {times:.2g} times smaller than the largest, "
                "and the optimizer hardly moves it; the same holds for "
                f"{int(fading.sum())} of {len(share)} layers.\n"
                "People usually replace sigmoid and tanh by ReLU or GELU, add normalization or "
                "skip connections, and use He or Xavier initialization."
            ),
        )

    def _alert_of_zero(
        self, record: StepRecord, modules: Modules, gone: NDArray[np.bool_]
    ) -> Alert:
        names = [name for name, is_gone in zip(modules.names, gone, strict=True) if is_gone]
        return Alert(
            kind=self.name,
            severity="warning",
            step=record.step,
            module_name=names[0],
            value=0.0,
            threshold=10**-self._decades,
            message=(
                f"No gradient reaches {Stretch(names[0], names[-1])}: for "
                f"{int(self._state.zero_steps[gone].min())} steps "
                f"it is exactly zero, while layers behind learn ({len(names)} of {len(gone)} do "
                "not).\n"
                "Check what lies between: detach(), no_grad(), a state that is not handed on, a "
                "factor of zero, activations that let nothing through; a part that should stay as "
                "it is is better frozen by requires_grad_(False)."
            ),
        )


_SINCE_ZERO = 10  # by eye, in steps; tried 2 and 50
_RISING_DECADES = 0.2  # by eye; tried 0.04 and 1
_STEADY_DECADES = 0.5  # by eye; tried 0.1 and 2.5


def _unless_rising(
    fading: NDArray[np.bool_], share: NDArray[np.float64], before: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """``fading``, or none if their shares rise on average, as in branches that begin at zero."""
    known = fading & np.isfinite(before)
    rising = known.any() and (share[known] - before[known]).mean() > _RISING_DECADES
    return np.zeros_like(fading) if rising else fading


def _update_share(modules: Modules, record: StepRecord) -> NDArray[np.float64]:
    ratios = modules.update_ratios(record)
    moved = ratios[np.isfinite(ratios)]
    if not moved.size or moved.max() <= 0:
        return np.full(len(ratios), np.nan)
    with np.errstate(divide="ignore"):
        result: NDArray[np.float64] = np.log10(ratios / moved.max())
    return result

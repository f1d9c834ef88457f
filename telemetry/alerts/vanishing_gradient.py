"""Layers whose gradients are so much smaller than the others' that they do not learn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.alerts.course import CourseRule
from telemetry.alerts.episode import Episode
from telemetry.alerts.history import leading
from telemetry.alerts.modules import Modules
from telemetry.plain_text import called
from telemetry.records import LightSteps, StepRecord


class VanishingGradient(CourseRule):
    """Compares the modules' gradient norms with the largest of them, at each step.

    A module's gradient has vanished when its norm is below 1 / ``factor`` of the largest for
    ``steps`` steps in a row, and its update ratio below 1 / ``update_factor`` of the largest at the
    last full measurement. Norms are compared rather than RMS, which is small anyway in wide layers
    and in embeddings with unused rows.

    Gradients vanish on their way back, so all layers from some layer down to the first are
    affected. If layers before it learn, a module is on a side branch (attention scores, gates,
    experts): then both ratios must be ``branch_factor`` smaller, for ``branch_steps`` steps; and
    if the module had a gradient before, the loss must have risen when it lost it.

    Silent where all norms are small together, because the loss is small or has a large unit; where
    an optimizer that scales its steps (Adam) moves the module nevertheless; where the norm was
    exactly zero within the last ten steps (frozen, unused, an expert that is not chosen, or dead,
    which has its own rule); where the norm is still rising, as in branches whose scale begins at
    zero.

    Args:
        factor: Ratio of the gradient norms.
        update_factor: Ratio of the update ratios.
        branch_factor: Additional factor on both for a side branch.
        steps: Number of steps in a row.
        branch_steps: The same for a side branch.
    """

    name = "vanishing_gradient"
    _modules: Modules
    _state: _State
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
    ) -> None:
        super().__init__()
        self._decades = math.log10(factor)
        self._update_decades = math.log10(update_factor)
        self._branch_decades = math.log10(branch_factor)
        self._steps = steps
        self._branch_steps = branch_steps
        self._modules = Modules()
        self._state = _State.of(0)
        self._undecided = False
        self._episode = Episode(_CALM_STEPS)

    @property
    def wants_full(self) -> bool:
        """Whether the update ratio of a module with a small gradient is unknown."""
        return self._undecided and not self._episode.is_on

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.course.follow(record)
        modules = self._follow(record)
        state = self._state
        norms = modules.grad_norms(record)
        largest = float(norms.max(initial=0.0))
        if not 0 < largest < np.inf or not record.all_grads_finite:
            return ()
        with np.errstate(divide="ignore"):
            share = np.log10(norms / largest)
        state.add(share, -self._decades, self.course.loss.is_worse)
        if record.update_ratios:
            state.update_share = _update_share(modules, record)
        if not state.faint_steps.any():
            self._undecided = False
            return self._episode.update(record.step, None)
        faint = (state.faint_steps > 0) & (state.since_zero > _SINCE_ZERO)
        self._undecided = bool((faint & np.isnan(state.update_share)).any())
        fading = self._from_the_first(faint, share, norms > 0) | self._on_branches(faint, share)
        found = self._alert(record, modules, share, fading) if fading.any() else None
        return self._episode.update(record.step, found)

    def quiet_steps(self, steps: LightSteps) -> int:
        unknown = self._modules.layout is not steps.layout
        if unknown or self._episode.is_on or self._state.faint_steps.any():
            return 0
        norms = self._modules.grad_norms(steps)
        largest = norms.max(axis=1, initial=0.0)
        # Not so where the largest norm is zero, infinite or NaN.
        fine = (largest > 0) & (largest < np.inf)
        limits = 10 ** (_NEARLY_FAINT - self._decades) * largest
        if norms.min(initial=np.inf) <= limits.max():
            fine &= ~((norms > 0) & (norms <= limits[:, np.newaxis])).any(axis=1)
        return min(super().quiet_steps(steps), leading(fine))

    def pass_over(self, steps: LightSteps) -> None:
        super().pass_over(steps)
        self._undecided = False
        norms = self._modules.grad_norms(steps)
        with np.errstate(divide="ignore"):
            self._state.add_quiet(np.log10(norms / norms.max(axis=1, keepdims=True)))

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


@dataclass(kw_only=True)
class _State:
    """What the rule remembers of each module; all arrays float64 ``[modules]``.

    A module's share is log10 of its gradient norm over the largest.

    Attributes:
        faint_steps: Number of steps in a row at which its share was small and its norm not zero.
        since_zero: Steps since its norm was zero.
        first_share: Its share when it was first not zero.
        largest_share: Its largest share so far.
        last_mark: Its share when ``faint_steps`` was last a power of two.
        mark_before: Its share at the power of two before.
        was_lost: 1 if it was small from the first, or the loss rose when it became so.
        update_share: log10 of its update ratio over the largest; NaN if unknown.
    """

    faint_steps: NDArray[np.float64]
    since_zero: NDArray[np.float64]
    first_share: NDArray[np.float64]
    largest_share: NDArray[np.float64]
    last_mark: NDArray[np.float64]
    mark_before: NDArray[np.float64]
    was_lost: NDArray[np.float64]
    update_share: NDArray[np.float64]

    @staticmethod
    def of(count: int) -> _State:
        """The state of modules that were not seen before."""
        return _State(**{f.name: np.full(count, _FILLS[f.name]) for f in fields(_State)})

    def carried(self, before: Modules, after: Modules) -> _State:
        """The state for the modules of another layout."""
        return _State(
            **{
                f.name: after.carry(getattr(self, f.name), before.names, _FILLS[f.name])
                for f in fields(_State)
            }
        )

    def add(self, share: NDArray[np.float64], limit: float, loss_is_worse: bool) -> None:
        """Add the shares of one step; ``-inf`` where the norm is zero."""
        zero = share == -np.inf
        self.since_zero = np.where(zero, 0.0, self.since_zero + 1)
        self.first_share = np.where(zero | ~np.isnan(self.first_share), self.first_share, share)
        self.largest_share = np.fmax(self.largest_share, share)
        faint = ~zero & (share < limit)
        self.update_share = np.where(faint, self.update_share, np.nan)
        if not (faint.any() or self.faint_steps.any()):
            # The usual case, in short: what follows would do the same.
            self.mark_before, self.last_mark = self.last_mark, share
            return
        self.faint_steps = np.where(faint, self.faint_steps + 1, 0.0)
        lost = (self.first_share < limit) | loss_is_worse | (self.was_lost > 0)
        self.was_lost = np.where(faint & lost, 1.0, 0.0)
        marked = np.log2(np.maximum(self.faint_steps, 1)) % 1 == 0
        self.mark_before = np.where(marked, self.last_mark, self.mark_before)
        self.last_mark = np.where(marked, share, self.last_mark)

    def add_quiet(self, shares: NDArray[np.float64]) -> None:
        """Add several steps at which no share is or was small, ``[n, modules]``."""
        zero = shares == -np.inf
        self.since_zero = self.since_zero + len(shares)
        if zero.any():
            since = zero[::-1].argmax(axis=0)
            self.since_zero = np.where(zero.any(axis=0), since, self.since_zero)
        if np.isnan(self.first_share).any():
            first = shares[(~zero).argmax(axis=0), np.arange(shares.shape[1])]
            known = ~np.isnan(self.first_share) | (first == -np.inf)
            self.first_share = np.where(known, self.first_share, first)
        self.largest_share = np.fmax(self.largest_share, shares.max(axis=0))
        self.update_share = np.full_like(self.update_share, np.nan)
        self.mark_before = shares[-2] if len(shares) > 1 else self.last_mark
        self.last_mark = shares[-1]


_FILLS = {
    "faint_steps": 0.0,
    "since_zero": np.inf,
    "first_share": np.nan,
    "largest_share": -np.inf,
    "last_mark": np.nan,
    "mark_before": np.nan,
    "was_lost": 0.0,
    "update_share": np.nan,
}
_NEARLY_FAINT = 0.01  # decades that are left to a closer look
_SINCE_ZERO = 10  # by eye, in steps; tried 2 and 50
_RISING_DECADES = 0.2  # by eye; tried 0.04 and 1
_STEADY_DECADES = 0.5  # by eye; tried 0.1 and 2.5
_CALM_STEPS = 20  # by eye


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

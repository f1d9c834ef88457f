"""Layers whose gradients are so much smaller than the others' that they do not learn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.alerts.course import FAR_ABOVE
from telemetry.alerts.episode import CALM_STEPS, EpisodeRule
from telemetry.alerts.growth import Stretch
from telemetry.alerts.history import carried
from telemetry.layers import table
from telemetry.records import StepRecord
from telemetry.shared.plain_text import called


class VanishingGradient(EpisodeRule):
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
    factor = 300.0  # at 30 the healthy cnn_sigmoid_ok alarms; tried 3000
    update_factor = 300.0  # by eye, as factor; tried 30 and 3000
    branch_factor = 30.0  # by eye; tried 3 and 300
    steps = 3  # at 6 mlp_overwrite_tiny is missed; tried 1
    branch_steps = 10  # by eye; tried 5 and 20
    # Zero at the first step alone are lora and resnet_zero_gamma, at every other one gan_ring.
    zero_steps = 20
    zero_share = 0.2  # as in UntrainedParameters; multitask_switch has a tenth
    _calm = CALM_STEPS
    _names: tuple[str, ...] = ()
    _state: Shares
    _undecided: bool = False

    def _set_up(self) -> None:
        self._decades = math.log10(self.factor)
        self._update_decades = math.log10(self.update_factor)
        self._branch_decades = math.log10(self.branch_factor)
        self._state = Shares.of((), (), {})

    @property
    def wants_full(self) -> bool:
        """Whether the update ratio of a module with a small gradient is unknown."""
        return self._undecided and not self._episode.is_on

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.course.follow(record)
        names = record.layout.owner_names
        if names is not self._names:
            self._state = Shares.of(names, self._names, vars(self._state))
            self._names = names
        state, norms = self._state, record.owner_grad_norms
        largest = norms[norms.argmax()] if norms.size else 0.0
        if not 0 < largest < np.inf or not record.all_grads_finite:
            return ()
        with np.errstate(divide="ignore"):
            share = np.log10(norms / largest)
        if exploded := self._exploded_decades:
            share += exploded
        state.add(share, -self._decades, self.course.loss.is_worse)
        if record.update_ratios:
            state.update_share = np.where(state.faint_steps > 0, _update_share(record), np.nan)
        self._undecided = False
        found = None
        if not state.are_large:
            faint = (state.faint_steps > 0) & (state.since_zero > _SINCE_ZERO)
            if np.count_nonzero(faint):
                fading = self._from_the_first(faint, share, norms > 0)
                fading |= self._on_branches(faint, share)
                found = self._found(record, share, fading) if fading.any() else None
                self._undecided = bool((faint & np.isnan(state.update_share)).any())
        if not state.are_used:
            never = (state.largest_share == -np.inf) & (state.zero_steps == self.zero_steps)
            self._undecided |= bool(never.any())
            if found is None and record.full:
                found = self._zero(record)
        if found is None and self._lasts(norms):
            return ()
        return self._episode.update(record.step, found)

    @property
    def _exploded_decades(self) -> float:
        """How far the norms are beyond what they were: others only seem so much smaller."""
        far_above = self.course.norm.far_above
        return far_above if far_above >= FAR_ABOVE else 0.0

    def _lasts(self, norms: NDArray[np.float64]) -> bool:
        """Whether the gradient that was reported is still small, or has become zero."""
        name, state = self._episode.module_name, self._state
        if name is None or name not in self._names:
            return False
        at = self._names.index(name)
        moves = bool(state.update_share[at] >= -self._update_decades)
        return bool(norms[at] == 0 or (state.faint_steps[at] > 0 and not moves))

    def _from_the_first(
        self, faint: NDArray[np.bool_], share: NDArray[np.float64], used: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Vanished gradients from the first module on without a gap; unused modules are no gap."""
        state = self._state
        fading = faint & (state.faint_steps >= self.steps)
        fading &= state.update_share < -self._update_decades
        fading &= np.logical_and.accumulate(fading | ~used)
        return _unless_rising(fading, share, state.mark_before)

    def _on_branches(
        self, faint: NDArray[np.bool_], share: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        state = self._state
        fading = faint & (state.faint_steps >= self.branch_steps)
        fading &= share < -self._decades - self._branch_decades
        fading &= state.update_share < -self._update_decades - self._branch_decades
        fading &= state.was_lost > 0
        # A branch whose scale begins at zero and goes up and down has had larger ones.
        small_at_first = state.first_share < -self._decades
        fading &= ~small_at_first | (share > state.largest_share - _STEADY_DECADES)
        return _unless_rising(fading, share, state.first_share)

    def _zero(self, record: StepRecord) -> Alert | None:
        """Modules that ran and have had no gradient for long, though layers behind them have."""
        zero = self._state.zero_steps >= self.zero_steps
        if not zero.any() or len(record.trainable) != len(record.grad_present):
            return None
        layout = record.layout

        def holds(parameters: NDArray[np.bool_]) -> NDArray[np.bool_]:
            """For each module whether it holds for any of its parameters."""
            return np.isin(layout.owning, layout.owners[parameters])

        ran = np.array([name in record.activations for name in self._names])
        # Where gradients come and no optimizer takes them, untrained_parameters tells that.
        idle = holds(record.reached & ~record.grad_present)
        # What belongs to another optimizer may have its turn later, as the generator of a GAN.
        counts = holds(record.trainable & record.held) & ran & ~idle
        gone = zero & counts
        gone[np.flatnonzero(~zero)[-1] :] = False
        first = gone & np.logical_and.accumulate(gone | ~counts)
        branch = gone & ~first & ~holds(record.reached)
        elements = [parameter.size for parameter in layout.parameters]
        sizes = np.bincount(layout.owners, elements)[layout.owning]
        if sizes[branch].sum() < self.zero_share * sizes[holds(record.trainable)].sum():
            branch[:] = False
        gone = first | branch
        return self._found_zero(record, gone) if gone.any() else None

    def _found(
        self, record: StepRecord, share: NDArray[np.float64], fading: NDArray[np.bool_]
    ) -> Alert:
        first = int(np.flatnonzero(fading)[0])
        name, times = self._names[first], 10 ** -share[first]
        message = (
            f"The gradient of {called(name)} is {times:.2g} times smaller than the largest, "
            "and the optimizer hardly moves it; the same holds for "
            f"{int(fading.sum())} of {len(share)} layers.\n"
            "People usually replace sigmoid and tanh by ReLU or GELU, add normalization or skip "
            "connections, and use He or Xavier initialization."
        )
        value, limit = float(10 ** share[first]), 10**-self._decades
        return self._alert(record.step, name, value, limit, message)

    def _found_zero(self, record: StepRecord, gone: NDArray[np.bool_]) -> Alert:
        names = [name for name, is_gone in zip(self._names, gone, strict=True) if is_gone]
        steps = int(self._state.zero_steps[gone].min())
        message = (
            f"No gradient reaches {Stretch(names[0], names[-1])}: for {steps} steps it is exactly "
            f"zero, while layers behind learn ({len(names)} of {len(gone)} do not).\n"
            "Check what lies between: detach(), no_grad(), a state that is not handed on, a factor "
            "of zero, activations that let nothing through; a part that should stay as it is is "
            "better frozen by requires_grad_(False)."
        )
        return self._alert(record.step, names[0], 0.0, 10**-self._decades, message)


@dataclass(kw_only=True)
class Shares:
    """What the rule remembers of each module; all arrays float64 ``[modules]``.

    A module's share is log10 of its gradient norm over the largest.

    Attributes:
        faint_steps: Number of steps in a row at which its share was small and its norm not zero.
        since_zero: Steps since its norm was zero.
        zero_steps: Number of steps in a row at which it was, and that of others was not.
        first_share: Its share when it was first not zero.
        largest_share: Its largest share so far.
        last_mark: Its share when ``faint_steps`` was last a power of two.
        mark_before: Its share at the power of two before.
        was_lost: 1 if it was small from the first, or the loss rose when it became so.
        update_share: log10 of its update ratio over the largest; NaN if unknown, or not small.
        are_used: Whether no norm is zero.
        are_large: Whether no share is small but that of a norm which is zero.
    """

    faint_steps: NDArray[np.float64]
    since_zero: NDArray[np.float64]
    zero_steps: NDArray[np.float64]
    first_share: NDArray[np.float64]
    largest_share: NDArray[np.float64]
    last_mark: NDArray[np.float64]
    mark_before: NDArray[np.float64]
    was_lost: NDArray[np.float64]
    update_share: NDArray[np.float64]
    are_used: bool = False
    are_large: bool = False

    @staticmethod
    def of(names: Sequence[str], before: Sequence[str], state: Mapping[str, Any]) -> Shares:
        """The state for the layers of another layout."""
        arrays: dict[str, Any] = {
            name: carried(state.get(name, _NONE), before, names, fill)
            for name, fill in _FILLS.items()
        }
        return Shares(**arrays)

    def add(self, share: NDArray[np.float64], limit: float, loss_is_worse: bool) -> None:
        """Add the shares of one step; ``-inf`` where the norm is zero."""
        zero, small = share == -np.inf, share < limit
        self.since_zero += 1
        np.fmax(self.largest_share, share, out=self.largest_share)
        zeros, was_large = int(np.count_nonzero(zero)), self.are_large
        if zeros or not self.are_used:
            self.since_zero[zero] = 0.0
            self.zero_steps = np.where(zero, self.zero_steps + 1, 0.0)
            self.first_share = np.where(zero | ~np.isnan(self.first_share), self.first_share, share)
        self.are_used, self.are_large = zeros == 0, int(np.count_nonzero(small)) == zeros
        if was_large and self.are_large:  # then all the rest is as it was
            self.mark_before, self.last_mark = self.last_mark, share
            return
        faint = small & ~zero
        self.update_share[~faint] = np.nan
        self.faint_steps = np.where(faint, self.faint_steps + 1, 0.0)
        lost = (self.first_share < limit) | loss_is_worse | (self.was_lost > 0)
        self.was_lost = np.where(faint & lost, 1.0, 0.0)
        marked = np.log2(np.maximum(self.faint_steps, 1)) % 1 == 0
        self.mark_before = np.where(marked, self.last_mark, self.mark_before)
        self.last_mark = np.where(marked, share, self.last_mark)


_FILLS = {
    "faint_steps": 0.0,
    "since_zero": np.inf,
    "zero_steps": 0.0,
    "first_share": np.nan,
    "largest_share": -np.inf,
    "last_mark": np.nan,
    "mark_before": np.nan,
    "was_lost": 0.0,
    "update_share": np.nan,
}
_NONE = np.zeros(0)

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


def _update_share(record: StepRecord) -> NDArray[np.float64]:
    ratios = table(record).column("update_ratio")[record.layout.owning]
    moved = ratios[np.isfinite(ratios)]
    if not moved.size or moved.max() <= 0:
        return np.full(len(ratios), np.nan)
    with np.errstate(divide="ignore"):
        result: NDArray[np.float64] = np.log10(ratios / moved.max())
    return result

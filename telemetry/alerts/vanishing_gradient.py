"""Layers whose gradients are so much smaller than the others' that they do not learn."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from telemetry.alerts.baseline import FAR_ABOVE, FEWEST, Baseline, Figures, Marks
from telemetry.alerts.detector import EXPLOSIONS, RISEN_LOSSES, Detector, Finding
from telemetry.alerts.growth import Stretch
from telemetry.layers import table
from telemetry.plain_text import called
from telemetry.records import Layout, StepRecord


class VanishingGradient(Detector):
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

    A gradient that is exactly zero has vanished altogether, if two full measurements show that the
    module ran and requires one: its state is forgotten, its output is detached, the gradient is too
    small for a number. This must last ``zero_steps`` steps, while layers behind the module learn.
    If layers before it do, too, it must have no gradient at all, and ``zero_share`` of the
    trainable elements: the weight of a term of the loss may be zero, experts are chosen rarely.

    An optimizer that scales its steps (Adam) moves a module nevertheless. Then its gradient must be
    ``branch_factor`` smaller still, and the loss not have fallen in the first ``stuck_steps``.

    If matrices began far smaller than most, it takes ``branch_steps`` steps, and what they move by
    is not compared with: the last layer of a policy, which hands back little at first.

    Silent where all norms are small together, because the loss is small or has a large unit; where
    a small norm was exactly zero within the last ten steps (an expert that is not chosen); where
    the norm is still rising, as in branches whose scale begins at zero.
    """

    kind = "vanishing_gradient"
    clear_after = 20
    explained_by = (
        EXPLOSIONS
        | RISEN_LOSSES
        | {"dead_units", "saturated_units", "untrained_parameters", "exponential_trend"}
    )
    persistent = True
    factor = 300.0  # at 30 the healthy cnn_sigmoid_ok alarms; tried 3000
    update_factor = 300.0  # as factor; tried 30 and 3000
    branch_factor = 30.0  # by eye; tried 3 and 300
    steps = 3  # at 6 mlp_overwrite_tiny is missed; tried 1
    stuck_steps = 50  # by eye; tried 20
    branch_steps = 10  # by eye; tried 5 and 20
    # Zero at the first step alone are lora and resnet_zero_gamma, at every other one gan_ring.
    zero_steps = 20
    zero_share = 0.2  # as in UntrainedParameters; multitask_switch has a tenth
    _names: tuple[str, ...] = ()
    _zero_looks: int = 0
    # A module's share is log10 of its gradient norm over the largest.
    _faint_steps: Figures  # for how many steps in a row it was small and not zero
    _zero_steps: Figures  # and for how many zero
    _first: Figures  # share that was not zero
    _largest: Figures
    # Whether it ran and could learn at the last full step, unlike what is frozen or was not chosen.
    _counted: Marks
    _update_share: Figures  # log10 of the ratio over the largest at the last full step, while small

    def set_up(self) -> None:
        self._begin(())

    def _begin(self, names: tuple[str, ...]) -> None:
        """Forget all: these are other modules."""
        self._names = names
        self._faint_steps, self._zero_steps = np.zeros((2, len(names)))
        self._first, self._update_share = np.full((2, len(names)), np.nan)
        self._largest = np.full(len(names), -np.inf)
        self._counted = np.ones(len(names), bool)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        self.needs_full_step = False
        if not _is_known(record):
            return None
        if baseline.layers.names != self._names:
            self._begin(baseline.layers.names)
        share = baseline.layers.levels[-1] - baseline.layers.levels[-1].max()
        if baseline.norm.far_above >= FAR_ABOVE:  # others only seem so much smaller
            share += baseline.norm.far_above
        zero, limit = share == -np.inf, -math.log10(self.factor)
        faint = (share < limit) & ~zero
        self._first = np.where(np.isnan(self._first) & ~zero, share, self._first)
        self._largest = np.maximum(self._largest, share)
        self._faint_steps = np.where(faint, self._faint_steps + 1, 0.0)
        self._zero_steps = np.where(zero, self._zero_steps + 1, 0.0)
        found = self._small(record, baseline, share, faint) if faint.any() else None
        self.full_steps_in_a_row = _ZERO_LOOKS if zero.any() and not self.needs_full_step else 1
        gone = self._zero(record) if record.full else None
        if found is not None or gone is not None or record.full or not zero.any():
            return found or gone
        lasted = self._zero_steps - self.zero_steps
        is_new = (self._counted & (lasted >= 0) & (lasted < _ZERO_LOOKS)).any()
        if self.active_alert is None and is_new:
            self.needs_full_step |= self._may_be_gone(record.layout, zero)
        return None

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        name = self.active_alert.module_name if self.active_alert is not None else None
        if not _is_known(record) or name not in self._names:
            return name in self._names
        at = self._names.index(name)
        moves = bool(-math.log10(self.update_factor) <= self._update_share[at] < math.inf)
        return bool(self._zero_steps[at] > 0 or (self._faint_steps[at] > 0 and not moves))

    def _small(
        self, record: StepRecord, baseline: Baseline, share: Figures, faint: Marks
    ) -> Finding | None:
        """Modules whose gradients are small and not zero."""
        update_limit, small = -math.log10(self.update_factor), baseline.began_small
        updates = self._update_share
        if record.update_ratios:  # one that has none now will have none later, either
            updates = np.nan_to_num(_update_share(record, small), nan=np.inf, neginf=-np.inf)
        self._update_share = np.where(faint, updates, np.nan)
        levels = baseline.layers.levels
        faint = faint & ~(levels[-FEWEST:] == -np.inf).any(axis=0)
        fading = self._fading(baseline, share, faint, self._update_share, soon=0)
        unknown = np.where(np.isnan(self._update_share), -np.inf, self._update_share)
        might = faint & np.isnan(self._update_share)
        if self.active_alert is None and not fading.any() and might.any():
            might &= self._fading(baseline, share, faint, unknown, soon=_SOON)
            self.needs_full_step = bool(might.any())
        if not fading.any():
            return None
        first = int(np.flatnonzero(fading)[0])
        moves = bool(update_limit <= self._update_share[first] < math.inf)
        what = "the loss has not fallen so far" if moves else "the optimizer hardly moves it"
        return Finding(
            summary=f"The gradient of {called(self._names[first])} is {10 ** -share[first]:.2g} "
            f"times smaller than the largest, and {what}; the same holds for "
            f"{int(fading.sum())} of {len(share)} layers",
            advice=(
                "People usually replace sigmoid and tanh by ReLU or GELU, add normalization or "
                "skip connections, and use He or Xavier initialization.",
            ),
            value=float(10 ** share[first]),
            threshold=1 / self.factor,
            module_name=self._names[first],
        )

    def _fading(
        self, baseline: Baseline, share: Figures, faint: Marks, updates: Figures, *, soon: int
    ) -> Marks:
        """Modules that have vanished, if these are their update ratios; so many steps ahead."""
        limit, update_limit = -math.log10(self.factor), -math.log10(self.update_factor)
        levels, rows = baseline.layers.levels, len(baseline.layers.levels) - 1
        steps = self.branch_steps if baseline.began_small else self.steps
        lasted = self._faint_steps + soon
        fading = faint & (lasted >= steps) & (updates < update_limit)
        fading &= np.logical_and.accumulate(fading | (share == -np.inf))  # no gap from the first on
        # The middle of the steps in which each has been small.
        middle = rows - np.minimum((self._faint_steps.astype(int) + 1) // 2, rows)
        before = levels[middle, np.arange(len(share))] - levels.max(axis=1)[middle]
        fading = _unless_rising(fading, share, before)

        further = math.log10(self.branch_factor)
        stuck = faint & (lasted >= self.stuck_steps) & (share < limit - further)
        stuck &= np.logical_and.accumulate(stuck | (share == -np.inf))
        if baseline.loss.best > (1 - _FALLEN) * baseline.loss.first > 0:
            fading |= _unless_rising(stuck, share, before)
        branch = faint & (lasted >= self.branch_steps) & (share < limit - further)
        branch &= updates < update_limit - further
        # One whose scale begins at zero and goes up and down has had larger ones.
        steady = (self._first < limit) & (share > self._largest - _STEADY)
        branch &= steady | ((self._first >= limit) & baseline.loss.is_worse)
        return fading | _unless_rising(branch, share, self._first)

    def _may_be_gone(self, layout: Layout, zero: Marks) -> bool:
        """Whether :meth:`_zero` might find them, as far as the last full step says."""
        gone = zero & self._counted
        gone[np.flatnonzero(~zero)[-1] :] = False
        first = gone & np.logical_and.accumulate(gone | ~self._counted)
        sizes = np.bincount(layout.owners, layout.sizes)[layout.owning]
        share = sizes[gone].sum() / sizes[self._counted].sum() if gone.any() else 0.0
        return bool(first.any() or share >= self.zero_share)

    def _zero(self, record: StepRecord) -> Finding | None:
        """Modules that ran and have had no gradient for long, though layers behind them have."""
        if len(record.trainable) != len(record.grad_present):
            return None
        layout = record.layout

        def holds(parameters: Marks) -> Marks:
            """For each module whether it holds for any of its parameters."""
            return np.isin(layout.owning, layout.owners[parameters])

        ran = np.array([name in record.activations for name in self._names])
        # Where gradients come and no optimizer takes them, untrained_parameters tells that.
        idle = holds(record.reached & ~record.grad_present)
        # What belongs to another optimizer may have its turn later, as the generator of a GAN.
        counts = self._counted = holds(record.trainable & record.held) & ran & ~idle
        zero = self._zero_steps >= self.zero_steps
        if not zero.any():
            return None
        if record.learning_rates and not any(record.learning_rates):  # nothing learns, nor can it
            return None
        gone = zero & counts
        gone[np.flatnonzero(~zero)[-1] :] = False
        first = gone & np.logical_and.accumulate(gone | ~counts)
        branch = gone & ~first & ~holds(record.reached)
        sizes = np.bincount(layout.owners, layout.sizes)[layout.owning]
        if sizes[branch].sum() < self.zero_share * sizes[holds(record.trainable)].sum():
            branch[:] = False
        gone = first | branch
        self._zero_looks = self._zero_looks + 1 if gone.any() else 0
        self.needs_full_step |= self.active_alert is None and self._zero_looks == 1
        if self._zero_looks < _ZERO_LOOKS:  # dead units, which may be the cause, take as many
            return None
        names = [name for name, is_gone in zip(self._names, gone, strict=True) if is_gone]
        steps = int(self._zero_steps[gone].min())
        # What follows them in the same group of parameters stays zero, as in LoRA.
        rates = np.array([*record.learning_rates, math.nan])
        is_still = not np.isin(layout.owners[rates[record.groups] != 0], layout.owning[gone]).any()
        still = ". The learning rate of its parameter group is 0" if is_still else ""
        return Finding(
            summary=f"No gradient reaches {Stretch(names[0], names[-1])}: for {steps} steps it is "
            f"exactly zero, while layers behind learn ({len(names)} of {len(gone)} do not){still}",
            advice=_STILL if is_still else _CUT_OFF,
            value=0.0,
            threshold=1 / self.factor,
            module_name=names[0],
        )


_STILL = (
    "Raise the rate of that group: what has a scale that begins at 0 passes no gradient on until "
    "it moves. A part that should stay as it is is better frozen by requires_grad_(False).",
)
_CUT_OFF = (
    "Check what lies between: detach(), no_grad(), a state that is not handed on, a factor of "
    "zero, activations that let nothing through; a part that should stay as it is is better frozen "
    "by requires_grad_(False).",
)
_FALLEN = 0.03  # of the first loss, as in LossStuck
# Decades: branches whose scale begins at zero change by more. At 0.3 init_div100 is found 4 steps
# earlier.
_STEADY = 0.2
_ZERO_LOOKS = 2
_SOON = 2  # steps after which a requested measurement is there


def _is_known(record: StepRecord) -> bool:
    """Whether all gradients are finite and one is not zero."""
    return record.all_grads_finite and 0 < record.total_grad_norm < math.inf


def _unless_rising(fading: Marks, share: Figures, before: Figures) -> Marks:
    """``fading``, or none if their shares rise on average, as in branches that begin at zero."""
    known = fading & np.isfinite(before)
    growth = share[known] - before[known]
    return np.zeros_like(fading) if growth.size and growth.mean() > _STEADY else fading


def _update_share(record: StepRecord, small: Collection[str]) -> Figures:
    """log10 of the modules' update ratios over the largest of those that own matrices, if any do.

    A scale of a branch that begins near zero moves by many times its size, and so do matrices that
    began ``small``.
    """
    ratios, layout = table(record).column("update_ratio")[record.layout.owning], record.layout
    known = np.isfinite(ratios)
    own = [p.name in layout.matrices and p.module_name not in small for p in layout.parameters]
    with_matrix = known & np.isin(layout.owning, layout.owners[own])
    moved = ratios[with_matrix if with_matrix.any() else known]
    if not moved.size or moved.max() <= 0:
        return np.full(len(ratios), np.nan)
    with np.errstate(divide="ignore"):
        result: Figures = np.log10(ratios / moved.max())
    return result

"""Layers whose gradients are so small that they do not learn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import numpy as np

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline, Figures, Marks, with_matrices
from telemetry.alerts.detector import Detector, Finding, limit, state
from telemetry.alerts.exploding import Stretch
from telemetry.layers import table
from telemetry.layers.module_types import AFFINE, BOUNDED, NORMALIZATIONS, UNBOUNDED
from telemetry.plain_text import called_all, called_owner, figure
from telemetry.records import Layout, StepRecord
from telemetry.records.moments import mean_of, rms_of


class VanishingGradient(Detector):
    """Gradient norms, from some layer down to the first, stay far below the largest, and the
    optimizer moves these layers far less than others. Or they are zero for 20 steps while later
    layers learn.

    Evidence: the range of layers and the ratio of the norms.
    Causes: sigmoid or tanh, no skip connections, small initial weights; a detached branch.
    Remedies: ReLU or GELU, normalization, residual connections; look for a ``detach()``.
    Silent: frozen or unused layers, experts, zero-initialized branches, layers that Adam moves.
    Example: model = nn.Sequential(*[m for _ in range(20) for m in (nn.Linear(8, 8), nn.Sigmoid())])

    Norms are compared, not RMS, which is small in wide layers and in embeddings with unused rows.
    An exploded largest norm counts with its value before. If earlier layers learn, a module is on a
    side branch (attention scores, gates, experts); the loss must have risen when it lost its
    gradient. A zero gradient counts if two full steps show that the module ran. If matrices started
    far smaller than most, it takes ten steps without update ratios. A norm that was zero within ten
    steps, or that rises, does not count.
    """

    kind = "vanishing_gradient"
    clear_after = shared.LATEST
    explained_by = shared.DIVERGED | {
        "dead_units",
        "saturated_units",
        "untrained_parameters",
        "exponential_trend",
        "loss_stuck",
    }
    after = frozenset({"dead_units", "untrained_parameters"})
    persistent = True
    # At 30 the healthy cnn_sigmoid_ok alarms; tried 3000
    factor: float = limit(
        300.0, "Largest gradient norm over that of the module, and update ratio as well."
    )
    # At 6 mlp_overwrite_tiny is missed; tried 1
    steps: int = limit(shared.SEVERAL, "Consecutive steps.")
    # Lora and resnet_zero_gamma are zero at the first step alone, gan_ring at every other one.
    zero_steps: int = limit(shared.LATEST, "Consecutive steps with zero gradients.")
    full_steps_in_a_row: int = state(shared.AGAIN)
    _names: tuple[str, ...] = state(())
    _full_steps_gone: int = state(0)
    # A module's share is log10 of its gradient norm over the largest.
    # consecutive steps at which it was small and not zero
    _faint_steps: Figures = state(np.zeros(0))
    _zero_steps: Figures = state(np.zeros(0))  # consecutive steps at which it was zero
    _first: Figures = state(np.zeros(0))  # first share that was not zero
    _largest: Figures = state(np.zeros(0))
    # whether it ran and could learn at the last full step
    _counted: Marks = state(np.zeros(0, bool))
    # log10 of the ratio over the largest at the last full step, if small
    _update_share: Figures = state(np.zeros(0))

    def _begin(self, names: tuple[str, ...]) -> None:
        """Reset for other modules."""
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
        if baseline.norm.above_window >= shared.FAR_ABOVE:  # others seem smaller than they are
            share += baseline.norm.above_window
        zero = share == -np.inf
        faint = (share < self._limit) & ~zero
        if faint.any():
            faint &= _with_matrices(record)
        self._first = np.where(np.isnan(self._first) & ~zero, share, self._first)
        self._largest = np.maximum(self._largest, share)
        self._faint_steps = np.where(faint, self._faint_steps + 1, 0.0)
        self._zero_steps = np.where(zero, self._zero_steps + 1, 0.0)
        found = self._small(record, baseline, share, faint) if faint.any() else None
        if record.full:
            cut_off = self._zero(record)
            return found or cut_off
        lasted = self._zero_steps - self.zero_steps
        is_new = (self._counted & (lasted >= 0) & (lasted < shared.AGAIN)).any()
        self.needs_full_step |= found is None and self.active_alert is None and bool(is_new)
        return found

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        if not _is_known(record) or self._active_module not in self._names:
            return self._active_module in self._names
        at = self._names.index(self._active_module)
        moves = self._limit + _CLEARLY <= self._update_share[at] < math.inf
        return bool(self._zero_steps[at] > 0 or (self._faint_steps[at] > 0 and not moves))

    @property
    def _limit(self) -> float:
        """Largest share that is small."""
        return -math.log10(self.factor)

    def _small(
        self, record: StepRecord, baseline: Baseline, share: Figures, faint: Marks
    ) -> Finding | None:
        """Return modules whose gradients are small and not zero."""
        updates = self._update_share
        if record.update_ratios:  # one without a ratio now has none later
            shares = _update_share(record, baseline.began_small)
            updates = np.nan_to_num(shares, nan=np.inf, neginf=-np.inf)
        self._update_share = np.where(faint, updates, np.nan)
        levels = baseline.layers.levels
        faint = faint & ~(levels[-shared.FEWEST :] == -np.inf).any(axis=0)
        fading = self._fading(baseline, share, faint, self._update_share)
        if not fading.any():
            unknown = np.isnan(self._update_share)
            updates = np.where(unknown, -np.inf, self._update_share)
            might = unknown & self._fading(baseline, share, faint, updates, soon=shared.SOON)
            self.needs_full_step = self.active_alert is None and bool(might.any())
            return None
        first = int(np.flatnonzero(fading)[0])
        moves = self._limit <= self._update_share[first] < math.inf
        factor = figure(10 ** -share[first], 2)
        cause = "The loss has not fallen" if moves else "The optimizer hardly moves it"
        other = _LESS_DECAY if _is_rectified(record.layout) else _NOT_BOUNDED
        advice: tuple[str, ...] = (other, *_LARGER)
        if self._names[first] in baseline.began_zero:
            cause = f"All weights of {called_all(baseline.began_zero, shared.NAMED)} started at 0"
            advice = _LARGER[1:]
        return Finding(
            summary=f"The gradient of {called_owner(self._names[first])} is {factor}x "
            f"below the largest, as in {int(fading.sum())} of {len(share)} layers",
            cause=cause,
            advice=advice,
            value=float(10 ** share[first]),
            threshold=1 / self.factor,
            module_name=self._names[first],
        )

    def _fading(
        self, baseline: Baseline, share: Figures, faint: Marks, updates: Figures, soon: int = 0
    ) -> Marks:
        """Mark modules that have vanished with these update ratios, ``soon`` steps from now."""
        limit, further = self._limit, self._limit - math.log10(shared.THIRTYFOLD)
        levels, rows = baseline.layers.levels, len(baseline.layers.levels) - 1
        steps = shared.FEWEST if baseline.began_small else self.steps
        lasted = self._faint_steps + soon
        fading = faint & (lasted >= steps) & (updates < limit)
        fading &= np.logical_and.accumulate(fading | (share == -np.inf))  # all from the first on
        # The middle of the steps at which each was small.
        middle = rows - np.minimum((self._faint_steps.astype(int) + 1) // 2, rows)
        before = levels[middle, np.arange(len(share))] - levels.max(axis=1)[middle]
        fading = _unless_rising(fading, share, before)

        # Side branches, and layers that Adam moves, have to be far smaller for longer.
        stuck = faint & (lasted >= shared.LONG) & (share < further)
        stuck &= np.logical_and.accumulate(stuck | (share == -np.inf))
        if baseline.loss.has_not_fallen:
            fading |= _unless_rising(stuck, share, before)
        branch = faint & (lasted >= shared.FEWEST) & (np.maximum(share, updates) < further)
        # A scale that starts at zero and oscillates has had larger shares.
        steady = (self._first < limit) & (share > self._largest - _STEADY)
        branch &= steady | ((self._first >= limit) & baseline.loss.is_worse)
        return fading | _unless_rising(branch, share, self._first)

    def _zero(self, record: StepRecord) -> Finding | None:
        """Return modules that ran without a gradient for long, though later layers have one."""
        if len(record.trainable) != len(record.grad_present):
            return None
        layout = record.layout

        def holds(parameters: Marks) -> Marks:
            """Mark modules any of whose parameters is marked."""
            return np.bincount(layout.owners, parameters)[layout.owning] > 0

        ran = table(record).ran[layout.owning]
        # untrained_parameters covers gradients that no optimizer uses.
        idle = holds(record.reached & ~record.grad_present)
        # Modules of another optimizer may train later, as the generator of a GAN.
        counts = self._counted = holds(record.trainable & record.held) & ran & ~idle
        zero = self._zero_steps >= self.zero_steps
        nothing_learns = record.learning_rates and not any(record.learning_rates)
        if not zero.any() or nothing_learns:
            return None
        gone = zero & counts
        gone[np.flatnonzero(~zero)[-1] :] = False  # later ones are heads that are not used
        first = gone & np.logical_and.accumulate(gone | ~counts)
        branch = gone & ~first & ~holds(record.reached)
        sizes = np.bincount(layout.owners, layout.sizes)[layout.owning]
        if sizes[branch].sum() < shared.PART * sizes[holds(record.trainable)].sum():
            branch[:] = False
        gone = first | branch
        self._full_steps_gone = self._full_steps_gone + 1 if gone.any() else 0
        self.needs_full_step |= self.active_alert is None and self._full_steps_gone == 1
        if self._full_steps_gone < shared.AGAIN:
            return None
        names = [name for name, is_gone in zip(self._names, gone, strict=True) if is_gone]
        steps = int(self._zero_steps[gone].min())
        if not _with_zeroed_bias(record).isdisjoint(names):
            return Finding(
                summary=f"The gradient of {Stretch(names[0], names[-1])} has been 0 for {steps} "
                "steps, though that of its outputs is not",
                cause="Something sets it to 0 after it is computed",
                advice=(
                    "Remove the hook, such as zero_gradients(), if the layer should learn",
                    shared.FREEZE,
                ),
                value=0.0,
                threshold=1 / self.factor,
                module_name=names[0],
                severity="note",  # it is not by chance
            )
        # Later layers in the same parameter group stay zero, as in LoRA.
        moved = layout.owners[record.parameter_rates != 0]
        is_still = not np.isin(moved, layout.owning[gone]).any()
        return Finding(
            summary=f"No gradient reaches {Stretch(names[0], names[-1])} for {steps} steps, while "
            f"later layers learn ({len(names)} of {len(gone)} do not)",
            cause="The learning rate of its parameter group is 0" if is_still else None,
            advice=_STILL if is_still else _CUT_OFF,
            value=0.0,
            threshold=1 / self.factor,
            module_name=names[0],
        )


_NOT_BOUNDED = "Replace sigmoid and tanh by ReLU or GELU"
_LESS_DECAY = "Lower the weight decay if there is one: it makes weights and gradients small"
_LARGER = ("Add normalization or skip connections", "Use He or Xavier initialization")
_STILL: tuple[str, ...] = (
    "Raise the learning rate of that group: a scale that starts at 0 passes no gradient",
    shared.FREEZE,
)
_CUT_OFF = (
    "Check for detach(), no_grad(), a state that is not passed on, a factor of zero",
    "Check for activations that are zero for all inputs",
    shared.FREEZE,
)
# Decades: branches whose scale starts at zero change by more. At 0.3 init_div100 is found 4 steps
# earlier.
_STEADY = 0.2

# Decades above the limit: the decay of AdamW moves a layer that does not learn by up to rate x
# decay at each step.
_CLEARLY = 0.5


def _is_rectified(layout: Layout) -> bool:
    """Whether the model has activation modules, and none is bounded."""
    types = {module.type_name for module in layout.modules}
    return bool(types & UNBOUNDED) and types.isdisjoint(BOUNDED)


def _with_matrices(record: StepRecord) -> Marks:
    """Mark modules that train a matrix or have none: before batch norm, a bias has no gradient."""
    layout, matrices = record.layout, np.array([*record.layout.matrices.values()], np.intp)
    trained = layout.owners[matrices[record.grad_present[matrices]]]
    return np.isin(layout.owning, trained) | ~with_matrices(layout)


def _with_zeroed_bias(record: StepRecord) -> set[str]:
    """Return the modules whose bias has a gradient of 0 though that of its outputs is not.

    A bias is added to each output, so its gradient is the sum of theirs (chain rule), unless that
    cancels out, as for the logits of a cross entropy.
    """
    layout, rows = record.layout, record.activation_grads.rows
    adds_up = np.abs(mean_of(rows)) > shared.EXACT * rms_of(rows)
    return {
        name
        for name in compress(record.activation_grads, adds_up)
        if (bias := record.grads.get(f"{name}.bias")) is not None
        and layout.modules[layout.position[name]].type_name in _ADD_BIAS
        and bias.sketch.sum == 0
    }


_ADD_BIAS = AFFINE | NORMALIZATIONS


def _is_known(record: StepRecord) -> bool:
    """Whether all gradients are finite and one is not zero."""
    return record.all_grads_finite and 0 < record.total_grad_norm < math.inf


def _unless_rising(fading: Marks, share: Figures, before: Figures) -> Marks:
    """Return ``fading``, or no mark if their shares rise: branches that start at zero."""
    known = fading & np.isfinite(before)
    growth = share[known] - before[known]
    return np.zeros_like(fading) if growth.size and growth.mean() > _STEADY else fading


def _update_share(record: StepRecord, small: Sequence[str]) -> Figures:
    """Return log10 of the modules' update ratios over the largest one of modules with matrices.

    The scale of a branch that starts near zero moves by many times its size, and so do matrices
    that started ``small``: they do not count.
    """
    ratios, layout = table(record).column("update_ratio")[record.layout.owning], record.layout
    known = np.isfinite(ratios)
    usual = known & with_matrices(layout) & ~np.isin(layout.owner_names, small)
    moved = ratios[usual if usual.any() else known]
    if not moved.size or moved.max() <= 0:
        return np.full(len(ratios), np.nan)
    with np.errstate(divide="ignore"):
        result: Figures = np.log10(ratios / moved.max())
    return result

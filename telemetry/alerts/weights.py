"""Weights that jump, that steps hardly move, or that rounding holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import itemgetter

import numpy as np

from telemetry.alerts.baseline import Baseline, Figures, matrix_ratios, matrix_sizes
from telemetry.alerts.detector import EXPLOSIONS, INACTIVE, RISEN_LOSSES, Detector, Finding
from telemetry.alerts.window import RECENT
from telemetry.plain_text import called, called_all, figure
from telemetry.records import StepRecord
from telemetry.records.moments import zero_fraction_of
from telemetry.records.tensor import figures_of


class WeightJump(Detector):
    """Weight matrices became three times as large between two full steps, though the optimizer had
    hardly changed them before. A note if they became smaller.

    Evidence: the parameter, and the last full step before the change.
    Causes: code that writes to it (a copy, a wrong checkpoint), a gradient that was far too large.
    Remedies: find writes outside of the optimizer; clip gradients.
    Silent: the first three full steps, jumps of a third of the matrices or of the learning rate.
    Example: model[0].weight.data.mul_(10.0)
    Args:
        factor: Growth of a matrix between two full steps.

    In logarithms, it is thirty times more per step than ever before. A note since layers are pruned
    and reset on purpose.
    """

    kind = "weight_jump"
    on = "full"
    explained_by = EXPLOSIONS | RISEN_LOSSES | {"nonfinite", "dead_units", "saturated_units"}
    factor = 3.0  # healthy runs have 2.3, after a spike (llm_spike_recovers)
    _names: tuple[str, ...] = ()
    _steps: tuple[int, ...] = ()
    _levels: Figures
    _fastest: Figures

    @np.errstate(divide="ignore", invalid="ignore")  # of weights that are zero
    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        sizes = matrix_sizes(record)
        names = tuple(sizes)
        known, before, fastest = self._steps, self._levels, self._fastest
        levels = self._levels = np.log([*sizes.values()])
        if names != self._names or not known or record.step <= known[-1]:
            self._names, self._steps = names, (record.step,)
            self._fastest = np.zeros(len(names))
            return None
        changes = levels - before
        changes[~np.isfinite(changes)] = math.inf  # growth from zero has no limit
        steps = record.step - known[-1]
        self._steps = (*known[-_FEWEST:], record.step)
        self._fastest = np.maximum(fastest, np.abs(changes) / steps)
        least = np.maximum(_TIMES * np.maximum(fastest * steps, _STEADY), math.log(self.factor))
        # Matrices that have never moved were frozen, and have no usual speed.
        judged = np.isfinite(changes) & (fastest > 0)
        (jumped,) = (judged & (np.abs(changes) > least)).nonzero()
        is_new = len(known) <= _FEWEST or known[-1] - known[0] < steps
        is_several = len(jumped) > max(1, len(names) / 3)
        if is_new or not len(jumped) or is_several or baseline.since_rate_jump <= steps:
            return None
        most = jumped[np.abs(changes[jumped]).argmax()]
        times, usual = math.exp(changes[most]), math.expm1(fastest[most] * steps)
        parameter = record.layout.parameters[record.layout.parameter_position[names[most]]]
        return Finding(
            summary=f"{called(parameter.name)} is {_times(times)} than at step {known[-1]}, after "
            f"changes of {figure(usual, 2)} of its size at most in as many steps",
            advice=(
                "Check for code that writes to it: a copy, a reset, a checkpoint, another unit",
                "Clip gradients if one batch did it",
            ),
            value=times,
            threshold=self.factor if times > 1 else 1 / self.factor,
            module_name=parameter.module_name,
            severity=None if times > 1 else "note",
            momentary=True,
        )


def _times(factor: float) -> str:
    return f"{figure(factor)}x larger" if factor > 1 else f"{figure(1 / factor)}x smaller"


_TIMES = 30  # overwritten matrices (cnn_overwrite_big, block_weight_scaled) have 230 and more
_STEADY = 0.02  # in natural logarithms, as all here
_FEWEST = 3  # full steps; fewer do not show the usual speed


class LayersNotLearning(Detector):
    """Weights with gradients move a thousand times less than others, for 100 steps.

    Evidence: the layers, and their update ratio compared with the largest.
    Causes: a learning rate that falls too fast from layer to layer, a parameter group with rate 0.
    Remedies: check the learning rates of the parameter groups.
    Silent: frozen layers, missing gradients, layers that move by a hundredth, as in fine-tuning.
    Example:
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
    Args:
        share: Update ratio over that of the fastest quarter of the weight matrices.
        steps: Steps over which three full steps show this.
    """

    kind = "layers_not_learning"
    on = "full"
    clear_after = 3
    explained_by = (
        INACTIVE | EXPLOSIONS | {"no_learning", "output_collapse", "untrained_parameters"}
    )
    # Embeddings of rare words have 0.02, fine-tuning with a decay of 0.65 over 12 layers 0.006.
    share = 1e-3
    steps = 100
    full_steps_in_a_row = 2
    _names: tuple[str, ...] = ()
    _since: Figures
    _evaluations: Figures
    _is_left: bool = False

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        layout = record.layout
        names = tuple(layout.matrices)
        if names != self._names:
            self._names = names
            self._since, self._evaluations = np.zeros((2, len(names)))
        ratios = np.array([record.update_ratios.get(name, np.nan) for name in names])
        moved = ratios[np.isfinite(ratios) & (ratios > 0)]
        if not moved.size:
            return None
        moved.sort()
        usual = float(np.interp(0.75 * (len(moved) - 1), np.arange(len(moved)), moved))
        norms = record.grad_norms[[*layout.matrices.values()]]
        limit = self.share * usual
        slow, learns = (ratios < limit) & (norms > 0), ratios >= limit
        self._is_left = bool(((ratios < _HYSTERESIS * limit) & (norms > 0)).any())
        self._since = np.where(slow & (self._evaluations == 0), record.step, self._since)
        self._evaluations = np.where(learns, 0, self._evaluations + slow)
        lasts = slow & (record.step - self._since >= self.steps)
        found = lasts & (self._evaluations >= 3)
        self.needs_full_step = bool((lasts & ~found).any())
        if not found.any():
            return None
        slowest = np.array([*layout.matrices.values()])[found].tolist()
        layers = [layout.parameters[index].module_name for index in slowest]
        ratio = float(ratios[found].max())
        return Finding(
            summary=f"A step moves {called_all(layers, RECENT)} by {figure(ratio, 2)} of their "
            f"norm at most, and other layers by {figure(usual, 2)}",
            cause="They get gradients, so their learning rate or their precision is too low",
            advice=(
                "Check the learning rate of their parameter group, and layer-wise decay",
                "Keep weights in float32: bfloat16 rounds steps below 0.4 % of a value away",
                "Freeze layers that should not learn by requires_grad_(False)",
            ),
            value=ratio,
            threshold=limit,
            module_name=layers[0],
        )

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return not record.update_ratios or self._is_left


_HYSTERESIS = 3  # ratios vary that much from step to step


class RoundedUpdates(Detector):
    """Weight matrices in bfloat16 or float16 hardly change: steps are smaller than the distance
    between two numbers.

    Evidence: the number of matrices, and the largest step.
    Causes: weights in half precision without a float32 copy.
    Remedies: keep weights in float32 and use ``torch.autocast``, or use stochastic rounding.
    Silent: weights in float32, sparse gradients, a rising learning rate.
    Example: optimizer = torch.optim.SGD(model.bfloat16().parameters(), lr=1e-5)
    Args:
        share: Share of a matrix that changes, at most.
        steps: Steps at which this holds, for half of the matrices.

    A number changes by at least ``eps / 2`` of its size. So if a step moves a matrix by ``r`` of
    its norm, changed weights hold at most ``(2 r / eps)**2`` of the sum of squares.
    """

    kind = "rounded_updates"
    severity = "note"
    on = "full"
    confirm_after = 3
    explained_by = frozenset({"learning_rate_zero", "vanishing_gradient"})
    share = 0.01
    steps = 50  # chosen manually
    _largest: dict[str, float]

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        learning = dict(_in_half_precision(record))
        for name, (dtype, ratio) in learning.items():
            changed = (2 * ratio / _EPS[dtype]) ** 2
            self._largest[name] = max(changed, self._largest.get(name, 0.0))
        still = [name for name in learning if self._largest[name] <= self.share]
        if not still or 2 * len(still) < len(learning) or baseline.age < self.steps:
            return None
        if baseline.rate > baseline.lowest_rate:
            return None
        dtype, ratio = max((learning[name] for name in still), key=itemgetter(1))
        return Finding(
            summary=f"{len(still)} of {len(learning)} weight matrices in {dtype} hardly change",
            cause=f"A step moves them by {figure(ratio, 1)} of their norm at most, and numbers in "
            f"{dtype} are {figure(50 * _EPS[dtype], 1)} % or more apart: rounding undoes the step",
            advice=(
                "Keep the weights in float32 and use torch.autocast",
                "Use an optimizer with stochastic rounding or Kahan summation",
                "Raise the learning rate",
            ),
            value=max(self._largest[name] for name in still),
            threshold=self.share,
        )


# Distance of the next number above 1, as in ``torch.finfo(dtype).eps``.
_EPS = {"bfloat16": 2**-7, "float16": 2**-10}
_SPARSE = 0.5  # of the gradient is zero: embeddings, experts that were not selected


def _in_half_precision(record: StepRecord) -> Iterator[tuple[str, tuple[str, float]]]:
    """Yield matrices with a gradient, their type, and their update ratio."""
    half = {p.name: p.dtype for p in record.layout.parameters if p.dtype in _EPS}
    zeros = figures_of(record.grads, zero_fraction_of) if half else {}
    ratios = matrix_ratios(record) if half else {}
    for name, dtype in half.items():
        if name in ratios and zeros.get(name, 1.0) < _SPARSE:
            yield name, (dtype, ratios[name])

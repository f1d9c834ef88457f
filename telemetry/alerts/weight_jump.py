"""Weight matrices that suddenly become several times as large."""

from __future__ import annotations

import math

import numpy as np

from telemetry.alerts.baseline import Baseline, Figures, matrix_sizes
from telemetry.alerts.detector import EXPLOSIONS, RISEN_LOSSES, Detector, Finding
from telemetry.plain_text import called, figure
from telemetry.records import StepRecord


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

    def set_up(self) -> None:
        self._levels = self._fastest = np.zeros(0)

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
        if is_new or not len(jumped) or len(jumped) > max(1, len(names) / 3):
            return None
        if baseline.since_rate_jump <= steps:
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

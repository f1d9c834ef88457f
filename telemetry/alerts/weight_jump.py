"""A weight matrix that is suddenly many times what it was."""

from __future__ import annotations

import math

import numpy as np

from telemetry.alerts.baseline import Baseline, Figures, matrix_sizes
from telemetry.alerts.detector import EXPLOSIONS, RISEN_LOSSES, Detector, Finding
from telemetry.plain_text import called
from telemetry.records import StepRecord


class WeightJump(Detector):
    """Alerts when weights grew at once, though the optimizer had hardly changed them before.

    Between two full measurements a matrix, or up to a third of them, became ``factor`` times as
    large: in logarithms thirty times more per step than ever before. The learning rate did not
    jump. So something else than the optimizer wrote to it, or one gradient was far too large. If it
    became smaller, it is a note: layers are pruned and begun anew on purpose.
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

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        sizes = matrix_sizes(record)
        names = tuple(sizes)
        with np.errstate(divide="ignore"):
            levels = np.log([*sizes.values()])
        known, before, fastest = self._steps, self._levels, self._fastest
        self._levels = levels
        if names != self._names or not known or record.step <= known[-1]:
            self._names, self._steps = names, (record.step,)
            self._fastest = np.zeros(len(names))
            return None
        with np.errstate(invalid="ignore"):
            changes = levels - before
        changes[~np.isfinite(changes)] = math.inf  # what was zero grows as fast as it likes
        steps = record.step - known[-1]
        self._steps = (*known[-_LOOKS:], record.step)
        self._fastest = np.maximum(fastest, np.abs(changes) / steps)
        least = np.maximum(_TIMES * np.maximum(fastest * steps, _STEADY), math.log(self.factor))
        # Those that have never moved were frozen, and nothing is known of how they learn.
        judged = np.isfinite(changes) & (fastest > 0)
        jumped = np.flatnonzero(judged & (np.abs(changes) > least))
        is_new = len(known) <= _LOOKS or known[-1] - known[0] < steps
        if is_new or not len(jumped) or len(jumped) > max(1, len(names) / 3):
            return None
        if baseline.since_rate_jump <= steps:
            return None
        most = jumped[np.abs(changes[jumped]).argmax()]
        times, usual = math.exp(changes[most]), math.expm1(fastest[most] * steps)
        parameter = record.layout.parameters[record.layout.parameter_position[names[most]]]
        return Finding(
            summary=f"The weights {called(parameter.name)} are {times:.3g} times what they were at "
            f"step {known[-1]}; before, as many steps had changed them by {usual:.2g} of their "
            "size at most",
            advice=(
                "Look for code that writes to them beside the optimizer: a copy, a reset, a "
                "checkpoint, a scale in another unit. If one batch did it, clip gradients.",
            ),
            value=times,
            threshold=self.factor if times > 1 else 1 / self.factor,
            module_name=parameter.module_name,
            severity=None if times > 1 else "note",
            momentary=True,
        )


_TIMES = 30  # overwritten matrices (cnn_overwrite_big, block_weight_scaled) have 230 and more
_STEADY = 0.02  # in natural logarithms, as all here
_LOOKS = 3  # fewer say nothing of what is usual

"""Gradients that grow far beyond what they were, or from layer to layer."""

from __future__ import annotations

import math
from collections.abc import Iterable

from telemetry.alerts.history import History
from telemetry.alerts.modules import ModuleNorms
from telemetry.records import Alert, StepRecord

_ADVICE = (
    "People usually clip gradients (clip_grad_norm_), lower the learning rate or warm it up, "
    "check the initialization, and add normalization."
)


class ExplodingGradient:
    """Compares the total gradient norm with the run's own past, and the layers with each other.

    The norm counts in units of its own history, on a logarithmic scale: it explodes when it exceeds
    the highest of the last 100 steps 10,000-fold, or 30-fold in three steps in a row. Single
    batches of heavy-tailed data do neither.

    Before there is a history, depth tells: at a full measurement, activations or their gradients
    whose RMS grows 1000-fold through the network.
    """

    def __init__(self) -> None:
        self._past = History(100)
        self._steps_above = 0
        self._calm_steps = _CALM_STEPS

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        found = self._growth_in_time(record) or self._growth_over_depth(record)
        if found is None:
            self._calm_steps += 1
            return
        was_calm = self._calm_steps >= _CALM_STEPS
        self._calm_steps = 0
        if was_calm:
            yield found

    def _growth_in_time(self, record: StepRecord) -> Alert | None:
        total = record.total_grad_norm
        if not math.isfinite(total) or total == 0:
            return None
        level = math.log(total)
        if len(self._past) < _SHORTEST_HISTORY:
            self._past.add(level)
            return None
        beyond = level - self._past.highest
        self._steps_above = self._steps_above + 1 if beyond > math.log(_FACTOR) else 0
        if self._steps_above < _STEPS and beyond < math.log(_FACTOR_AT_ONCE):
            if self._steps_above == 0:
                self._past.add(level)
            return None
        usual = math.exp(self._past.median)
        return _alert(
            record,
            module_name=_largest(record),
            value=total,
            threshold=math.exp(self._past.highest) * _FACTOR,
            seen=f"The gradient norm is {total:.3g}, {total / usual:.3g} times its median so far",
        )

    def _growth_over_depth(self, record: StepRecord) -> Alert | None:
        forward = [(n, t.sketch.rms) for n, t in record.activations.items() if t.sketch.rms > 0]
        backward = [(n, t.sketch.rms) for n, t in record.activation_grads.items()]
        backward = [(name, rms) for name, rms in backward if rms > 0][::-1]
        for values, what in [(forward, "activations"), (backward, "activation gradients")]:
            if len(values) < 3:
                continue
            growth = max(rms for _, rms in values) / values[0][1]
            if growth > _DEPTH_FACTOR:
                name = max(values, key=lambda pair: pair[1])[0].partition("[")[0]
                return _alert(
                    record,
                    module_name=name,
                    value=growth,
                    threshold=_DEPTH_FACTOR,
                    seen=f"The {what} grow {growth:.3g}-fold through the network",
                )
        return None


_SHORTEST_HISTORY = 10
_FACTOR_AT_ONCE = 10_000.0
_FACTOR = 30.0
_STEPS = 3
_DEPTH_FACTOR = 1000.0
_CALM_STEPS = 20


def _largest(record: StepRecord) -> str:
    norms = ModuleNorms(record.layout)
    return norms.names[int(norms.of(record).argmax())]


def _alert(
    record: StepRecord, *, module_name: str, value: float, threshold: float, seen: str
) -> Alert:
    return Alert(
        kind="exploding_gradient",
        severity="error",
        step=record.step,
        module_name=module_name,
        value=value,
        threshold=threshold,
        message=f"{seen}, most in {module_name or 'the model'}.\n{_ADVICE}",
    )

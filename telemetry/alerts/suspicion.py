"""Asks for full measurements when the every-step norms leave their usual range."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.alerts.modules import Modules
from telemetry.records import StepRecord
from telemetry.rule import Rule


class Suspicion(Rule):
    """Never alerts; asks for full measurements so that the other rules see what just happened.

    A module's gradient norm is unusual when it differs tenfold, and by six mean deviations, from
    its running mean (of logarithms, over about ten steps), or is suddenly zero. Modules whose norm
    is often zero (experts, embeddings, every other step of a GAN) are ignored.
    """

    _modules: Modules
    _mean: NDArray[np.float64]
    _deviation: NDArray[np.float64]
    _zero_rate: NDArray[np.float64]
    _steps: int
    _wanted: int

    def __init__(self) -> None:
        self._modules = Modules()
        self._mean = np.zeros(0)
        self._deviation = np.zeros(0)
        self._zero_rate = np.zeros(0)
        self._steps = 0
        self._wanted = 0

    @property
    def wants_full(self) -> bool:
        """Whether the next steps should be measured in full."""
        return self._wanted > 0

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self._wanted -= record.full and self._wanted > 0
        if record.all_grads_finite and self._is_unusual(self._norms(record)):
            self._wanted = _FULL_STEPS
        return ()

    def _norms(self, record: StepRecord) -> NDArray[np.float64]:
        before = self._modules
        if before.layout is not record.layout:
            self._modules = modules = Modules.of(record.layout)
            self._mean = modules.carry(self._mean, before.names, np.nan)
            self._deviation = modules.carry(self._deviation, before.names, 0.0)
            self._zero_rate = modules.carry(self._zero_rate, before.names, 0.0)
        return record.owner_grad_norms

    def _is_unusual(self, norms: NDArray[np.float64]) -> bool:
        self._steps += 1
        used = norms > 0
        level = np.log10(norms, out=self._mean.copy(), where=used)
        mean = np.where(np.isnan(self._mean), level, self._mean)  # of new modules it is the first
        off = level - mean  # NaN while there was none
        distance = np.abs(off)
        strange = distance > np.maximum(_DECADES, _DEVIATIONS * self._deviation)
        strange |= (used < (self._zero_rate < _RARE)) & (off == 0)
        bounded = np.minimum(distance, _DECADES)
        self._deviation += np.where(used, _WEIGHT * (bounded - self._deviation), 0.0)
        self._mean = mean + _WEIGHT * np.copysign(bounded, off)
        self._zero_rate += _WEIGHT * (~used - self._zero_rate)
        return bool(strange.any()) and self._steps > _SHORTEST_HISTORY


# These cost or save full measurements and decide nothing: no verdict changes at the values tried,
# but mlp_overwrite_tanh is found up to four steps earlier with smaller ones.
_DECADES = 1.0  # most healthy spikes of faultbench stay below it; tried 0.2 and 5
_DEVIATIONS = 6.0  # by eye; tried 1.2 and 30
_WEIGHT = 0.1  # a mean over about ten steps, by eye; tried 0.02 and 0.5
_RARE = 0.01  # by eye; tried 0.002 and 0.05
_SHORTEST_HISTORY = 10  # 1 / _WEIGHT, until when the mean is not settled; tried 5 and 20
_FULL_STEPS = 3  # one more than dead_units and saturated_units need; tried 1 and 6

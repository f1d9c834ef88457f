"""Gradients that nobody zeroes, so that those of all steps add up."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from telemetry.alerts.history import middle
from telemetry.layers.module_types import AFFINE, NORMALIZATIONS
from telemetry.records import Output, StepRecord


class SummedGradients:
    """Whether each step's gradients are added to those of the step before.

    A bias is added to each output of its layer, so its gradient is the sum of the gradients of
    these outputs (chain rule). Both sums are measured at full steps. At two of them in a row, the
    gradient of a bias is

    - that sum, if gradients are zeroed;
    - that sum plus the bias's gradient of the step before, if they are not.

    Clipping and loss scaling multiply all gradients by the same factor, which is therefore left
    open where there are several layers. Where neither holds (gradients averaged over ranks, a
    second backward pass, noise), nothing is said.

    Attributes:
        is_sure: Whether two pairs of steps in a row have shown it, and none the contrary since.
    """

    is_sure: bool
    _step: int
    _biases: dict[str, float]
    _pairs: int
    _norms: tuple[float, ...]
    _asked: int
    _wants: bool

    def __init__(self) -> None:
        self.is_sure = False
        self._step = -2
        self._biases = {}
        self._pairs = 0
        self._norms = ()
        self._asked = 0
        self._wants = False

    @property
    def is_young(self) -> bool:
        """Whether the norms of the first steps are still being looked at."""
        return len(self._norms) <= _RISING

    @property
    def wants_full(self) -> bool:
        """Whether two full measurements in a row would tell."""
        return self._wants

    def add(self, record: StepRecord) -> None:
        """Look at one step."""
        if self.is_young:  # sums grow at each of the first steps
            self._norms = (*self._norms, record.total_grad_norm)
            rises = len(self._norms) > _RISING and bool(np.all(np.diff(self._norms) > 0))
            self._ask(rises)
        if not record.full:
            return
        given, biases = _sums(record)
        if given:
            before = self._biases if record.step == self._step + 1 else {}
            self._judge(given, biases, before)
        self._step, self._biases = record.step, biases

    def _judge(
        self, given: Mapping[str, float], biases: Mapping[str, float], before: Mapping[str, float]
    ) -> None:
        now = np.array([biases[name] for name in given])
        own = np.array(list(given.values()))
        if _is_one_factor(now, own):
            self._pairs, self.is_sure, self._wants = 0, False, False
        elif before.keys() >= given.keys():
            old = np.array([before[name] for name in given])
            self._pairs = self._pairs + 1 if _is_one_factor(now, own + old) else 0
            self.is_sure |= self._pairs >= _PAIRS
            self._wants &= not self.is_sure and self._pairs > 0
        else:
            self._ask(not self.is_sure)

    def _ask(self, might: bool) -> None:
        if might and not self._wants and self._asked < _ASKED:
            self._wants = True
            self._asked += 1


def _sums(record: StepRecord) -> tuple[dict[str, float], dict[str, float]]:
    """Of each layer's output gradients, where they do not cancel out; and of its bias's gradient.

    Those of cross entropy's logits cancel out exactly.
    """
    given, biases = {}, {}
    for module in record.layout.modules:
        if module.type_name not in _ADD_BIAS:
            continue
        grad = record.grads.get(f"{module.name}.bias")
        outputs = record.output_grads.get(Output(module.name, 0))
        if grad is None or outputs is None or outputs.sketch.count == 0:
            continue
        sketch = outputs.sketch
        total = sketch.mean * sketch.count
        biases[module.name] = grad.sketch.mean * grad.sketch.count
        if abs(total) > _ROUNDING * sketch.rms * sketch.count:
            given[module.name] = total
    return given, biases


def _is_one_factor(
    values: np.ndarray[tuple[int], np.dtype[np.float64]],
    others: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> bool:
    """Whether values are others times one factor up to 1, which is 1 if there are few of them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = values / others
    if np.isnan(ratios).any():
        return False
    factor = middle(ratios.tolist()) if len(ratios) >= _FEW else 1.0
    if factor > 1 + _NEAR:
        return False
    near = np.abs(ratios - factor) <= _NEAR * abs(factor)
    return bool(np.count_nonzero(near) > _MOST * len(near))


_ADD_BIAS = AFFINE | NORMALIZATIONS
# Of five norms in any order, one in 120 rises at each step; it costs full measurements, no alert.
_RISING = 4  # steps in a row with a larger norm than the one before
_PAIRS = 2  # so that a coincidence of one step does not pass
_ASKED = 3  # times; where neither holds, more looks would show nothing
_ROUNDING = 1e-4  # a thousand times float32's
_NEAR = 0.01  # sums are exact to 1e-5, in bfloat16 to 0.004
_MOST = 0.7  # of the layers: hooks of the user may change some
_FEW = 2

"""Weights in half precision that are too coarse for the steps of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import itemgetter

from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector, Finding
from telemetry.records import StepRecord
from telemetry.records.moments import zero_fraction_of
from telemetry.records.tensor import figures_of

# How far the next number above 1 is, as in ``torch.finfo(dtype).eps``.
_EPS = {"bfloat16": 2**-7, "float16": 2**-10}


class RoundedUpdates(Detector):
    """A note when steps are so small that most weights in half precision stay what they were.

    A number that changes at all does so by at least ``eps / 2`` of its size. So if a step moves a
    matrix by ``r`` of its norm, what it changes holds at most ``(2 r / eps)**2`` of the sum of
    squares; the rest was rounded back. That is ``share`` or less, at each full measurement of the
    first ``steps`` steps and later, for at least half of the matrices in half precision that have
    gradients. While the learning rate rises, nothing is said.
    """

    kind = "rounded_updates"
    severity = "note"
    on = "full"
    confirm_after = 3
    explained_by = frozenset({"learning_rate_zero", "vanishing_gradient"})
    share = 0.01
    steps = 50  # by eye
    _largest: dict[str, float]

    def set_up(self) -> None:
        self._largest = {}

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
            summary=f"{len(still)} of {len(learning)} weight matrices in {dtype} hardly change: a "
            f"step moves them by {ratio:.1g} of their norm at most, and numbers in {dtype} are "
            f"{50 * _EPS[dtype]:.1g} % or more apart, so most are rounded back to what they were",
            advice=(
                "Keep the weights in float32 and use torch.autocast",
                "Use an optimizer with stochastic rounding or Kahan summation",
                "Raise the learning rate",
            ),
            value=max(self._largest[name] for name in still),
            threshold=self.share,
        )


_SPARSE = 0.5  # of the gradient is zero: embeddings, experts that were not chosen


def _in_half_precision(record: StepRecord) -> Iterator[tuple[str, tuple[str, float]]]:
    """Matrices with a gradient, their types, and how far the step moved them."""
    zeros = figures_of(record.grads, zero_fraction_of)
    for parameter in record.layout.parameters:
        name, dtype = parameter.name, parameter.dtype
        ratio = record.update_ratios.get(name, math.nan)
        is_dense = name in record.layout.matrices and zeros.get(name, 1.0) < _SPARSE
        if dtype in _EPS and is_dense and math.isfinite(ratio):
            yield name, (dtype, ratio)

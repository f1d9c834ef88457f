"""Weights in half precision whose updates are rounded away."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from telemetry.alerts.baseline import Baseline, matrix_ratios
from telemetry.alerts.detector import Detector, Finding
from telemetry.plain_text import figure
from telemetry.records import StepRecord
from telemetry.records.moments import zero_fraction_of
from telemetry.records.tensor import figures_of

# Distance of the next number above 1, as in ``torch.finfo(dtype).eps``.
_EPS = {"bfloat16": 2**-7, "float16": 2**-10}


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


_SPARSE = 0.5  # of the gradient is zero: embeddings, experts that were not selected


def _in_half_precision(record: StepRecord) -> Iterator[tuple[str, tuple[str, float]]]:
    """Yield matrices with a gradient, their type, and their update ratio."""
    half = {p.name: p.dtype for p in record.layout.parameters if p.dtype in _EPS}
    zeros = figures_of(record.grads, zero_fraction_of) if half else {}
    ratios = matrix_ratios(record) if half else {}
    for name, dtype in half.items():
        if name in ratios and zeros.get(name, 1.0) < _SPARSE:
            yield name, (dtype, ratios[name])

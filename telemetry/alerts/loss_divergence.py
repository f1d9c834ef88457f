"""A loss that rises because the steps are too large."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from telemetry.alerts.episode import Episode
from telemetry.alerts.history import History
from telemetry.records import Alert, StepRecord


class LossDivergence:
    """Speaks when steps move the weights too far and the loss has risen since.

    A loss may rise for good reasons: a harder task, an annealed term, a game of two networks. It
    is the learning rate when optimizer steps move the median weight matrix by more than
    ``update_ratio`` of its size (healthy runs lie around 0.001 to 0.01; their first steps may be
    larger, but then the loss falls), and the ``losses`` after it are all far above all that were
    before. If the learning rate has just jumped beyond all former ones, one loss less will do.

    Args:
        update_ratio: Of the median weight matrix, at a full measurement.
        losses: In a row, within 20 steps of that measurement.
    """

    kind = "loss_divergence"

    def __init__(self, *, update_ratio: float = 0.2, losses: int = 3) -> None:
        self._update_ratio = update_ratio
        self._losses = losses
        self._past = History(100)
        self._rates = History(1000)
        self._since_jump = _REACH + 1
        self._since_large = _REACH
        self._above = 0
        self._ratio = 0.0
        self._episode = Episode(_CALM_STEPS)

    @property
    def wants_full(self) -> bool:
        """Whether the loss is up and the size of the steps should be known."""
        return (self._above > 0 or self._since_jump <= 2) and not self._episode.is_on

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        ratio = _median_ratio(record) if record.update_ratios else 0.0
        self._since_large += 1
        if ratio >= self._update_ratio:
            self._since_large, self._ratio = 0, ratio
        self._see_loss(record.loss)
        self._see_rates(record.learning_rates)
        enough = self._losses - 1 if self._since_jump <= _REACH else self._losses
        diverges = self._above >= enough and self._since_large <= _REACH
        return self._episode.update(record, self._alert(record) if diverges else None)

    def _see_loss(self, loss: float | None) -> None:
        """Count losses far above all before; those are not what was before, for 20 steps."""
        if loss is None or not math.isfinite(loss):
            return
        is_above = len(self._past) > 0 and loss > self._limit()
        self._above = self._above + 1 if is_above else 0
        if not 0 < self._above <= _REACH:
            self._past.add(loss)

    def _limit(self) -> float:
        """Half the range of the losses so far above the highest; of few losses a fifth of it."""
        highest, lowest = self._past.highest, self._past.lowest
        few = 0.2 * abs(highest) if len(self._past) < _FEW else 0.0
        return highest + max(0.5 * (highest - lowest), few)

    def _see_rates(self, rates: tuple[float, ...]) -> None:
        rate = max(rates, default=0.0)
        self._since_jump += 1
        if len(self._rates) >= _FEW and rate > _JUMP * self._rates.highest:
            self._since_jump = 0
        self._rates.add(rate)

    def _alert(self, record: StepRecord) -> Alert:
        return Alert(
            kind=self.kind,
            severity="warning",
            step=record.step,
            module_name=None,
            value=self._ratio,
            threshold=self._update_ratio,
            message=(
                f"The loss has risen to {record.loss:.4g}, above all before, and one optimizer "
                f"step moves the weights by {self._ratio:.0%} of their size.\n"
                "People usually divide the learning rate by 3 to 10, and warm it up."
            ),
        )


_REACH = 20
_FEW = 5
_JUMP = 3.0
_CALM_STEPS = 10


def _median_ratio(record: StepRecord) -> float:
    matrices = {p.name for p in record.layout.parameters if len(p.shape) > 1}
    ratios = [r for n, r in record.update_ratios.items() if n in matrices and np.isfinite(r)]
    return float(np.median(ratios)) if ratios else 0.0

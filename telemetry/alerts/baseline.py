"""What this run's figures were: the only memory of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.course import Course
from telemetry.records import StepRecord


class Layers:
    """Gradient norms of the layers at the last steps.

    Attributes:
        names: The modules that own parameters.
        levels: log10 of their norms, float64 ``[k, layers]``, oldest first; ``-inf`` for zero.
        steps: Of each row, int64 ``[k]``.
    """

    names: tuple[str, ...] = ()
    levels: NDArray[np.float64]
    steps: NDArray[np.int64]

    def __init__(self) -> None:
        self.levels, self.steps = np.zeros((0, 0)), np.zeros(0, np.int64)

    def add(self, record: StepRecord) -> None:
        names = record.layout.owner_names
        if names is not self.names and names != self.names:
            self.levels, self.steps = np.zeros((0, len(names))), np.zeros(0, np.int64)
        self.names = names
        self.levels = np.concatenate([self.levels[-_ROWS:], record.owner_grad_levels[None]])
        self.steps = np.append(self.steps[-_ROWS:], record.step)


_ROWS = 139


class Baseline(Course):
    layers: Layers
    rate_after_jump: float = 0.0
    asks: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def add(self, record: StepRecord) -> None:
        self.follow(record)
        self.layers.add(record)
        if self.since_rate_jump == 0:
            self.rate_after_jump = max(record.learning_rates)

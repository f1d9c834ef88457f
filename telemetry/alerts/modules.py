"""The modules that own parameters, and the gradient norm of each."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from telemetry.records import Layout, StepRecord


class Modules:
    """The modules of one layout that own parameters, in forward order.

    A weight and its bias count as one. A bias alone misleads: before a normalization its gradient
    is rounding noise, and in a deep linear network it is the only large one.

    Attributes:
        layout: Where they come from.
        names: Their names.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._positions, self._index = np.unique(layout.owners, return_inverse=True)
        self.names = tuple(layout.modules[position].name for position in self._positions)

    def grad_norms(self, record: StepRecord) -> NDArray[np.float64]:
        """L2 norm over the parameters of each, float64 ``[len(names)]``; 0 if it has none."""
        return record.module_grad_norms[self._positions]

    def update_ratios(self, record: StepRecord) -> NDArray[np.float64]:
        """How far the step moved each, relative to its size; NaN where that is not known.

        All parameters of a module count together. A bias that begins at zero moves infinitely far
        by itself, but not against its weight; how far is not known from the first step, though.
        """
        moved, size = np.zeros(len(self.names)), np.zeros(len(self.names))
        for index, parameter in zip(self._index, self.layout.parameters, strict=True):
            weight = record.weights.get(parameter.name)
            ratio = record.update_ratios.get(parameter.name)
            if weight is None or ratio is None:
                continue
            norm = weight.sketch.norm
            size[index] += norm**2
            if norm > 0 or ratio > 0:  # NaN: nothing that did not move
                moved[index] += (ratio * norm) ** 2 if math.isfinite(ratio) else math.nan
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios: NDArray[np.float64] = np.sqrt(moved / size)
        return ratios

    def carry(
        self, values: NDArray[np.float64], names: tuple[str, ...], fill: float
    ) -> NDArray[np.float64]:
        """Values that belong to ``names`` in the order of :attr:`names`; ``fill`` for new ones."""
        known = dict(zip(names, values, strict=True))
        return np.array([known.get(name, fill) for name in self.names])

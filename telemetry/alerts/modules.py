"""The modules that own parameters, and the gradient norm of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.records import Layout, StepRecord


@dataclass(eq=False)
class Modules:
    """The modules of one layout that own parameters, in forward order.

    A weight and its bias count as one. A bias alone misleads: before a normalization its gradient
    is rounding noise, and in a deep linear network it is the only large one.

    Attributes:
        names: Their names.
        layout: Where they come from; an empty one if only the names are known.
    """

    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.layout = _NO_LAYOUT
        self._positions = self._index = np.zeros(0, np.intp)

    @staticmethod
    def of(layout: Layout) -> Modules:
        """Those of one layout."""
        positions, index = np.unique(layout.owners, return_inverse=True)
        modules = Modules(tuple(layout.modules[position].name for position in positions))
        modules.layout, modules._positions, modules._index = layout, positions, index
        return modules

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


_NO_LAYOUT = Layout(modules=(), parameters=())

"""Gradient norms of whole modules, in forward order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from telemetry.records import Layout, StepRecord


class ModuleNorms:
    """Adds up the norms of each module's own parameters, so that a weight and its bias count as one.

    A bias alone misleads: before a normalization its gradient is rounding noise, and in a deep
    linear network it is the only large one.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        owners = [layout.position[p.module_name] for p in layout.parameters]
        positions, self._index = np.unique(np.array(owners, dtype=np.intp), return_inverse=True)
        self.names = tuple(layout.modules[position].name for position in positions)

    def of(self, record: StepRecord) -> NDArray[np.float64]:
        """L2 norm over each module's parameters, float64, shape ``[len(names)]``; 0 if it has none."""
        squares = np.bincount(
            self._index, weights=np.square(record.grad_norms), minlength=len(self.names)
        )
        norms: NDArray[np.float64] = np.sqrt(squares)
        return norms

"""The modules that own parameters, and the gradient norm of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import table
from telemetry.records import Layout, StepRecord


@dataclass(eq=False)
class Modules:
    """The modules of one layout that own parameters, in forward order.

    A weight and its bias count together, because a bias alone misleads: before a normalization its
    gradient is rounding noise, and in a deep linear network it is the only large one.

    Attributes:
        names: Their names.
        layout: The layout; an empty one if only the names are known.
    """

    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.layout = _NO_LAYOUT
        self._positions = np.zeros(0, np.intp)

    @staticmethod
    def of(layout: Layout) -> Modules:
        """The modules of a layout."""
        positions = layout.owning
        modules = Modules(tuple(layout.modules[position].name for position in positions))
        modules.layout, modules._positions = layout, positions
        return modules

    def update_ratios(self, record: StepRecord) -> NDArray[np.float64]:
        """The layers' ``update_ratio``, float64 ``[len(names)]``; NaN where it is not known."""
        return table(record).column("update_ratio")[self._positions]

    def any_of(self, parameters: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """For each whether it holds for any of its parameters, bool ``[len(names)]``.

        Args:
            parameters: Whether it holds, in the order of ``layout.parameters``.
        """
        return np.isin(self.layout.owning, self.layout.owners[parameters])

    def sizes(self) -> NDArray[np.float64]:
        """Number of elements of the parameters of each, float64 ``[len(names)]``."""
        sizes = [float(parameter.size) for parameter in self.layout.parameters]
        by_module: NDArray[np.float64] = np.bincount(self.layout.owners, sizes).astype(float)
        return by_module[self._positions]

    def carry(
        self, values: NDArray[np.float64], names: tuple[str, ...], fill: float
    ) -> NDArray[np.float64]:
        """Values that belong to ``names`` in the order of :attr:`names`; ``fill`` for new ones."""
        known = dict(zip(names, values, strict=True))
        return np.array([known.get(name, fill) for name in self.names])


_NO_LAYOUT = Layout(modules=(), parameters=())

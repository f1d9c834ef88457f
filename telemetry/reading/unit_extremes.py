"""Extremes of a layer's units over the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from telemetry.layers.units import saturated_units
from telemetry.records.rows import NO_VALUES


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitExtremes:
    """Extremes of the units or channels of a layer's output at full steps.

    Attributes:
        type_name: The layer's class.
        steps: int64 ``[steps]``, ascending.
        extremes: Smallest and largest value of each unit, float32 ``[steps, units, 2]``, up to
            0.8 % further from zero than measured; NaN if the unit had one. Of units that were
            omitted, because a step is limited to 64 KiB: infinity and minus infinity.
        sampled: Whether steps are omitted to limit the bytes to read.
    """

    type_name: str
    steps: NDArray[np.int64]
    extremes: NDArray[np.float32]
    sampled: bool = False

    @property
    def min(self) -> NDArray[np.float32]:
        """Smallest values, ``[steps, units]``."""
        return self.extremes[..., 0]

    @property
    def max(self) -> NDArray[np.float32]:
        """Largest values, ``[steps, units]``."""
        return self.extremes[..., 1]

    @property
    def dead(self) -> NDArray[np.bool_]:
        """Whether a unit was zero for the whole batch, ``[steps, units]``."""
        dead: NDArray[np.bool_] = (self.extremes == 0).all(axis=-1)
        return dead

    @property
    def below_zero(self) -> NDArray[np.bool_]:
        """Whether a unit was below zero for the whole batch: zero after a ReLU."""
        return (self.max < 0) & ~self.omitted

    @property
    def saturated(self) -> NDArray[np.bool_]:
        """Whether a unit stayed at one flat end of the layer's activation function, such as tanh
        below -7/8, for the whole batch; False for other layers."""
        return saturated_units(self.type_name, self.extremes)

    @property
    def omitted(self) -> NDArray[np.bool_]:
        """Whether a unit was omitted, ``[steps, units]``."""
        return self.min > self.max

    @staticmethod
    def of(type_name: str, found: Mapping[int, NDArray[np.float32]], sampled: bool) -> UnitExtremes:
        """Combine the extremes of each step, ``[units, 2]``; missing units count as omitted."""
        steps = sorted(found)
        most = max(map(len, found.values()), default=0)
        extremes = np.tile(NO_VALUES, (len(steps), most, 1))
        for row, step in enumerate(steps):
            extremes[row, : len(found[step])] = found[step]
        return UnitExtremes(
            type_name=type_name,
            steps=np.array(steps, np.int64),
            extremes=extremes,
            sampled=sampled,
        )

    def thin(self, max_cells: int) -> UnitExtremes:
        """Merge neighboring steps until there are at most ``max_cells`` steps times units."""
        factor = -(-len(self.steps) // max(1, max_cells // max(1, self.extremes.shape[1])))
        if factor <= 1:
            return self
        starts = np.arange(0, len(self.steps), factor)
        low = np.minimum.reduceat(self.min, starts)
        extremes = np.stack([low, np.maximum.reduceat(self.max, starts)], axis=-1)
        return replace(self, steps=self.steps[::factor], extremes=extremes)

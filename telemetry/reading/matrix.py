"""Statistics over layers and steps, and extremes of units over steps: regions and reductions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from telemetry.layers.units import saturated_units
from telemetry.records.rows import NO_VALUES
from telemetry.untrusted import MAX_INTEGER


@dataclass(frozen=True, kw_only=True)
class Region:
    """Range of steps and layers, both ends included."""

    first_step: int = 0
    last_step: int = MAX_INTEGER
    first_layer: int = 0
    last_layer: int = MAX_INTEGER

    def holds(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each step is inside."""
        inside: NDArray[np.bool_] = (steps >= self.first_step) & (steps <= self.last_step)
        return inside

    def layers(self, count: int) -> slice:
        """Return the layers inside, of ``count`` layers."""
        last = min(self.last_layer, count - 1)
        return slice(min(self.first_layer, count), max(last + 1, self.first_layer))


WHOLE = Region()


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """One statistic of some layers at some steps; unknown: :data:`~telemetry.layers.MISSING`."""

    steps: NDArray[np.int64]  # the first step of each column, ``[columns]``, ascending
    values: NDArray[np.float32]  # ``[columns, rows]``
    first_layer: int = 0  # of the first row
    layer_factor: int = 1  # layers per row; the last row may have fewer
    step_factor: int = 1  # measured steps per column; the last column may have fewer
    sampled: bool = False  # whether steps are omitted to limit the bytes to read


def in_order(
    steps: NDArray[np.int64], values: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sort steps ``[k]`` and their values ``[k, ...]``; the last of equal steps is kept.

    Steps are unsorted where two programs wrote into one directory.
    """
    if (np.diff(steps) > 0).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    last = np.append(np.diff(steps[order]) > 0, True)
    return steps[order[last]], values[order[last]]


def thin(matrix: Matrix, *, max_layers: int, max_cells: int) -> Matrix:
    """Reduce a matrix to a maximum of rows and cells; each cell is the largest of several.

    NaN is larger than infinity, and a missing value is the smallest, so a fault in a single cell
    stays visible.
    """
    columns, rows = matrix.values.shape
    layer_factor = max(1, -(-rows // max_layers))
    max_columns = max(1, max_cells // max(1, -(-rows // layer_factor)))
    step_factor = max(1, -(-columns // max_columns))
    if layer_factor == step_factor == 1:
        return matrix
    return replace(
        matrix,
        steps=matrix.steps[::step_factor],
        values=_largest(_largest(matrix.values, step_factor, 0), layer_factor, 1),
        layer_factor=layer_factor,
        step_factor=step_factor * matrix.step_factor,
    )


def _largest(values: NDArray[np.float32], factor: int, axis: int) -> NDArray[np.float32]:
    if factor == 1 or values.shape[axis] == 0:
        return values
    starts = np.arange(0, values.shape[axis], factor)
    largest: NDArray[np.float32] = np.maximum.reduceat(values, starts, axis=axis)
    return largest


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
            type_name=type_name, steps=np.array(steps, np.int64), extremes=extremes, sampled=sampled
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

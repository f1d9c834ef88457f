"""Statistics of layers and extremes of units over steps: regions of them, and fewer cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.layers.units import saturated_units
from telemetry.records import Layout
from telemetry.records.rows import NO_VALUES
from telemetry.untrusted import MAX_INTEGER

# Statistics that are computed from the norms of the parameters' gradients.
EVERY_STEP = {statistic.name for statistic in PAGE_STATISTICS if statistic.every_step}

Numbers: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Steps ``[k]`` and their numbers, ``[k]``."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """Range of steps and layers, both ends included."""

    first_step: int = 0
    last_step: int = MAX_INTEGER
    first_layer: int = 0
    last_layer: int = MAX_INTEGER

    @property
    def steps(self) -> tuple[int, int]:
        """First step, and the one after the last."""
        return self.first_step, self.last_step + 1

    def layers(self, count: int) -> slice:
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
    step_factor: int = 1  # measured steps per column; some columns may have fewer


def in_order(
    steps: NDArray[np.int64], values: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sort steps ``[k]`` and values ``[k, ...]`` of programs; the last of equal steps stays."""
    if (np.diff(steps) > 0).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    last = np.append(np.diff(steps[order]) > 0, True)
    return steps[order[last]], values[order[last]]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Most rows and cells of a matrix; each is the largest value of several, or NaN."""

    max_layers: int
    max_cells: int

    def factors(self, columns: int, rows: int) -> tuple[int, int]:
        """Return the numbers of steps per column, and of layers per row."""
        layers = max(1, -(-rows // self.max_layers))
        max_columns = max(1, self.max_cells // max(1, -(-rows // layers)))
        return max(1, -(-columns // max_columns)), layers


def largest(values: NDArray[np.float32], factor: int, axis: int) -> NDArray[np.float32]:
    """Return the largest of each ``factor`` neighbors on an axis; NaN is the largest."""
    if factor == 1 or values.shape[axis] == 0:
        return values
    starts = np.arange(0, values.shape[axis], factor)
    found: NDArray[np.float32] = np.maximum.reduceat(values, starts, axis=axis)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitExtremes:
    """Extremes of the units or channels of a layer's output at full steps.

    Those of omitted units, because a step is limited to 64 KiB, are infinity and minus infinity.
    """

    type_name: str  # the layer's class
    steps: NDArray[np.int64]  # ascending
    # Smallest and largest value of each unit, ``[steps, units, 2]``, up to 0.8 % further from zero
    # than measured; NaN if the unit had one.
    extremes: NDArray[np.float32]
    sampled: bool = False  # whether steps are omitted to limit the bytes to read

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
        max_steps = max(1, max_cells // max(1, self.extremes.shape[1]))
        factor = max(1, -(-len(self.steps) // max_steps))
        low, high = -largest(-self.min, factor, 0), largest(self.max, factor, 0)
        return replace(self, steps=self.steps[::factor], extremes=np.stack([low, high], axis=-1))


@np.errstate(all="ignore")
def of_modules(
    layout: Layout, norms: NDArray[np.float32], name: str, modules: NDArray[np.intp]
) -> NDArray[np.float32]:
    """Return a statistic of :data:`EVERY_STEP` of some modules, ``[k, modules]``, ascending.

    ``norms`` are those of each parameter's gradient, ``[k, parameters]``.
    """
    order = layout.depth_order
    own = order[np.isin(layout.owners[order], modules)]
    owning, starts = np.unique(layout.owners[own], return_index=True)

    def sums(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over each module's parameters, ``[k, modules]``."""
        found = np.zeros((len(numbers), len(modules)))
        if len(own):
            found[:, np.searchsorted(modules, owning)] = np.add.reduceat(numbers, starts, axis=1)
        return found

    some = norms[:, own]
    present = some != MISSING
    total = sums(np.where(present, np.square(some, dtype=np.float64), 0.0))
    known = sums(present.astype(np.float64)) > 0
    if name == "grad_rms":
        total = total / sums(np.where(present, layout.sizes[own], 0.0))
    if name == "grad_share":
        all_norms = np.where(norms != MISSING, norms, 0.0).astype(np.float64)
        of_model = np.square(all_norms).sum(axis=1, keepdims=True)
        result, known = total / of_model, known & (of_model != 0)
    else:
        result = np.sqrt(total)
    return np.where(known, result, MISSING).astype(np.float32)

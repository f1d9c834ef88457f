"""What was in one tensor during one step: histogram, exact moments, extremes of units."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.records.sketch import Sketch


class Output(NamedTuple):
    """Which of the tensors that a module returned.

    As a string it is ``rnn`` for the first and ``rnn[1]`` for the second. The string is for people,
    not for parsing, because a module may be called ``rnn[1]``, too.

    Attributes:
        module_name: As in ``named_modules()``.
        place: Index of the tensor among those returned, from 0.
    """

    module_name: str
    place: int = 0

    def __str__(self) -> str:
        return f"{self.module_name}[{self.place}]" if self.place else self.module_name


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorRecord:
    """What was in one tensor during one step, all its calls and micro-batches together.

    Attributes:
        sketch: Histogram and exact moments of all elements.
        calls: Number of tensors; of very many only the first few of each module are merged.
        unit_min: Smallest value of each unit or channel, float32, shape ``[units]``; None if the
            tensor has no units. NaN where the unit has one.
        unit_max: Largest value of each unit, likewise.
    """

    sketch: Sketch
    calls: int = 1
    unit_min: NDArray[np.float32] | None = None
    unit_max: NDArray[np.float32] | None = None

    @cached_property
    def zero_units(self) -> NDArray[np.bool_] | None:
        """Which units were always zero; None if the tensor has no units."""
        if self.unit_min is None or self.unit_max is None:
            return None
        zero: NDArray[np.bool_] = (self.unit_min == 0) & (self.unit_max == 0)
        return zero

    @property
    def dead_fraction(self) -> float:
        """Share of units that were always zero; NaN if the tensor has no units."""
        zero = self.zero_units
        return math.nan if zero is None or not zero.size else np.count_nonzero(zero) / zero.size

    @cached_property
    def variation(self) -> float:
        """How far the values lie apart, and not from zero.

        The standard deviation; or half of each unit's range, as a root mean square over the units,
        where that is less. No standard deviation of a unit is more (Popoviciu's inequality). So a
        unit that has the same value for every input, however large, adds nothing. NaN if no value
        is finite, or if some are infinite.
        """
        low, high, std = self.unit_min, self.unit_max, self.sketch.std
        if low is None or high is None or not low.size or self.sketch.count < 2 * low.size:
            return std
        with np.errstate(invalid="ignore"):
            ranges = np.subtract(high, low, dtype=np.float64)
        return min(std, math.sqrt(float(ranges @ ranges) / ranges.size) / 2)

    @property
    def spread(self) -> float:
        """The former name of :attr:`variation`. For one more release."""
        message = "TensorRecord.spread is now called TensorRecord.variation"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.variation

    def scaled(self, factor: float) -> TensorRecord:
        """As if all elements had been multiplied by a positive, finite factor."""
        return replace(
            self,
            sketch=self.sketch.scaled(factor),
            unit_min=None if self.unit_min is None else self.unit_min * np.float32(factor),
            unit_max=None if self.unit_max is None else self.unit_max * np.float32(factor),
        )

    @staticmethod
    def merge_all(records: Iterable[TensorRecord]) -> TensorRecord:
        """One record as if all tensors had been one; units only if every tensor has as many."""
        items = list(records)
        if len(items) == 1:
            return items[0]
        lows, highs = [r.unit_min for r in items], [r.unit_max for r in items]
        return TensorRecord(
            sketch=Sketch.merge_all(r.sketch for r in items),
            calls=sum(r.calls for r in items),
            unit_min=_merge_units(np.minimum, lows),
            unit_max=_merge_units(np.maximum, highs),
        )


def _merge_units(
    pick: np.ufunc, arrays: list[NDArray[np.float32] | None]
) -> NDArray[np.float32] | None:
    known = [array for array in arrays if array is not None]
    if len(known) < len(arrays) or len({array.shape for array in known}) != 1:
        return None
    merged: NDArray[np.float32] = pick.reduce(known)
    return merged

"""Gathers what was measured of the layers at one step, as columns over tensors and over modules.

A layer is a module. This file decides which module an output belongs to, and which one owns a
parameter; :mod:`telemetry.layers.table` has the statistics that are made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.records import StepRecord, TensorRecord
from telemetry.records.moments import COUNTS, POWER_SUMS, nonfinite_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors

Values: TypeAlias = NDArray[Any]


class Column(NamedTuple):
    """A number for each layer or tensor, and whether it was measured; if not, it means nothing."""

    values: Values
    known: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """What was measured of tensors of one kind."""

    rows: Rows
    modules: NDArray[np.intp]  # of each row the index of its module
    size: int  # how many modules there are

    def merged(self) -> Group:
        """With one row for each module that has any, as if its tensors had been one."""
        several = np.bincount(self.modules, minlength=self.size)[self.modules] > 1
        if not several.any():
            return self
        alone, together = self.rows.take(np.flatnonzero(~several)), np.flatnonzero(several)
        modules, places = np.unique(self.modules[together], return_inverse=True)
        merged = self.rows.take(together).merged(places, len(modules))
        return Group(
            rows=Rows.concatenate([alone, merged]),
            modules=np.concatenate([self.modules[~several], modules]),
            size=self.size,
        )

    def total(self, values: Values) -> Values:
        """The sum over each module's tensors of a number ``[rows]``; float64 ``[modules]``."""
        return np.bincount(self.modules, values, self.size)

    @cached_property
    def totals(self) -> SimpleNamespace:
        """Counts and power sums of each module's tensors together, named as in :attr:`rows`."""
        names = (*COUNTS, *POWER_SUMS)
        return SimpleNamespace(**{name: self.total(getattr(self.rows, name)) for name in names})

    def spread(self, column: Column) -> Column:
        """A column over rows as one over modules, none of which has several rows."""
        spread = Column(np.full(self.size, math.nan), np.zeros(self.size, bool))
        spread.values[self.modules], spread.known[self.modules] = column
        return spread


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """What was measured of the layers at one step, in the order of ``record.layout.modules``.

    Each group has a row for each tensor in the record's mapping of that name.
    """

    record: StepRecord
    outputs: Group  # everything that a module returned is merged into one row
    output_grads: Group
    weights: Group
    grads: Group
    second_moments: Group

    @staticmethod
    def of(record: StepRecord) -> Layers:
        """The layers at one step."""
        layout = record.layout
        names = [parameter.name for parameter in layout.parameters]
        module_of: dict[Any, int] = dict(zip(names, layout.owners.tolist(), strict=True))
        for output in (*record.outputs, *record.output_grads):
            module_of[output] = layout.position[output.module_name]

        def group(tensors: Mapping[Any, TensorRecord]) -> Group:
            modules = np.array([module_of[name] for name in tensors], np.intp)
            return Group(rows=Tensors.of(tensors).rows, modules=modules, size=len(layout.modules))

        return Layers(
            record=record,
            outputs=group(record.outputs).merged(),
            output_grads=group(record.output_grads),
            weights=group(record.weights),
            grads=group(record.grads),
            second_moments=group(record.second_moments),
        )


def figure(x: Any, of_finite: Callable[[Any], Values]) -> Column:
    """A mean or norm over all elements, whereas a formula's own is over the finite ones.

    Args:
        x: Columns with the fields of :class:`~telemetry.records.moments.Moments`.
        of_finite: Computes the figure from these; where an element is not finite it is not used.

    Returns:
        NaN if an element is NaN, infinity if one is infinite; not known if there is no element.
    """
    lost = np.where(x.nan_count > 0, math.nan, math.inf)
    return Column(np.where(nonfinite_of(x) > 0, lost, of_finite(x)), x.count > 0)

"""Measurements of the layers at one step, as columns over tensors and over modules.

A layer is a module. This file assigns outputs and parameters to modules;
:mod:`telemetry.layers.table` has the statistics.
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
    """Number for each layer or tensor, and whether it was measured; otherwise it is undefined."""

    values: Values
    known: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Measurements of tensors of one kind."""

    rows: Rows
    modules: NDArray[np.intp]  # index of each row's module
    size: int  # number of modules

    def merged(self) -> Group:
        """Return a group with one row for each module, as if its tensors had been one."""
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
        """Return the sum of a number ``[rows]`` over each module, float64 ``[modules]``."""
        return np.bincount(self.modules, values, self.size)

    @cached_property
    def totals(self) -> SimpleNamespace:
        """Counts and power sums over each module's tensors, named as in :attr:`rows`."""
        names = (*COUNTS, *POWER_SUMS)
        return SimpleNamespace(**{name: self.total(getattr(self.rows, name)) for name in names})

    def spread(self, column: Column) -> Column:
        """Return a column over modules; each must have one row at most."""
        spread = Column(np.full(self.size, math.nan), np.zeros(self.size, bool))
        spread.values[self.modules], spread.known[self.modules] = column
        return spread


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """Measurements of the layers at one step, in the order of ``record.layout.modules``.

    Each group has a row for each tensor in the record's mapping of that name.
    """

    record: StepRecord
    outputs: Group  # all outputs of a module are merged into one row
    output_grads: Group
    weights: Group
    grads: Group
    second_moments: Group

    @staticmethod
    def of(record: StepRecord) -> Layers:
        """Return the layers at one step."""
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
    """Return a mean or norm over all elements; formulas alone are over the finite ones.

    Args:
        x: Columns with the fields of :class:`~telemetry.records.moments.Moments`.
        of_finite: Formula for columns without NaN and infinity.

    Returns:
        NaN if an element is NaN, infinity if one is infinite; unknown without elements.
    """
    lost = np.where(x.nan_count > 0, math.nan, math.inf)
    return Column(np.where(nonfinite_of(x) > 0, lost, of_finite(x)), x.count > 0)

"""Measurements of the layers at one step, as columns over tensors and over modules.

A layer is a module. This file assigns outputs and parameters to modules;
:mod:`telemetry.layers.table` has the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import module_types
from telemetry.records import Output, StepRecord, TensorRecord, once
from telemetry.records.moments import COUNTS, POWER_SUMS, nonfinite_of
from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch
from telemetry.records.tensor import Tensors
from telemetry.threads import without_locks

Values: TypeAlias = NDArray[Any]

# Tensors of a record, as its attributes.
KINDS = ("outputs", "output_grads", "weights", "grads", "second_moments")


class Column(NamedTuple):
    """Number for each layer or tensor, and whether it was measured; otherwise it is undefined."""

    values: Values
    known: NDArray[np.bool_]


@without_locks
@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Measurements of tensors of one kind."""

    rows: Rows
    modules: NDArray[np.intp]  # index of each row's module
    size: int  # number of modules

    def merged(self) -> Group:
        """Return a group with one row for each module, in order, as if its tensors had been one."""
        rows, modules = self.rows, self.modules
        missing = np.flatnonzero(np.bincount(modules, minlength=self.size) == 0)
        if len(missing):
            none = Rows.of([Sketch.empty()] * len(missing)).having(calls=0)
            rows, modules = Rows.concatenate([rows, none]), np.concatenate([modules, missing])
        merged = rows.merged(modules, self.size)
        return Group(rows=merged, modules=np.arange(self.size), size=self.size)

    def total(self, values: Values) -> Values:
        """Return sums over each module of numbers ``[..., rows]``, float64 ``[..., modules]``."""
        count = math.prod(values.shape[:-1])
        places = self.modules + self.size * np.arange(count)[:, None]
        sums = np.bincount(places.ravel(), values.ravel(), count * self.size)
        return sums.reshape(*values.shape[:-1], self.size)

    @cached_property
    def totals(self) -> SimpleNamespace:
        """Counts and power sums over each module's tensors, named as in :attr:`rows`."""
        names = (*COUNTS, *POWER_SUMS, "calls")
        columns = np.array([getattr(self.rows, name) for name in names], np.float64)
        return SimpleNamespace(**dict(zip(names, self.total(columns), strict=True)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Layers:
    """Measurements of the layers at one step, in the order of ``record.layout.modules``."""

    record: StepRecord
    outputs: Group  # all outputs of a module are merged into one row
    weights: Group  # a row for each parameter
    tensors: Group  # of all :data:`KINDS`, one after the other, and so are their modules

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

        groups = [group(getattr(record, kind)) for kind in KINDS]
        groups[0] = groups[0].merged()
        size = len(layout.modules)
        tensors = Group(
            rows=Rows.concatenate([group.rows for group in groups]),
            modules=np.concatenate([of.modules + n * size for n, of in enumerate(groups)]),
            size=size * len(KINDS),
        )
        return Layers(record=record, outputs=groups[0], weights=groups[2], tensors=tensors)

    def part(self, kind: str, column: Column) -> Column:
        """Return the part of one kind of a column over the modules of :attr:`tensors`."""
        first = KINDS.index(kind) * self.outputs.size
        some = slice(first, first + self.outputs.size)
        return Column(column.values[some], column.known[some])


def figure(x: Any, of_finite: Callable[[Any], Values]) -> Column:
    """Return a mean or norm over all elements; formulas alone are over the finite ones.

    NaN if an element is NaN, infinity if one is infinite; unknown without elements. ``x`` has
    columns with the fields of :class:`~telemetry.records.sketch.Sketch`.
    """
    values, lost = of_finite(x), nonfinite_of(x)
    if lost.any():
        values = np.where(lost > 0, np.where(x.nan_count > 0, math.nan, math.inf), values)
    return Column(values, x.count > 0)


# Modules that return no more positions than their inputs have.
_KEEP_POSITIONS = (
    module_types.CONVOLUTIONS
    | {"Linear"}
    | module_types.NORMALIZATIONS
    | module_types.UNBOUNDED
    | module_types.DROPOUTS
)


@dataclass(frozen=True, kw_only=True)
class ForwardOutputs:
    """Outputs at one step in forward order, where tensors of one module stand side by side."""

    outputs: Sequence[Output]
    types: Sequence[str]  # of their modules
    owned: Sequence[bool]  # by modules with parameters
    positions: Sequence[float]  # elements of each unit, over samples and pixels; NaN without units
    rows: Rows  # their measurements

    @staticmethod
    @once
    def of(record: StepRecord) -> ForwardOutputs:
        """Return the outputs of this step."""
        layout, tensors = record.layout, Tensors.of(record.outputs)
        place = {output: layout.position[output.module_name] for output in tensors}
        outputs = sorted(place, key=place.__getitem__)
        order = np.array([*place.values()], np.intp).argsort(kind="stable")
        rows = tensors.rows.take(order)
        positions = np.where(rows.unit_count, rows.count / rows.unit_count, math.nan)
        owning = set(layout.owning.tolist())
        return ForwardOutputs(
            outputs=outputs,
            types=[layout.modules[place[output]].type_name for output in outputs],
            owned=[place[output] in owning for output in outputs],
            positions=positions.tolist(),
            rows=rows,
        )

    @property
    def hidden(self) -> range:
        """Indices of outputs that are followed by another module with parameters."""
        return range(max([i for i, owned in enumerate(self.owned) if owned], default=0))

    def is_gate(self, index: int) -> bool:
        """Whether a hidden output only scales feature maps, as in squeeze and excitation.

        It was pooled, and a feature map follows nevertheless.
        """
        after = index + 1
        if self.types[after] not in _KEEP_POSITIONS:
            return False
        if self.positions[after] > self.positions[index]:
            return True
        # The last maps of a network may have a single position.
        before = [self.types[i] for i in range(index - 1, -1, -1)]
        since_pooling = next(
            (i for i, kind in enumerate(before) if kind in module_types.POOLING), None
        )
        return (
            since_pooling is not None
            and self.types[after] in module_types.CONVOLUTIONS
            and all(
                kind in _KEEP_POSITIONS | module_types.RESHAPING for kind in before[:since_pooling]
            )
        )

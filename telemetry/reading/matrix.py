"""Statistics of layers and extremes of units over steps: read in batches, cached and reduced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.events.page_format import PLUGIN_NAME, ChunkKind
from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.layers.units import saturated_units
from telemetry.reading.sessions import NumberTag, Segment
from telemetry.reading.sources import Problems, RunSource
from telemetry.records.rows import NO_VALUES
from telemetry.untrusted import MAX_INTEGER

# Tags per call.
CALL_TAGS = 100
_CACHE_BYTES = 512 << 20

# Statistics that are computed from the parameters' gradient norms, ``n`` tags.
EVERY_STEP = {statistic.name for statistic in PAGE_STATISTICS if statistic.every_step}

Numbers: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Steps ``[k]`` and their numbers: of an ``m`` tag ``[k, modules, statistics]``, of an ``n`` tag
``[k, parameters]``."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """Range of steps and layers, both ends included."""

    first_step: int = 0
    last_step: int = MAX_INTEGER
    first_layer: int = 0
    last_layer: int = MAX_INTEGER

    def holds(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = (steps >= self.first_step) & (steps <= self.last_step)
        return inside

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
    step_factor: int = 1  # measured steps per column; the last column may have fewer
    sampled: bool = False  # whether steps are omitted to limit the bytes to read


def in_order(
    steps: NDArray[np.int64], values: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sort steps ``[k]`` and values ``[k, ...]`` of programs; the last of equal steps stays."""
    if (np.diff(steps) > 0).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    last = np.append(np.diff(steps[order]) > 0, True)
    return steps[order[last]], values[order[last]]


def thin(matrix: Matrix, *, max_layers: int, max_cells: int) -> Matrix:
    """Reduce a matrix to a maximum of rows and cells: each is the largest of several, or NaN."""
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
        factor = -(-len(self.steps) // max(1, max_cells // max(1, self.extremes.shape[1])))
        if factor <= 1:
            return self
        starts = np.arange(0, len(self.steps), factor)
        low = np.minimum.reduceat(self.min, starts)
        extremes = np.stack([low, np.maximum.reduceat(self.max, starts)], axis=-1)
        return replace(self, steps=self.steps[::factor], extremes=extremes)


# --- tags of numbers -----------------------------------------------------------------------------


class NumberCache:
    """Cache of the most recently read numbers of one run."""

    def __init__(self) -> None:
        self.nbytes = 0
        # By tag and ``sampled``: the tag's last step at that time, and the numbers.
        self._known: OrderedDict[tuple[str, bool], tuple[int, Numbers]] = OrderedDict()

    def read(
        self, source: RunSource, wanted: Sequence[NumberTag], sampled: bool
    ) -> Iterator[tuple[NumberTag, Numbers]]:
        for start in range(0, len(wanted), CALL_TAGS):
            batch = wanted[start : start + CALL_TAGS]
            known = {tag.tag: self._known.get((tag.tag, sampled), (-1, None)) for tag in batch}
            names = [tag.tag for tag in batch if known[tag.tag][0] != tag.last]
            read = source.read(PLUGIN_NAME, names, sampled=sampled) if names else {}
            for tag in batch:
                numbers = known[tag.tag][1]
                if tag.tag in names:
                    points = read.get(tag.tag)
                    numbers = _join(tag, points, source.problems) if points else None
                if numbers is not None:
                    key = tag.tag, sampled
                    self.nbytes -= self._known.pop(key)[1][1].nbytes if key in self._known else 0
                    self._known[key] = tag.last, numbers
                    self.nbytes += numbers[1].nbytes
                    while self.nbytes > _CACHE_BYTES:
                        self.nbytes -= self._known.popitem(last=False)[1][1][1].nbytes
                    yield tag, numbers


def _join(tag: NumberTag, points: Sequence[tuple[int, Any]], problems: Problems) -> Numbers:
    shape = tag.segment.shape(tag.kind)
    steps, values = [np.empty(0, np.int64)], [np.empty((0, *shape), np.float32)]
    for step, value in points:
        try:
            event_steps, event_values = _event_numbers(tag.kind, step, value, shape)
        except ValueError as error:
            problems.add(tag.tag, error)
        else:
            steps.append(event_steps)
            values.append(event_values)
    return np.concatenate(steps), np.concatenate(values)


def _event_numbers(kind: ChunkKind, step: int, array: object, shape: tuple[int, ...]) -> Numbers:
    """Return steps and numbers of one event; ValueError if it does not fit the layout."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        raise ValueError("it does not hold float32 numbers")
    if kind == "m":
        distances, values = np.zeros(1), array[None]
    elif array.ndim == 2 and array.shape[1]:
        distances, values = array[:, 0].astype(np.float64), array[:, 1:]
    else:
        raise ValueError(f"it has the shape {list(array.shape)}")
    if values.shape[1:] != shape:
        raise ValueError(
            f"it has {list(values.shape[1:])} numbers per step, its layout has {list(shape)}"
        )
    exact = step + distances
    if not ((exact >= 0) & (exact <= MAX_INTEGER)).all():
        raise ValueError("its steps must be from 0 to 2**53")
    return step + distances.astype(np.int64), values


@np.errstate(all="ignore")
def of_modules(
    segment: Segment, values: NDArray[np.float32], name: str, modules: NDArray[np.intp]
) -> NDArray[np.float32] | None:
    """Return one statistic of some modules of a segment, ``[k, modules]``; None without it.

    ``values`` are of an ``n`` tag if it is of :data:`EVERY_STEP`, else of an ``m`` tag.
    """
    if name not in EVERY_STEP:
        names = segment.statistic_names
        return values[:, modules, names.index(name)] if name in names else None
    owners, order = segment.layout.owners, segment.layout.depth_order
    own = order[np.isin(owners[order], modules)]
    owning, starts = np.unique(owners[own], return_index=True)

    def sums(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over each module's parameters, ``[k, modules]``."""
        found = np.zeros((len(numbers), len(modules)))
        if len(own):
            found[:, np.searchsorted(modules, owning)] = np.add.reduceat(numbers, starts, axis=1)
        return found

    norms = values[:, own]
    present = norms != MISSING
    total = sums(np.where(present, np.square(norms, dtype=np.float64), 0.0))
    known = sums(present.astype(np.float64)) > 0
    if name == "grad_rms":
        total = total / sums(np.where(present, segment.layout.sizes[own], 0.0))
    if name == "grad_share":
        all_norms = np.where(values != MISSING, values, 0.0).astype(np.float64)
        of_model = np.square(all_norms).sum(axis=1, keepdims=True)
        result, known = total / of_model, known & (of_model != 0)
    else:
        result = np.sqrt(total)
    return np.where(known, result, MISSING).astype(np.float32)

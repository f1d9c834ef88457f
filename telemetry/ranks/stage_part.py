"""What the ranks with one layout know of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from telemetry.records import Layout

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
T = TypeVar("T", np.bool_, np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Checks:
    """Sums of the bits of parameters: equal where the parameters are, and hardly ever elsewhere.

    One row for each different sum of each shard of each parameter. So while all is well there is
    one row for each shard, however many ranks.

    Attributes:
        places: Index of the parameter, number of the shard, the sum, the lowest rank that has it,
            and how many ranks have it, int64 ``[k, 5]``.
    """

    places: NDArray[np.int64]

    @staticmethod
    def empty() -> Checks:
        return Checks(places=np.empty((0, 5), np.int64))

    @staticmethod
    def of(rank: int, sums: Sequence[tuple[int, int, int]]) -> Checks:
        """Those of one rank: index of the parameter, number of the shard, and the sum."""
        if not sums:
            return Checks.empty()
        rows = np.array(sums, np.int64)
        ones = np.ones(len(rows), np.int64)
        return Checks(places=np.column_stack([rows, rank * ones, ones]))

    @staticmethod
    def merge_all(parts: Sequence[Checks]) -> Checks:
        rows = np.concatenate([part.places for part in parts])
        if len(rows) == 0 or sum(len(part.places) > 0 for part in parts) < 2:
            return Checks(places=rows)
        rows = rows[np.lexsort(rows[:, 3::-1].T)]
        starts = np.flatnonzero(np.r_[True, (rows[1:, :3] != rows[:-1, :3]).any(axis=1)])
        merged = rows[starts]
        merged[:, 4] = np.add.reduceat(rows[:, 4], starts)
        return Checks(places=merged)

    def differing(self) -> list[tuple[int, int, int, int]]:
        """Parameters that are not equal: index, a rank that differs, the rank it differs from, and
        the number of the shard.

        The sum that most ranks have is taken for right, of several the lowest rank's. One row for
        each parameter, that of its lowest such rank.
        """
        found: dict[int, tuple[int, int, int, int]] = {}
        shards = self.places[:, :2]
        if len(shards) < 2:
            return []
        repeated = (shards[1:] == shards[:-1]).all(axis=1)
        for at in np.unique(shards[1:][repeated], axis=0):
            rows = self.places[(shards == at).all(axis=1)]
            right, *wrong = sorted(rows.tolist(), key=lambda row: (-row[4], row[3]))
            rank, index = min(row[3] for row in wrong), int(at[0])
            if index not in found or rank < found[index][1]:
                found[index] = (index, rank, right[3], int(at[1]))
        return [found[index] for index in sorted(found)]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePart:
    """What ranks with the same part of the model know of its parameters.

    Norms of shards are merged as the root of the sum of their squares. Arrays have the shape
    ``[parameters]`` and the order of the layout.

    Attributes:
        stage: Of a pipeline; 0 without one.
        layout_id: Equal where the parameters' names are.
        layout: Names and order; None where they were sent before.
        copies: Which copy of each parameter's gradient was read, int64: see :class:`Share`.
        norms: L2 norms of the gradients.
        present: Whether there is a gradient.
        finite: Whether all of its elements are finite.
        before: Norms of the gradients at the end of the backward pass; None if not known.
        parameter_copies: Which copy of each parameter was measured, int64.
        moved: L2 norm of how far the step moved each parameter; None if not measured.
        sizes: L2 norm of each parameter before; NaN where it was not measured.
        addends: Gradients that are the sum of what the ranks of a copy hold, by the index of the
            parameter, float64. Of these, ``norms`` and ``before`` are those of the addends.
        checks: Sums of bits of parameters that should be equal.
        nan_buffers: Buffers that hold a NaN on some rank.
        nonfinite_parameters: Parameters that hold a NaN or Inf on some rank.
    """

    stage: int
    layout_id: str
    layout: Layout | None
    copies: NDArray[np.int64]
    norms: Floats
    present: Bools
    finite: Bools
    before: Floats | None = None
    parameter_copies: NDArray[np.int64] | None = None
    moved: Floats | None = None
    sizes: Floats | None = None
    addends: Mapping[int, Floats] = field(default_factory=dict)
    checks: Checks = field(default_factory=Checks.empty)
    nan_buffers: frozenset[str] = frozenset()
    nonfinite_parameters: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[int, str]:
        return self.stage, self.layout_id

    def whole_before(self) -> Floats | None:
        """Norms of the whole gradients at the end of the backward pass; None if not known.

        Of the sum of addends only the norm after it is known; clipping scales all of them alike.
        """
        if self.before is None:
            return None
        whole = self.before.copy()
        for index, after in self.whole_norms().items():
            ratio = self.before[index] / self.norms[index] if self.norms[index] else 1.0
            whole[index] = after * ratio
        return whole

    def whole_norms(self) -> dict[int, float]:
        """L2 norms of the sums of addends, by the index of the parameter."""
        return {index: float(np.linalg.norm(values)) for index, values in self.addends.items()}


def merge_stages(parts: Sequence[StagePart]) -> StagePart:
    return reduce(_merge, parts)


def _merge(one: StagePart, other: StagePart) -> StagePart:
    grads = _Choice(one.copies, other.copies)
    parameters = _Choice(one.parameter_copies, other.parameter_copies)
    return replace(
        one,
        layout=_larger(one.layout, other.layout),
        copies=grads.copies,
        norms=grads.norms(one.norms, other.norms),
        present=grads.pick(one.present, other.present, one.present | other.present),
        finite=grads.pick(one.finite, other.finite, one.finite & other.finite),
        before=grads.optional_norms(one.before, other.before),
        parameter_copies=parameters.copies if parameters.known else None,
        moved=parameters.optional_norms(one.moved, other.moved),
        sizes=parameters.optional_norms(one.sizes, other.sizes),
        addends=grads.addends(one.addends, other.addends),
        checks=Checks.merge_all((one.checks, other.checks)),
        nan_buffers=one.nan_buffers | other.nan_buffers,
        nonfinite_parameters=one.nonfinite_parameters | other.nonfinite_parameters,
    )


def _larger(one: Layout | None, other: Layout | None) -> Layout | None:
    """The one with more modules, for on some ranks not all have run; the same in either order."""
    known = [layout for layout in (one, other) if layout is not None]
    return max(known, key=_by_size, default=None)


def _by_size(layout: Layout) -> tuple[int, list[str]]:
    return len(layout.modules), [module.name for module in layout.modules]


class _Choice:
    """Which of two ranks' copies of each parameter count: the lower, or both if they are equal."""

    def __init__(self, one: NDArray[np.int64] | None, other: NDArray[np.int64] | None) -> None:
        self.known = one is not None or other is not None
        first = one if one is not None else other
        second = other if other is not None else one
        self._first = np.zeros(0, np.int64) if first is None else first
        self._second = np.zeros(0, np.int64) if second is None else second
        self.copies = np.minimum(self._first, self._second)

    def pick(self, one: NDArray[T], other: NDArray[T], both: NDArray[T]) -> NDArray[T]:
        is_lower, is_higher = self._first < self._second, self._first > self._second
        return np.where(is_lower, one, np.where(is_higher, other, both))

    def norms(self, one: Floats, other: Floats) -> Floats:
        """Roots of the sums of squares where both count; NaN where one is."""
        nan = np.isnan(one) | np.isnan(other)
        return self.pick(one, other, np.where(nan, np.nan, np.hypot(one, other)))

    def optional_norms(self, one: Floats | None, other: Floats | None) -> Floats | None:
        if one is None or other is None:
            return one if other is None else other
        return self.norms(one, other)

    def addends(
        self, one: Mapping[int, Floats], other: Mapping[int, Floats]
    ) -> Mapping[int, Floats]:
        if not one and not other:
            return one
        added: dict[int, Floats] = {}
        for index in one.keys() | other.keys():
            first, second = self._first[index], self._second[index]
            mine = one.get(index) if first <= second else None
            theirs = other.get(index) if second <= first else None
            known = [values for values in (mine, theirs) if values is not None]
            if known and len({values.shape for values in known}) == 1:
                added[index] = np.sum(known, axis=0)
        return added

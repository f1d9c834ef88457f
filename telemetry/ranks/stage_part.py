"""What the ranks with one layout know of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.checks import Checks
from telemetry.records import Layout

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


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
        """Those with the same key merge."""
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
    """All ranks with one layout together; the order does not matter."""
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

    def pick(self, one: Bools, other: Bools, both: Bools) -> Bools:
        picked: Bools = np.where(
            self._first < self._second, one, np.where(self._first > self._second, other, both)
        )
        return picked

    def norms(self, one: Floats, other: Floats) -> Floats:
        """Roots of the sums of squares where both count; NaN where one is."""
        both = np.where(np.isnan(one) | np.isnan(other), np.nan, np.hypot(one, other))
        picked: Floats = np.where(
            self._first < self._second, one, np.where(self._first > self._second, other, both)
        )
        return picked

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

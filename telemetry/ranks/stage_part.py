"""What the ranks with one layout know of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.merging import NO_ROWS, Table, by_key, group, same, sums, union
from telemetry.records import Layout

Floats = NDArray[np.float64]
Checks = NDArray[np.int64]
"""Sums of the bits of parameters: equal where the parameters are, and hardly ever elsewhere.

Index of the parameter, number of the shard, the sum, the lowest rank that has it, and how many
ranks have it, int64 ``[k, 5]``. While all is well there is one row per shard, however many ranks.
"""


def checks_of(rank: int, sums_of_bits: Sequence[tuple[int, int, int]]) -> Checks:
    """Those of one rank: index of the parameter, number of the shard, and the sum."""
    return np.array([(*each, rank, 1) for each in sums_of_bits], np.int64).reshape(-1, 5)


def merge_checks(parts: Sequence[Checks]) -> Checks:
    rows = np.concatenate(parts)
    order, starts = group(rows[:, :3])
    merged = rows[order[starts]]
    if len(merged):
        merged[:, 3] = np.minimum.reduceat(rows[order, 3], starts)
        merged[:, 4] = np.add.reduceat(rows[order, 4], starts)
    return merged


def differing(checks: Checks) -> list[tuple[int, int, int, int]]:
    """Parameters that are not equal: index, a rank that differs, the rank it differs from, and the
    number of the shard.

    The sum that most ranks have is taken for right, of several the lowest rank's. One row for each
    parameter, that of its lowest such rank.
    """
    found: dict[int, tuple[int, int, int, int]] = {}
    order, starts = group(checks[:, :2])
    for rows in np.split(checks[order], starts[1:]):
        if len(rows) > 1:
            right, *wrong = sorted(rows.tolist(), key=lambda row: (-row[4], row[3]))
            index, shard, rank = right[0], right[1], min(row[3] for row in wrong)
            if index not in found or rank < found[index][1]:
                found[index] = (index, rank, right[3], shard)
    return [found[index] for index in sorted(found)]


def _larger(layouts: Sequence[Layout | None]) -> Layout | None:
    """The one with most modules, for on some ranks not all have run; the same in any order."""
    known = [layout for layout in layouts if layout is not None]
    return max(known, key=lambda o: (len(o.modules), [m.name for m in o.modules]), default=None)


class Addend(NamedTuple):
    """Of a gradient: the index of the parameter, and the copy. Only those of one size add up."""

    parameter: int
    copy: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePart:
    """What ranks with the same part of the model know of its parameters.

    The rows of tables are the parameters, in the order of the layout.

    Attributes:
        stage: Of a pipeline; 0 without one.
        layout_id: Equal where the parameters' names are.
        layout: Names and order; None where they were sent before.
        grads: Of each gradient the ``norm`` (L2), whether it is ``present`` and ``finite``.
        before: Of each the norm at the end of the backward pass; without rows if not known.
        updates: How far the step ``moved`` each parameter and its ``size`` before, L2 norms;
            without rows if not measured. The size is NaN where it was not measured.
        addends: Gradients that are the sum of what the ranks of a copy hold, float64. Of these,
            ``grads`` and ``before`` are those of the addends.
        checks: Sums of bits of parameters that should be equal.
        nan_buffers: Buffers that hold a NaN on some rank.
        nonfinite_parameters: Parameters that hold a NaN or Inf on some rank.
    """

    stage: Annotated[int, same]
    layout_id: Annotated[str, same]
    layout: Annotated[Layout | None, _larger]
    grads: Annotated[Table, Table.merge_all]
    before: Annotated[Table, Table.merge_all] = NO_ROWS
    updates: Annotated[Table, Table.merge_all] = NO_ROWS
    addends: Annotated[Mapping[Addend, Floats], by_key(sums)] = field(default_factory=dict)
    checks: Annotated[Checks, merge_checks] = field(default_factory=lambda: checks_of(0, ()))
    nan_buffers: Annotated[frozenset[str], union] = frozenset()
    nonfinite_parameters: Annotated[frozenset[str], union] = frozenset()

    @property
    def key(self) -> tuple[int, str]:
        return self.stage, self.layout_id

    def added(self) -> dict[int, Floats]:
        """Sums of addends, by the index of the parameter; of several copies the lowest counts."""
        lowest = {addend.parameter: addend for addend in sorted(self.addends, reverse=True)}
        return {index: self.addends[addend] for index, addend in lowest.items()}

    def whole_norms(self) -> Floats:
        norms: Floats = self.grads["norm"].copy()
        for index, values in self.added().items():
            norms[index] = np.linalg.norm(values)
        return norms

    def whole_before(self) -> Floats:
        """Norms of the whole gradients at the end of the backward pass; NaN if not known.

        Of the sum of addends only the norm after it is known; clipping scales all of them alike.
        """
        norms, whole = self.grads["norm"], self.whole_norms()
        if not self.before.rows:
            return np.full_like(norms, np.nan)
        before: Floats = self.before["before"].copy()
        for index in self.added():
            ratio = before[index] / norms[index] if norms[index] else 1.0
            before[index] = whole[index] * ratio
        return before

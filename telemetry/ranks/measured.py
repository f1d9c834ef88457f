"""What one rank, or several together, measured at one step; :func:`merge` makes one of several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.columns import (
    NO_ROWS,
    Table,
    by_key,
    merge_all,
    merge_tables,
    same,
    spreads,
    sums,
    union,
)
from telemetry.ranks.held import Share
from telemetry.records import Layout
from telemetry.records.moments import rms_of
from telemetry.records.rows import NO_VALUES, Rows
from telemetry.records.tensor import Tensors


class Row(NamedTuple):
    """Which tensor: the pipeline stage, the kind as in :class:`StepRecord`, and its name there."""

    stage: int
    kind: str
    name: str
    place: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredTensors:
    """What was measured of many tensors.

    Attributes:
        table: Of each tensor how many ``calls`` a rank saw, and of the ranks' root mean squares
            the lowest and the highest.
        rows: The rest.
    """

    table: Table
    rows: Rows

    def __post_init__(self) -> None:
        rows, sizes = self.rows, {len(self.rows.buckets), len(self.rows.counts)}
        fits = sizes == {rows.bucket_count.sum()} and len(rows.units) == rows.unit_count.sum()
        if not fits or len(rows) != len(self.table.rows):
            raise ValueError("its columns do not fit together")

    @staticmethod
    def of(rank: int, shares: Mapping[Row, Share], rows: Rows) -> MeasuredTensors:
        """Those of one rank: which tensors ``rows`` are of, and its shares of them."""
        if not shares:
            return EMPTY
        copies = np.array([share.copy for share in shares.values()], np.int64)
        figures = {"calls": rows.calls, **spreads(rank, rms_of(rows))}
        # Scaled-up counts travel in single precision, far finer than a sample.
        short = np.where(rows.counts % 1 == 0, rows.counts, rows.counts.astype(np.float32))
        if any(share.pieces > 1 for share in shares.values()):
            rows = _among_all_units(rows, shares.values())
        return MeasuredTensors(
            table=Table.of(tuple(shares), copies, **figures), rows=replace(rows, counts=short)
        )

    @staticmethod
    def merge_all(tensors: Sequence[MeasuredTensors]) -> MeasuredTensors:
        """As if one rank had held what all of them did; the order does not matter."""
        some = [one for one in tensors if one.table.rows]
        if len(some) < 2:
            return some[0] if some else EMPTY
        table, kept = merge_tables([one.table for one in some])
        rows = Rows.concatenate([one.rows for one in some])
        return MeasuredTensors(table=table, rows=rows.merged(np.concatenate(kept), len(table.rows)))

    def records(self) -> Tensors[Row]:
        """What was measured of each tensor as a whole; units only if all ranks' are there."""
        rows = self.rows.having(calls=self.table["calls"])
        if (missing := (rows.units == NO_VALUES).all(axis=1)).any():
            of_row = np.arange(len(rows)).repeat(rows.unit_count)
            kept = ~np.isin(of_row, of_row[missing])
            counts = np.bincount(of_row[kept], minlength=len(rows))
            rows = rows.having(rows.units[kept], unit_count=counts)
        return Tensors(tuple(self.table.rows), rows)


# That of a step that was not measured in full.
EMPTY = MeasuredTensors(table=NO_ROWS, rows=Rows.of(()))


def _among_all_units(rows: Rows, shares: Collection[Share]) -> Rows:
    """With units of their own for the pieces of other ranks, which merging then fills in."""
    units = [rows.units[:0]]
    for row, share in enumerate(shares):
        found = rows.units_of(row)
        if found is not None:
            whole = np.tile(NO_VALUES, (share.pieces, len(found), 1))
            whole[share.piece] = found
            units.append(whole.reshape(-1, 2))
    pieces = np.array([share.pieces for share in shares])
    return rows.having(np.concatenate(units), unit_count=rows.unit_count * pieces)


Floats = NDArray[np.float64]


class Check(NamedTuple):
    """Index of a parameter, number of the shard, and the sum of its bits.

    Sums are equal where the parameters are, and hardly ever elsewhere. So while all is well there
    is one row per shard, however many ranks.
    """

    parameter: int
    shard: int
    sum: int


def checks_of(rank: int, checks: Sequence[Check]) -> Table:
    """Those of one rank: the ``lowest`` that has each, and how many do, ``holders``."""
    ones = np.ones(len(checks), np.int64)
    return Table.of(checks, lowest=ones * rank, holders=ones) if checks else NO_ROWS


def differing(checks: Table) -> list[tuple[int, int, int, int]]:
    """Parameters that are not equal: index, lowest rank that differs, one it differs from, shard.

    The sum that most ranks have is taken for right, of several the lowest rank's.
    """
    sums_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
    holders, lowest = checks["holders"].tolist(), checks["lowest"].tolist()
    for check, count, rank in zip(checks.rows, holders, lowest, strict=True):
        sums_of.setdefault((check.parameter, check.shard), []).append((-count, rank))
    found: dict[int, tuple[int, int, int, int]] = {}
    for (index, shard), sums_there in sorted(sums_of.items()):
        (_, right), *wrong = sorted(sums_there)
        if wrong:
            row = index, min(rank for _, rank in wrong), right, shard
            found[index] = min(found.get(index, row), row, key=lambda row: row[1])
    return list(found.values())


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
class MeasuredParameters:
    """What ranks with the same part of the model know of its parameters, the rows of the tables.

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
    checks: Annotated[Table, Table.merge_all] = NO_ROWS
    nan_buffers: Annotated[frozenset[str], union] = frozenset()
    nonfinite_parameters: Annotated[frozenset[str], union] = frozenset()

    @property
    def key(self) -> tuple[int, str]:
        return self.stage, self.layout_id

    def added(self) -> dict[int, Floats]:
        """Sums of addends, by the index of the parameter; of several copies the lowest counts."""
        lowest = {addend.parameter: addend for addend in sorted(self.addends, reverse=True)}
        return {index: self.addends[addend] for index, addend in lowest.items()}

    def whole_norms(self) -> tuple[Floats, Floats]:
        """Norms of the whole gradients, and at the end of the backward pass; NaN if not known.

        Of the sum of addends only the norm after it is known; clipping scales all of them alike.
        """
        norms: Floats = self.grads["norm"].copy()
        before = self.before["before"].copy() if self.before.rows else np.full_like(norms, np.nan)
        for index, values in self.added().items():
            whole = np.linalg.norm(values)
            before[index] = whole * (before[index] / norms[index] if norms[index] else 1.0)
            norms[index] = whole
        return norms, before


ALIKE = ("learning_rates", "loss_scale", "skipped_steps", "skipped")


@dataclass(frozen=True, kw_only=True, order=True)
class Common:
    """What all ranks have alike, as in a :class:`StepRecord`; that of the lowest counts."""

    rank: int
    learning_rates: tuple[float, ...] = ()
    loss_scale: float | None = None
    skipped_steps: int = 0
    skipped: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What some of the ranks measured at one step; :func:`merge` makes one of several.

    Counts and minima do not depend on the order at all, sums on that of addition.

    Attributes:
        step, wall_time, phase: As in :class:`telemetry.records.StepRecord`.
        size: How many ranks train together.
        ranks: Which of them this holds.
        measured: Which of these measured the step in full.
        stages: Their parameters, of each stage of a pipeline and each different layout.
        tensors: What was in their tensors.
        scalars: What the user logged: see :meth:`Table.of_figures`.
        own: What each rank has of its own: ``step_s``, the seconds from step to step.
        hosts: Ranks by the name of their host; empty where it was sent before.
        nonfinite: Ranks that hold NaN or infinity that was not there before they ran, and where.
        common: What they have alike.
        not_known: Tensors of which every rank holds an addend, and nothing is known of the sum.
    """

    step: Annotated[int, same]
    wall_time: Annotated[float, max]
    size: Annotated[int, max]
    ranks: Annotated[frozenset[int], union]
    common: Annotated[Common, min]
    stages: Annotated[Mapping[tuple[int, str], MeasuredParameters], by_key(merge_all)] = field(
        default_factory=dict
    )
    tensors: Annotated[MeasuredTensors, MeasuredTensors.merge_all] = EMPTY
    phase: Annotated[str, same] = ""
    measured: Annotated[frozenset[int], union] = frozenset()
    scalars: Annotated[Table, Table.merge_all] = NO_ROWS
    own: Annotated[Table, Table.merge_all] = NO_ROWS
    hosts: Annotated[Mapping[str, frozenset[int]], by_key(union)] = field(default_factory=dict)
    nonfinite: Annotated[Mapping[int, str], by_key(same)] = field(default_factory=dict)
    not_known: Annotated[frozenset[str], union] = frozenset()

    @property
    def full(self) -> bool:
        return bool(self.measured)

    @property
    def nbytes(self) -> int:
        """Of its large arrays."""
        rows = self.tensors.rows
        arrays = [rows.columns, rows.buckets, rows.counts, rows.units]
        arrays += [stage.grads["norm"] for stage in self.stages.values()]
        return sum(array.nbytes for array in arrays)


def merge(parts: Sequence[Measured]) -> Measured:
    """What all of these ranks measured.

    Raises:
        ValueError: There are none, they are of different steps, or two hold the same rank.
    """
    if len({(part.step, part.phase) for part in parts}) != 1:
        raise ValueError(f"merge: parts of steps {sorted({part.step for part in parts})}")
    if len(union(part.ranks for part in parts)) != sum(len(part.ranks) for part in parts):
        raise ValueError(f"merge: two parts of step {parts[0].step} hold the same rank")
    return merge_all(parts)

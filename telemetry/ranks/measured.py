"""What one rank, or several together, measured at one step; :func:`merge` makes one of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.columns import NO_ROWS, Table, by_key, merge_all, same, spreads, sums, union
from telemetry.ranks.held import Share
from telemetry.records import Layout
from telemetry.records.moments import rms_of
from telemetry.records.rows import NO_VALUES, Rows

Floats: TypeAlias = NDArray[np.float64]
Merged: TypeAlias = Annotated[Table, Table.merge_all]

# What all ranks have alike, as in a StepRecord; that of the lowest rank counts.
ALIKE = ("learning_rates", "loss_scale", "skipped_steps", "skipped", "eval_mode")


class Row(NamedTuple):
    """Which tensor: the pipeline stage, the kind as in :class:`StepRecord`, and its name there."""

    stage: int
    kind: str
    name: str
    place: int = 0


class Check(NamedTuple):
    """Index of a parameter, number of the shard, and the sum of its bits.

    Sums are equal where the parameters are, and hardly ever elsewhere. So while all is well there
    is one row per shard, however many ranks.
    """

    parameter: int
    shard: int
    sum: int


class Addend(NamedTuple):
    """Of a gradient: the index of the parameter, and the copy. Only those of one size add up."""

    parameter: int
    copy: int
    size: int


def tensors_of(rank: int, shares: Mapping[Row, Share], rows: Rows) -> Table:
    """Of one rank: which tensors ``rows`` are of, and its shares of them.

    The columns are how many ``calls`` a rank saw, and of the ranks' root mean squares the lowest
    and the highest. Units that are split over ranks have a place for each rank's, which merging
    fills in.
    """
    if not shares:
        return NO_ROWS
    columns = {"calls": rows.calls, **spreads(rank, rms_of(rows))}
    pieces = np.array([share.pieces for share in shares.values()])
    if (pieces > 1).any():
        units = [rows.units[:0]]
        for row, share in enumerate(shares.values()):
            if (found := rows.units_of(row)) is not None:
                whole = np.tile(NO_VALUES, (share.pieces, len(found), 1))
                whole[share.piece] = found
                units.append(whole.reshape(-1, 2))
        rows = rows.having(np.concatenate(units), unit_count=rows.unit_count * pieces)
    # Scaled-up counts travel in single precision, far finer than a sample.
    short = np.where(rows.counts % 1 == 0, rows.counts, rows.counts.astype(np.float32))
    copies = np.array([share.copy for share in shares.values()], np.int64)
    content = replace(rows, counts=short)
    return Table(rows=tuple(shares), copies=copies, columns=columns, content=content)


def _larger(layouts: Sequence[Layout | None]) -> Layout | None:
    """The one with most modules, for on some ranks not all have run; the same in any order."""
    known = [layout for layout in layouts if layout is not None]
    return max(known, key=lambda o: (len(o.modules), [m.name for m in o.modules]), default=None)


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
        checks: Sums of bits of parameters that should be equal: how many ranks are ``holders`` of
            each, and the ``lowest`` of them.
        nan_buffers, nonfinite_parameters: Names of what holds a NaN (or Inf) on some rank.
    """

    stage: Annotated[int, same]
    layout_id: Annotated[str, same]
    layout: Annotated[Layout | None, _larger]
    grads: Merged
    before: Merged = NO_ROWS
    updates: Merged = NO_ROWS
    addends: Annotated[Mapping[Addend, Floats], by_key(sums)] = field(default_factory=dict)
    checks: Merged = NO_ROWS
    nan_buffers: Annotated[frozenset[str], union] = frozenset()
    nonfinite_parameters: Annotated[frozenset[str], union] = frozenset()

    @property
    def key(self) -> tuple[int, str]:
        return self.stage, self.layout_id


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What some of the ranks measured at one step; :func:`merge` makes one of several.

    Counts and minima do not depend on the order at all, sums on that of addition.

    Attributes:
        step, wall_time, phase: As in :class:`telemetry.records.StepRecord`.
        place: In the order of all that is measured: see :class:`telemetry.ranks.channel.Channel`.
        size: How many ranks train together.
        ranks: Which of them this holds.
        alike: The lowest of them, and its values of :data:`ALIKE` if its step ended.
        stages: Their parameters, of each stage of a pipeline and each different layout.
        tensors: What was in their tensors: see :func:`tensors_of`.
        measured: Which of the ranks measured the step in full.
        scalars: What the user logged: see :meth:`Table.of_figures`.
        own: What each rank has of its own: ``step_s``, the seconds from step to step.
        hosts: Ranks by the name of their host; empty where it was sent before.
        given: Ranks by what they were given, as far as each should be given something else.
        nonfinite: Ranks that hold NaN or infinity that was not there before they ran, and where.
        not_known: Tensors of which every rank holds an addend, and nothing is known of the sum.
    """

    step: Annotated[int, same]
    wall_time: Annotated[float, max]
    size: Annotated[int, max]
    ranks: Annotated[frozenset[int], union]
    alike: Annotated[tuple[Any, ...], min]
    stages: Annotated[Mapping[tuple[int, str], MeasuredParameters], by_key(merge_all)] = field(
        default_factory=dict
    )
    tensors: Merged = NO_ROWS
    phase: Annotated[str, same] = ""
    place: Annotated[int, same] = 0
    measured: Annotated[frozenset[int], union] = frozenset()
    scalars: Merged = NO_ROWS
    own: Merged = NO_ROWS
    hosts: Annotated[Mapping[str, frozenset[int]], by_key(union)] = field(default_factory=dict)
    given: Annotated[Mapping[str, frozenset[int]], by_key(union)] = field(default_factory=dict)
    nonfinite: Annotated[Mapping[int, str], by_key(same)] = field(default_factory=dict)
    not_known: Annotated[frozenset[str], union] = frozenset()

    @property
    def nbytes(self) -> int:
        """Of its large arrays."""
        arrays = [stage.grads["norm"] for stage in self.stages.values()]
        if (rows := self.tensors.content) is not None:
            arrays += [rows.columns, rows.buckets, rows.counts, rows.units]
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

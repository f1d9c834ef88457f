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
    """What ranks with the same part of the model know of its parameters, the rows of the tables."""

    stage: Annotated[int, same]  # of a pipeline; 0 without one
    layout_id: Annotated[str, same]  # equal where the parameters' names are
    layout: Annotated[Layout | None, _larger]  # None where it was sent before
    grads: Merged  # of each gradient the norm (L2), whether it is present and finite
    before: Merged = NO_ROWS  # the norm at the end of the backward pass; no rows: not known
    # How far the step moved each parameter, and its size before, L2 norms, NaN where not measured.
    updates: Merged = NO_ROWS
    # Gradients that are the sum of what the ranks of a copy hold; of these, grads and before are
    # those of the addends.
    addends: Annotated[Mapping[Addend, Floats], by_key(sums)] = field(default_factory=dict)
    # Sums of bits that should be equal: how many ranks are holders of each, the lowest of them.
    checks: Merged = NO_ROWS
    # Names of what holds a NaN, or infinity, on some rank.
    nan_buffers: Annotated[frozenset[str], union] = frozenset()
    nonfinite_parameters: Annotated[frozenset[str], union] = frozenset()

    @property
    def key(self) -> tuple[int, str]:
        return self.stage, self.layout_id


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What some of the ranks measured at one step; :func:`merge` makes one of several.

    Counts and minima do not depend on the order at all, sums on that of addition.
    """

    step: Annotated[int, same]
    wall_time: Annotated[float, max]
    size: Annotated[int, max]  # how many ranks train together
    ranks: Annotated[frozenset[int], union]  # which of them this holds
    alike: Annotated[tuple[Any, ...], min]  # the lowest of them, and if its step ended, its ALIKE
    # Of each stage of a pipeline and each different layout.
    stages: Annotated[Mapping[tuple[int, str], MeasuredParameters], by_key(merge_all)] = field(
        default_factory=dict
    )
    tensors: Merged = NO_ROWS  # see tensors_of
    phase: Annotated[str, same] = ""
    place: Annotated[int, same] = 0  # in the order of all that is measured: see Channel
    measured: Annotated[frozenset[int], union] = frozenset()  # who measured the step in full
    scalars: Merged = NO_ROWS  # what the user logged: see Table.of_figures
    own: Merged = NO_ROWS  # of each rank step_s, the seconds from step to step
    # Ranks by the name of their host, where it was not sent before; and by what they were given, as
    # far as each should be given something else.
    hosts: Annotated[Mapping[str, frozenset[int]], by_key(union)] = field(default_factory=dict)
    given: Annotated[Mapping[str, frozenset[int]], by_key(union)] = field(default_factory=dict)
    # Which hold NaN or infinity that was not there before they ran, and where.
    nonfinite: Annotated[Mapping[int, str], by_key(same)] = field(default_factory=dict)
    # Tensors of which every rank holds an addend, and nothing is known of the sum.
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

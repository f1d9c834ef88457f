"""What one rank, or several together, measured at one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from telemetry.ranks.merging import NO_ROWS, Table, by_key, least, merge_all, same, union
from telemetry.ranks.stage_part import StagePart
from telemetry.ranks.tensor_table import EMPTY, TensorTable


@dataclass(frozen=True, kw_only=True, order=True)
class Common:
    """What all ranks have alike; the lowest rank's counts.

    Attributes:
        rank: Whose it is.
        learning_rates, loss_scale, skipped_steps, skipped: As in
            :class:`telemetry.records.StepRecord`.
    """

    rank: int
    learning_rates: tuple[float, ...] = ()
    loss_scale: float | None = None
    skipped_steps: int = 0
    skipped: bool = False


@dataclass(frozen=True, kw_only=True, order=True)
class Nonfinite:
    """Where one rank holds NaN or infinity that was not there before it ran, in words."""

    rank: int
    where: str


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPart:
    """What some of the ranks measured at one step; :func:`merge` makes one of several.

    Merging is associative and commutative: counts and minima exactly, sums up to the order of
    addition. So parts may be merged in whatever order they arrive.

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
        nonfinite: How many ranks hold NaN or infinity of their own.
        first_nonfinite: The lowest of them.
        common: What they have alike.
        not_known: Tensors of which every rank holds an addend, and nothing is known of the sum.
    """

    step: Annotated[int, same]
    wall_time: Annotated[float, max]
    size: Annotated[int, max]
    ranks: Annotated[frozenset[int], union]
    common: Annotated[Common, min]
    stages: Annotated[Mapping[tuple[int, str], StagePart], by_key(merge_all)] = field(
        default_factory=dict
    )
    tensors: Annotated[TensorTable, TensorTable.merge_all] = EMPTY
    phase: Annotated[str, same] = ""
    measured: Annotated[frozenset[int], union] = frozenset()
    scalars: Annotated[Table, Table.merge_all] = NO_ROWS
    own: Annotated[Table, Table.merge_all] = NO_ROWS
    hosts: Annotated[Mapping[str, frozenset[int]], by_key(union)] = field(default_factory=dict)
    nonfinite: Annotated[int, sum] = 0
    first_nonfinite: Annotated[Nonfinite | None, least] = None
    not_known: Annotated[frozenset[str], union] = frozenset()

    @property
    def full(self) -> bool:
        return bool(self.measured)


def merge(parts: Sequence[RankPart]) -> RankPart:
    """What all of these ranks measured.

    Raises:
        ValueError: There are none, they are of different steps, or two hold the same rank.
    """
    if len({(part.step, part.phase) for part in parts}) != 1:
        raise ValueError(f"merge: parts of steps {sorted({part.step for part in parts})}")
    if len(union(part.ranks for part in parts)) != sum(len(part.ranks) for part in parts):
        raise ValueError(f"merge: two parts of step {parts[0].step} hold the same rank")
    return merge_all(parts)

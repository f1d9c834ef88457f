"""What one rank, or several together, measured at one step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from telemetry.ranks.stage_part import StagePart, merge_stages
from telemetry.ranks.tensor_table import TensorTable
from telemetry.records import Spread


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What several ranks have of one number.

    Attributes:
        total: Sum over the ranks that have it.
        count: How many these are.
        spread: The smallest and the largest; None while nobody has a number other than NaN.
    """

    total: float
    count: int
    spread: Spread | None

    @staticmethod
    def of(rank: int, value: float) -> Figure:
        known = not math.isnan(value)
        spread = Spread(low=value, low_rank=rank, high=value, high_rank=rank) if known else None
        return Figure(total=value, count=1, spread=spread)

    @property
    def mean(self) -> float:
        return self.total / self.count


def merge_figures(parts: Iterable[Mapping[str, Figure]]) -> dict[str, Figure]:
    """Each number over all ranks."""
    merged: dict[str, Figure] = {}
    for part in parts:
        for name, figure in part.items():
            known = merged.get(name)
            merged[name] = figure if known is None else _merge_two(known, figure)
    return merged


def _merge_two(one: Figure, other: Figure) -> Figure:
    spreads = [figure.spread for figure in (one, other) if figure.spread is not None]
    spread = None
    if spreads:
        low, low_rank = min((s.low, s.low_rank) for s in spreads)
        high, high_rank = min((-s.high, s.high_rank) for s in spreads)
        spread = Spread(low=low, low_rank=low_rank, high=-high, high_rank=high_rank)
    return Figure(total=one.total + other.total, count=one.count + other.count, spread=spread)


@dataclass(frozen=True, kw_only=True)
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
    addition. So a tree may merge in whatever order parts arrive.

    Attributes:
        step, wall_time, phase: As in :class:`telemetry.records.StepRecord`.
        size: How many ranks train together.
        ranks: Which of them this holds.
        measured: Which of these measured the step in full.
        stages: Their parameters, one for each stage of a pipeline and each different layout.
        tensors: What was in their tensors.
        scalars: What the user logged.
        own: What each rank has of its own: ``step_s``, the seconds from step to step.
        hosts: Ranks by the name of their host; empty where it was sent before.
        nonfinite: How many ranks hold NaN or infinity of their own.
        first_nonfinite: The lowest of them.
        common: What they have alike.
        not_known: Tensors of which every rank holds an addend, and nothing is known of the sum.
    """

    step: int
    wall_time: float
    size: int
    ranks: frozenset[int]
    stages: tuple[StagePart, ...]
    tensors: TensorTable
    common: Common
    phase: str = ""
    measured: frozenset[int] = frozenset()
    scalars: Mapping[str, Figure] = field(default_factory=dict)
    own: Mapping[str, Figure] = field(default_factory=dict)
    hosts: Mapping[str, frozenset[int]] = field(default_factory=dict)
    nonfinite: int = 0
    first_nonfinite: Nonfinite | None = None
    not_known: frozenset[str] = frozenset()

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
    ranks = frozenset().union(*(part.ranks for part in parts))
    if len(ranks) != sum(len(part.ranks) for part in parts):
        raise ValueError(f"merge: two parts of step {parts[0].step} hold the same rank")
    if len(parts) == 1:
        return parts[0]
    stages: dict[tuple[int, str], list[StagePart]] = {}
    hosts: dict[str, frozenset[int]] = {}
    for part in parts:
        for stage in part.stages:
            stages.setdefault(stage.key, []).append(stage)
        for host, there in part.hosts.items():
            hosts[host] = hosts.get(host, frozenset()) | there
    bad = [part.first_nonfinite for part in parts if part.first_nonfinite is not None]
    return RankPart(
        step=parts[0].step,
        phase=parts[0].phase,
        wall_time=max(part.wall_time for part in parts),
        size=max(part.size for part in parts),
        ranks=ranks,
        measured=frozenset().union(*(part.measured for part in parts)),
        stages=tuple(merge_stages(stages[key]) for key in sorted(stages)),
        tensors=TensorTable.merge_all([part.tensors for part in parts]),
        scalars=merge_figures(part.scalars for part in parts),
        own=merge_figures(part.own for part in parts),
        hosts=hosts,
        nonfinite=sum(part.nonfinite for part in parts),
        first_nonfinite=min(bad, default=None),
        common=min((part.common for part in parts), key=lambda common: common.rank),
        not_known=frozenset().union(*(part.not_known for part in parts)),
    )

"""Single numbers that every rank has one of: their mean, the smallest and the largest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
        """That of one rank."""
        known = not math.isnan(value)
        spread = Spread(low=value, low_rank=rank, high=value, high_rank=rank) if known else None
        return Figure(total=value, count=1, spread=spread)

    @property
    def mean(self) -> float:
        """Mean over the ranks that have it; NaN if it is NaN on one."""
        return self.total / self.count


def merge_figures(parts: Iterable[Mapping[str, Figure]]) -> dict[str, Figure]:
    """Each number over all ranks."""
    merged: dict[str, Figure] = {}
    for part in parts:
        for name, figure in part.items():
            known = merged.get(name)
            merged[name] = figure if known is None else _merge(known, figure)
    return merged


def _merge(one: Figure, other: Figure) -> Figure:
    spreads = [figure.spread for figure in (one, other) if figure.spread is not None]
    spread = None
    if spreads:
        low, low_rank = min((s.low, s.low_rank) for s in spreads)
        high, high_rank = min((-s.high, s.high_rank) for s in spreads)
        spread = Spread(low=low, low_rank=low_rank, high=-high, high_rank=high_rank)
    return Figure(total=one.total + other.total, count=one.count + other.count, spread=spread)

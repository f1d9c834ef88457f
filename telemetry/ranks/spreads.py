"""The smallest and the largest of what the ranks have, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Spreads:
    """Of several figures that each rank has, the smallest and the largest over all ranks.

    NaN where no rank has a number, and then the rank is -1. Of several ranks with the same number,
    the lowest.

    Attributes:
        low: Smallest, float64 ``[k]``.
        low_rank: Whose that is, int32 ``[k]``.
        high: Largest, likewise.
        high_rank: Whose that is.
    """

    low: NDArray[np.float64]
    low_rank: NDArray[np.int32]
    high: NDArray[np.float64]
    high_rank: NDArray[np.int32]

    @staticmethod
    def of(rank: int, figures: Sequence[float]) -> Spreads:
        """Those of one rank."""
        values = np.array(figures, np.float64)
        ranks = np.where(np.isnan(values), -1, rank).astype(np.int32)
        return Spreads(low=values, low_rank=ranks, high=values, high_rank=ranks)

    @staticmethod
    def merge_all(
        parts: Sequence[Spreads], places: Sequence[NDArray[np.int64]], count: int
    ) -> Spreads:
        """Those over all ranks; each part's figures go to ``places`` among ``count``."""
        low, low_rank = _merge([(p.low, p.low_rank) for p in parts], places, count)
        negative, high_rank = _merge([(-p.high, p.high_rank) for p in parts], places, count)
        return Spreads(low=low, low_rank=low_rank, high=-negative, high_rank=high_rank)

    def at(self, some: NDArray[np.bool_]) -> Spreads:
        """Some of them."""
        return Spreads(
            low=self.low[some],
            low_rank=self.low_rank[some],
            high=self.high[some],
            high_rank=self.high_rank[some],
        )


def _merge(
    parts: Sequence[tuple[NDArray[np.float64], NDArray[np.int32]]],
    places: Sequence[NDArray[np.int64]],
    count: int,
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    best, owner = np.full(count, np.nan), np.full(count, -1, np.int32)
    for (values, ranks), at in zip(parts, places, strict=True):
        have, have_rank = best[at], owner[at]
        unknown = np.isnan(have) & ~np.isnan(values)
        lower = unknown | (values < have) | ((values == have) & (ranks < have_rank))
        best[at], owner[at] = np.where(lower, values, have), np.where(lower, ranks, have_rank)
    return best, owner

"""Whether parameters that should be equal on several ranks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
        """Those of no parameters."""
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
        """Those over all ranks; the order does not matter."""
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

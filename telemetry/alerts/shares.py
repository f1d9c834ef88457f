"""What is remembered of each module's share of the gradients."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.modules import Modules


@dataclass(kw_only=True)
class Shares:
    """What the rule remembers of each module; all arrays float64 ``[modules]``.

    A module's share is log10 of its gradient norm over the largest.

    Attributes:
        faint_steps: Number of steps in a row at which its share was small and its norm not zero.
        since_zero: Steps since its norm was zero.
        zero_steps: Number of steps in a row at which it was, and that of others was not.
        first_share: Its share when it was first not zero.
        largest_share: Its largest share so far.
        last_mark: Its share when ``faint_steps`` was last a power of two.
        mark_before: Its share at the power of two before.
        was_lost: 1 if it was small from the first, or the loss rose when it became so.
        update_share: log10 of its update ratio over the largest; NaN if unknown.
    """

    faint_steps: NDArray[np.float64]
    since_zero: NDArray[np.float64]
    zero_steps: NDArray[np.float64]
    first_share: NDArray[np.float64]
    largest_share: NDArray[np.float64]
    last_mark: NDArray[np.float64]
    mark_before: NDArray[np.float64]
    was_lost: NDArray[np.float64]
    update_share: NDArray[np.float64]

    @staticmethod
    def of(count: int) -> Shares:
        """The state of modules that were not seen before."""
        return Shares(**{f.name: np.full(count, _FILLS[f.name]) for f in fields(Shares)})

    def carried(self, before: Modules, after: Modules) -> Shares:
        """The state for the modules of another layout."""
        return Shares(
            **{
                f.name: after.carry(getattr(self, f.name), before.names, _FILLS[f.name])
                for f in fields(Shares)
            }
        )

    def add(self, share: NDArray[np.float64], limit: float, loss_is_worse: bool) -> None:
        """Add the shares of one step; ``-inf`` where the norm is zero."""
        zero = share == -np.inf
        self.since_zero = np.where(zero, 0.0, self.since_zero + 1)
        self.zero_steps = np.where(zero, self.zero_steps + 1, 0.0)
        self.first_share = np.where(zero | ~np.isnan(self.first_share), self.first_share, share)
        self.largest_share = np.fmax(self.largest_share, share)
        faint = ~zero & (share < limit)
        self.update_share = np.where(faint, self.update_share, np.nan)
        if not (faint.any() or self.faint_steps.any()):
            # The usual case, in short: what follows would do the same.
            self.mark_before, self.last_mark = self.last_mark, share
            return
        self.faint_steps = np.where(faint, self.faint_steps + 1, 0.0)
        lost = (self.first_share < limit) | loss_is_worse | (self.was_lost > 0)
        self.was_lost = np.where(faint & lost, 1.0, 0.0)
        marked = np.log2(np.maximum(self.faint_steps, 1)) % 1 == 0
        self.mark_before = np.where(marked, self.last_mark, self.mark_before)
        self.last_mark = np.where(marked, share, self.last_mark)


_FILLS = {
    "faint_steps": 0.0,
    "since_zero": np.inf,
    "zero_steps": 0.0,
    "first_share": np.nan,
    "largest_share": -np.inf,
    "last_mark": np.nan,
    "mark_before": np.nan,
    "was_lost": 0.0,
    "update_share": np.nan,
}

"""Bounds within which rules know beforehand that they will find nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.records.layout import Layout, norms_by_module
from telemetry.records.light import LightSteps

ABSENT = -1.0
"""Stands for the norm of a gradient that there is not."""

_APART = 9.7
"""Between the lowest and the highest norm: less than the ten times that rules note."""
_TINY = 0.1
"""Of its module's norm; what a parameter has below that is not looked at, for it may be noise."""
_RATES_APART = 1.5
"""How far learning rates may go from those of the last steps: less than rules note."""


@dataclass(kw_only=True, eq=False)
class Bounds:
    """What the next steps must keep to, so that every rule finds them quiet.

    They are drawn around some steps, and narrowed by the rules.

    Attributes:
        layout: As in the records.
        first: Number of the first step that they are for.
        count: For how many steps they are, at most.
        lowest, highest: Learning rate of each group, and then the norm of each parameter's
            gradient: shape ``[groups + parameters]``; :data:`ABSENT` where it has none.
        low, high: What follows for the norm of each module that owns parameters, ``[owners]``.
        rates_low, rates_high: The learning rates.
        mains: Where in such a row the largest gradient of each module is that has any.
        apart: A module's norm is less than so many times as large as any other's.
        loss_low, loss_high: What the user logs as ``loss``, where anything is.
    """

    layout: Layout
    first: int
    count: int
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    rates_low: NDArray[np.float64]
    rates_high: NDArray[np.float64]
    mains: NDArray[np.intp]
    apart: float = math.inf
    loss_low: float = -math.inf
    loss_high: float = math.inf

    @staticmethod
    def around(steps: LightSteps, count: int) -> Bounds | None:
        """Those of ``count`` steps after these; None if these are too far apart themselves."""
        rates, norms, layout = steps.learning_rates, steps.grad_norms, steps.layout
        present, least, most = steps.grad_present[-1], norms.min(axis=0), norms.max(axis=0)
        middle, half = np.sqrt(least * most), math.sqrt(_APART)
        by_module = norms_by_module(middle[np.newaxis], layout)[0]
        tiny = (most < _TINY * by_module[layout.owners]) & present
        if not (rates.size and ((most <= _APART * least) | tiny).all()):
            return None
        if (steps.grad_present != present).any():
            return None
        low = np.where(tiny, 0.0, middle / half)
        high = np.where(tiny, _TINY * by_module[layout.owners], middle * half)
        of_modules = norms_by_module(np.stack([low, high]), layout)[:, layout.owning]
        rates_low, rates_high = rates.min(axis=0) / _RATES_APART, rates.max(axis=0) * _RATES_APART
        return Bounds(
            layout=layout,
            first=steps.steps[-1] + 1,
            count=count,
            lowest=np.concatenate([rates_low, np.where(present, low, ABSENT)]),
            highest=np.concatenate([rates_high, np.where(present, high, ABSENT)]),
            low=of_modules[0],
            high=of_modules[1],
            rates_low=rates_low,
            rates_high=rates_high,
            mains=rates_low.size + _mains(middle, layout),
        )

    def last_for(self, count: int) -> None:
        """Narrow them down to so many steps."""
        self.count = min(self.count, count)

    @property
    def total(self) -> float:
        """The highest norm of all gradients together."""
        return float(np.sqrt(np.square(self.high).sum()))

    def hold(self, layout: Layout, first: int, last: int, rows: NDArray[np.float64]) -> bool:
        """Whether some steps keep to them, but for their losses.

        Args:
            layout: Of the steps.
            first, last: Their numbers.
            rows: As :attr:`lowest` and :attr:`highest`, one for each.
        """
        is_meant = self.first <= first and last < self.first + self.count
        if not is_meant or layout is not self.layout or rows.shape[1:] != self.lowest.shape:
            return False
        if not ((self.lowest <= rows) & (rows <= self.highest)).all():
            return False
        norms = rows[:, self.mains]
        return bool((norms.max(axis=1) < self._mains_apart * norms.min(axis=1)).all())

    @property
    def _mains_apart(self) -> float:
        """The same for the largest gradients of modules: each is the least that its module has."""
        return self.apart / math.sqrt(np.bincount(self.layout.owners).max())

    def hold_loss(self, loss: float) -> bool:
        """Whether a loss keeps to them."""
        return self.loss_low <= loss <= self.loss_high


def _mains(norms: NDArray[np.float64], layout: Layout) -> NDArray[np.intp]:
    """The parameter with the largest norm of each module, unless that is 0."""
    order = np.lexsort((norms, layout.owners))
    lasts = order[np.append(np.diff(layout.owners[order]) > 0, True)]
    mains: NDArray[np.intp] = lasts[norms[lasts] > 0]
    return mains

"""Which layers left their own past first, from the gradient norms of every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.history import NORMAL_CONSISTENT
from telemetry.alerts.modules import Modules
from telemetry.records import Layout, LightSteps, StepRecord


@dataclass(frozen=True, kw_only=True)
class Mover:
    """A layer whose gradient norm left its past.

    Attributes:
        name: The module's.
        step: The first step from which on its norm was unusual.
        factor: How many times the usual norm it reached; below 1 if it fell.
    """

    name: str
    step: int
    factor: float


class _Row(NamedTuple):
    step: int
    norms: NDArray[np.float64]


class NormRing:
    """The gradient norms of all modules at the last steps."""

    _names: tuple[str, ...]
    _rows: deque[_Row]

    def __init__(self) -> None:
        self._modules = Modules()
        self._names = ()
        self._rows = deque(maxlen=_STEPS)

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self._follow(record.layout)
        self._rows.append(_Row(record.step, self._modules.grad_norms(record)))

    def add_light(self, steps: LightSteps) -> None:
        """Add several."""
        self._follow(steps.layout)
        self._rows += map(_Row, steps.steps, self._modules.grad_norms(steps))

    def _follow(self, layout: Layout) -> None:
        if self._modules.layout is not layout:
            self._modules = Modules.of(layout)
            if self._names != self._modules.names:
                self._names = self._modules.names
                self._rows.clear()

    def movers(self, since: int) -> Sequence[Mover]:
        """The layers whose norm was unusual at step ``since`` or soon after it, earliest first.

        Usual is what lay within four standard deviations and a factor of two of the median, more
        than ten steps before ``since``.
        """
        calm = [row for step, row in self._rows if step < since - _LEAD]
        recent = [(step, row) for step, row in self._rows if step >= since - _LEAD]
        if len(calm) < _FEWEST or not recent:
            return ()
        with np.errstate(divide="ignore"):
            past = np.log10(np.array(calm))
            now = np.log10(np.array([row for _, row in recent]))
        usual = np.median(past, axis=0)
        with np.errstate(invalid="ignore"):
            deviation = NORMAL_CONSISTENT * np.median(np.abs(past - usual), axis=0)
            off = now - usual
            is_off = np.abs(off) > np.maximum(_DEVIATIONS * deviation, _DECADES)
        steps = np.array([step for step, _ in recent])
        found = []
        for column in np.flatnonzero(np.isfinite(usual)):
            first = _begins(is_off[:, column], steps, since)
            if first is not None:
                reached = off[first:, column]
                farthest = reached[np.nanargmax(np.abs(reached))]
                name = self._names[column]
                mover = Mover(name=name, step=int(steps[first]), factor=float(10**farthest))
                found.append((mover.step, -abs(farthest), mover))
        return [mover for *_, mover in sorted(found, key=lambda item: item[:2])]

    def count(self) -> int:
        """Number of layers."""
        return len(self._names)


def _begins(is_off: NDArray[np.bool_], steps: NDArray[np.int64], since: int) -> int | None:
    """Where the first unusual step after ``since`` has its beginning, without a gap."""
    later = np.flatnonzero(is_off & (steps >= since))
    if not later.size:
        return None
    first = int(later[0])
    while first > 0 and is_off[first - 1]:
        first -= 1
    return first


_STEPS = 120  # a past of a hundred steps, as in course, and the steps that are judged
_LEAD = 10  # by eye: instability shows in the norms a few steps before the loss
_FEWEST = 20
_DEVIATIONS = 4.0  # as for the loss in course
_DECADES = 0.3  # a factor of two

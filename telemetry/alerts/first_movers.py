"""The gradient norms of the last steps, to find which layers left their past first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.modules import Modules
from telemetry.movers import LOOK_BACK, Mover, movers
from telemetry.plain_text import called
from telemetry.records import Layout, StepRecord

LATER = 20
"""Steps after which it may still be asked about one."""

FEW = 0.1
"""Of all layers; by eye, so that one noisy layer is no reason."""


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
        self._rows = deque(maxlen=LOOK_BACK + LATER)

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self._follow(record.layout)
        self._rows.append(_Row(record.step, record.owner_grad_norms))

    def _follow(self, layout: Layout) -> None:
        if self._modules.layout is not layout:
            self._modules = Modules.of(layout)
            if self._names != self._modules.names:
                self._names = self._modules.names
                self._rows.clear()

    def movers(self, since: int) -> Sequence[Mover]:
        """The layers whose norm had left its past by step ``since``, earliest first.

        As the page finds them: of what came later it says nothing.
        """
        rows = [row for row in self._rows if since - LOOK_BACK < row.step <= since]
        steps, norms = [row.step for row in rows], [row.norms for row in rows]
        return movers(self._names, steps, norms, since) or ()

    def count(self) -> int:
        """Number of layers."""
        return len(self._names)

    def in_words(self, since: int) -> str:
        """The same for a message: at most five layers; nothing if there are none."""
        movers, count = self.movers(since), self.count()
        if not movers:
            return ""
        first = [mover for mover in movers if mover.step == movers[0].step]
        if len(first) > FEW * count and len(first) > _NAMED:
            return f" {len(first)} of {count} layers moved first, together at step {first[0].step}."
        named = ", ".join(
            f"{called(mover.name)} ({mover.factor:.3g} times at step {mover.step})"
            for mover in movers[:_NAMED]
        )
        return f" First to move: {named}."


_NAMED = 5

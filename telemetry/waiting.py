"""Steps that wait to be processed many at once, because they are like those before them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from telemetry.capture import LightItem, LightRows
from telemetry.host_copy import HostCopy
from telemetry.logged import LoggedScalars
from telemetry.loss import LossChoice
from telemetry.records import Bounds

WAIT_S = 0.75
"""The longest time for which a step waits here."""


class Waiting:
    """Keeps steps, and what was logged between them, while all keep to the bounds of the rules.

    Args:
        loss: Says which of what was logged is the loss.

    Attributes:
        bounds: What the next steps must keep to; None: none may wait.
        last: Number of the last step that waits.
    """

    def __init__(self, loss: LossChoice) -> None:
        self._loss = loss
        self.bounds: Bounds | None = None
        self.last = -1
        self._items: list[LightItem | LoggedScalars] = []
        self._since = 0.0

    def add(self, items: Sequence[LightItem | LoggedScalars]) -> bool:
        """Keep what has come; whether it may wait, with all before it."""
        if not self._items:
            self._since = time.monotonic()
        self._items += items
        if self.bounds is None:
            return False
        return all(self._may_wait(item, self.bounds) for item in items) and self.left_s() != 0

    def take(self) -> Sequence[LightItem | LoggedScalars]:
        """All that waits, to be processed now."""
        items, self._items = self._items, []
        return items

    def left_s(self) -> float | None:
        """Seconds until it is to be processed; None if nothing waits."""
        return max(0.0, self._since + WAIT_S - time.monotonic()) if self._items else None

    def _may_wait(self, item: LightItem | LoggedScalars, bounds: Bounds) -> bool:
        if isinstance(item, LoggedScalars):
            if self._loss.tag is None:
                return False
            loss = item.values.get(self._loss.tag)
            if isinstance(loss, HostCopy):
                loss = float(loss.wait())
            return loss is None or bounds.hold_loss(loss)
        if not isinstance(item, LightRows) or item.block.is_closed:
            return False
        block, first, end = item.block, item.first, item.end
        self.last = block.steps[end - 1]
        return bounds.hold(block.layout, block.steps[first], self.last, block.rows[first:end])

"""Ranks that train together count their steps alike and measure the same ones in full."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from telemetry.failures import Failures
from telemetry.ranks.part import News, named
from telemetry.ranks.rank_part import RankPart
from telemetry.records import StepRecord

_ANNOUNCED_KEPT = 8
"""Steps that were announced, of which ranks that heard of them too late have nothing in full."""

_LEAD_STEPS = 16
_LEAD_S = 2.0
"""A step that rules ask for is announced so much before, for all ranks to hear of it."""


class CommonSteps:
    """What one rank knows of the steps of all; ``ask`` has one measured in full."""

    def __init__(
        self, ask: Callable[[int], None], *, current_step: Callable[[], int], failures: Failures
    ) -> None:
        self.first_step = current_step()
        self._ask = ask
        self._current_step = current_step
        self._failures = failures
        self._announced: deque[int] = deque([-1], maxlen=_ANNOUNCED_KEPT)
        self._last: tuple[int, float] = (-1, 0.0)
        self._step_s = 0.0

    def next_full(self, after: int) -> int | None:
        """The step that all are to measure in full, for rules want one after this step.

        None: one that comes later has been announced, or how long a step takes is not known yet.
        """
        if after <= self._announced[-1] or self._step_s <= 0:
            return None
        ahead = max(_LEAD_STEPS, math.ceil(_LEAD_S / self._step_s))
        self._announced.append(self._current_step() + ahead)
        return self._announced[-1]

    def see(self, part: RankPart, record: StepRecord) -> None:
        """Note how long steps take; report ranks that measure other steps in full than the rest."""
        if not record.phase:
            step, wall_time = self._last
            self._last = record.step, record.wall_time
            self._step_s = max(0.0, record.wall_time - wall_time) / max(1, record.step - step)
        others = part.ranks - part.measured
        if part.full and others and part.step not in self._announced:
            self._failures.log_once(
                f"step {part.step} was measured in full by {named(part.measured)} and not by "
                f"{named(others)}; use the same every_n_steps on all ranks, without max_overhead",
                kind="intervals",
            )

    def hear(self, news: News) -> None:
        """Do as the first rank announces; report if it counts otherwise than this one."""
        if news.first_step not in (None, self.first_step):
            self._failures.log_once(
                f"this rank counts its steps from {self.first_step} and the first rank from "
                f"{news.first_step}, so their records do not meet; give all ranks the same "
                'first_step (with "auto", each has to see the directory of the run)',
                kind="first step",
            )
        for step in news.full_steps:
            if step > self._current_step():  # else this rank is too late
                self._ask(step)

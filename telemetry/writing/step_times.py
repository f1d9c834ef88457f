"""The curves of how long a step takes, and of how many examples are trained on per second."""

from __future__ import annotations

from collections.abc import Iterator

from telemetry.events import summaries
from telemetry.records import StepRecord
from telemetry.tag_names import RUN


class StepTimes:
    """Takes the time from step to step, of which each full step has a point: the mean of those
    since the last point, measured in full or not.

    What lies between two steps counts, such as waiting for data, but not where a phase ran: that is
    not training.
    """

    def __init__(self) -> None:
        self._begun: tuple[int, float] | None = None  # step and wall time
        self._last = -1, 0.0
        self._steps, self._taken_s = 0, 0.0

    def pause(self) -> None:
        """The time until the next step does not count."""
        if self._begun is not None:
            self._steps += self._last[0] - self._begun[0]
            self._taken_s += self._last[1] - self._begun[1]
            self._begun = None

    def values_of(self, record: StepRecord) -> Iterator[bytes]:
        """``~run/time/step_s`` of a full step, and ``examples_per_s`` where its batch is known."""
        if record.phase:
            self.pause()
            return
        self._take(record.step, record.wall_time)
        if not record.full:
            return
        self.pause()
        if self._steps > 0 and self._taken_s > 0:  # a clock may be set back
            step_s = self._taken_s / self._steps
            yield summaries.scalar(f"{RUN}time/step_s", step_s)
            if record.examples:
                yield summaries.scalar(f"{RUN}time/examples_per_s", record.examples / step_s)
        self._begun = self._last
        self._steps, self._taken_s = 0, 0.0

    def _take(self, step: int, wall_time: float) -> None:
        if step < self._last[0]:  # back to a checkpoint
            self._begun, self._steps, self._taken_s = None, 0, 0.0
        self._last = step, wall_time
        if self._begun is None:
            self._begun = self._last

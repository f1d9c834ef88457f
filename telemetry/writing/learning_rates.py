"""The curves of the learning rates, with a point wherever a rate changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from telemetry.events import summaries
from telemetry.records import StepRecord
from telemetry.tag_names import RUN


class LearningRates:
    """Chooses which points of the curves to write. A full step has one point of each curve.

    TensorBoard joins points by straight lines. When a rate changes, the step before gets a point
    with the old rate, so that the jump is drawn as a jump.
    """

    def __init__(self) -> None:
        self._step, self._wall_time = -1, 0.0
        self._rates: tuple[float, ...] = ()
        self._drawn: dict[int, int] = {}  # step of each curve's last point

    def late_values(self, record: StepRecord) -> tuple[int, float, Sequence[bytes]]:
        """Points for the step before, whose rates end with it. Call this before :meth:`values_of`.

        Returns:
            Step, wall time and values of an event to write first.
        """
        if record.step <= self._step:
            self._rates = ()  # back to a checkpoint
        late = [
            _value(group, self._rates[group])
            for group in self._changed(record)
            if group < len(self._rates) and self._drawn[group] < self._step
        ]
        return self._step, self._wall_time, late

    def values_of(self, record: StepRecord) -> Iterator[bytes]:
        """The values to write in an event with the record's step."""
        if not record.learning_rates:
            return
        changed = range(len(record.learning_rates)) if record.full else self._changed(record)
        self._step, self._wall_time = record.step, record.wall_time
        self._rates = record.learning_rates
        for group in changed:
            self._drawn[group] = record.step
            yield _value(group, record.learning_rates[group])

    def _changed(self, record: StepRecord) -> Sequence[int]:
        """Groups whose rate differs from that of the step before."""
        before, now = self._rates, record.learning_rates
        if now == before:
            return ()
        return [g for g, rate in enumerate(now) if g >= len(before) or _differs(rate, before[g])]


def _differs(rate: float, other: float) -> bool:
    return rate != other and not (rate != rate and other != other)  # NaN equals NaN here


def _value(group: int, rate: float) -> bytes:
    return summaries.scalar(f"{RUN}learning_rate/{group}", rate)

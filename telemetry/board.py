"""Everything that one run writes for TensorBoard, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry import dashboards, depth, layouts
from telemetry.events import summaries
from telemetry.heatmap_picture import HeatmapPicture
from telemetry.plugin_data import Recorder
from telemetry.records import Alert, StepRecord


class Board:
    """Turns records and alerts into values: for TensorBoard's dashboards and for our own page.

    Args:
        pictures: Whether to draw the layers × steps picture now and then.
    """

    def __init__(self, *, pictures: bool = True) -> None:
        self._page = Recorder()
        self._picture = HeatmapPicture() if pictures else None
        self._alert_count = 0

    def first_values(self) -> Sequence[Summary.Value]:
        """What to write once, at the beginning of the run."""
        return layouts.custom_scalars_value(), self._alert_curve()

    def is_needed(self, record: StepRecord) -> bool:
        """Whether what is written later cannot be read without this record's values."""
        return self._page.begins_layout(record)

    def values_of(self, record: StepRecord) -> Iterator[Summary.Value]:
        """What to write in an event with the record's step."""
        yield from dashboards.values_of(record)
        yield from depth.values_of(record)
        yield from self._page.values_of(record)
        if self._picture is not None:
            yield from self._picture.values_of(record)

    def alert_values(self, alert: Alert) -> Sequence[Summary.Value]:
        """What to write in an event with the alert's step."""
        text = dashboards.alert_value(alert, self._alert_count)
        self._alert_count += 1
        return text, self._page.alert_value(alert), self._alert_curve()

    def pending_s(self, now: float) -> float | None:
        """How long :meth:`pending_values` may still wait; None: there are none."""
        return self._page.pending_s(now)

    def pending_values(self) -> tuple[int, Sequence[Summary.Value]]:
        """What is held back to be written together, and the step of the event that takes it."""
        return self._page.last_step, tuple(self._page.pending_values())

    def _alert_curve(self) -> Summary.Value:
        return summaries.scalar("alerts/count", self._alert_count)

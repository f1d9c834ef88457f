"""All values that a run writes for TensorBoard."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Iterator, Sequence

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import metadata as charts_metadata
from tensorboard.plugins.hparams import metadata as hparams_metadata

from telemetry.alert import Alert
from telemetry.events import summaries
from telemetry.events.page_format import LAYOUT_PREFIX, LOSS_PREFIX
from telemetry.plain_text import printable
from telemetry.records import StepRecord
from telemetry.tag_names import FULL_STEPS, RUN
from telemetry.writing import tags
from telemetry.writing.curves import (
    LearningRates,
    StepTimes,
    custom_scalars_value,
    depth_values,
    rank_values,
)
from telemetry.writing.heatmap_picture import HeatmapPicture
from telemetry.writing.page import PageWriter
from telemetry.writing.size_budget import SizeBudget

log = logging.getLogger("telemetry")

_SETTINGS = frozenset({charts_metadata.PLUGIN_NAME, hparams_metadata.PLUGIN_NAME})
_MARKS = [mark.encode() for mark in (LAYOUT_PREFIX, LOSS_PREFIX, *_SETTINGS)]


def needed_in_every_file(values: Iterable[bytes]) -> list[bytes]:
    """Return the values that readers need first: layouts, loss, charts, hyperparameters."""
    return [value for value in values if any(m in value for m in _MARKS) and _is_needed(value)]


def _is_needed(serialized: bytes) -> bool:
    (value,) = Summary.FromString(serialized).value
    plugin_name = value.metadata.plugin_data.plugin_name
    return value.tag.startswith((LAYOUT_PREFIX, LOSS_PREFIX)) or plugin_name in _SETTINGS


class Dashboard:
    """Turns records and alerts into values for TensorBoard's dashboards and the Telemetry page.

    Args:
        pictures: Whether to draw the layers × steps picture from time to time.
        loss: Tag of the loss, if the user has named it.

    Attributes:
        rates: Curves of learning rates, which may need a point before a record's own.
    """

    def __init__(
        self,
        *,
        pictures: bool = True,
        session_id: str | None = None,
        size_budget: SizeBudget | None = None,
        loss: str | None = None,
    ) -> None:
        self._loss = loss
        self._size_budget = size_budget or SizeBudget()
        self.page = PageWriter(session_id)
        self.rates = LearningRates()
        self._times = StepTimes()
        self._picture = HeatmapPicture(self._size_budget) if pictures else None
        self._alert_count = 0

    def first_values(self) -> Sequence[bytes]:
        """Return the values to write at the beginning of the run."""
        return custom_scalars_value(self._loss), self._alert_curve()

    def values_of(self, record: StepRecord) -> Iterator[Sequence[bytes]]:
        """Yield the values to write in events with the record's step, some at a time."""
        if self.page.begins_layout(record):
            yield list(self._changes(record))
        yield from tags.values_of(record, self._size_budget)
        yield [
            *(rank_values(record.ranks) if record.ranks is not None else ()),
            *self.rates.values_of(record),
            *self._times.values_of(record),
            *depth_values(record),
            *self.page.values_of(record),
            *(self._picture.values_of(record) if self._picture is not None else ()),
        ]

    def alert_values(self, alert: Alert) -> Sequence[bytes]:
        """Return the values to write in an event with the alert's step."""
        number, before = self._alert_count, self._alert_curve()
        self._alert_count += 1
        text, of_page = tags.alert_value(alert, number), self.page.alert_value(alert, number)
        return text, of_page, before, self._alert_curve()  # drawn as a jump

    def pending_values(self) -> tuple[int, Sequence[bytes]]:
        """Return the step and the values of an event with all values that were held back."""
        return self.page.last_step, tuple(self.page.pending_values())

    def end_values(
        self, exception: BaseException | None, *, scheduled: int, requested: int
    ) -> tuple[int, Sequence[bytes]]:
        """Return the step and the values of the last event.

        ``scheduled`` and ``requested`` are numbers of full steps.
        """
        if (value := self.page.end_value(exception)) is None:
            return self.page.last_step, ()
        pictures = () if self._picture is None else self._picture.last_values()
        full_steps = zip(FULL_STEPS, (scheduled, requested), strict=True)
        counts = [summaries.scalar(tag, count) for tag, count in full_steps]
        return self.page.last_step, (value, self._alert_curve(), *pictures, *counts)

    def _changes(self, record: StepRecord) -> Iterator[bytes]:
        """Yield a text with the parameters that changed since the last step, if any did."""
        before = self.page.layout
        if before is None:
            return
        old, new = ({p.name: p.shape for p in one.parameters} for one in (before, record.layout))
        removed = [name for name in old if name not in new]
        added = [name for name in new if name not in old]
        # A lazy parameter has no shape before.
        reshaped = [name for name in new if old.get(name) and old[name] != new[name]]
        changes = [
            f"{what}: {printable(reprlib.repr(names))}"
            for what, names in (("added", added), ("removed", removed), ("reshaped", reshaped))
            if names
        ]
        if changes:
            line = f"The model's parameters changed before step {record.step}; {'; '.join(changes)}"
            log.info("telemetry: %s", line)
            yield summaries.text(f"{RUN}layers_changed", line)

    def _alert_curve(self) -> bytes:
        return summaries.scalar(f"{RUN}alerts/count", self._alert_count)

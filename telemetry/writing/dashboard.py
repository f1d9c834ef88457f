"""All values that a run writes for TensorBoard, and the curves of the whole run."""

from __future__ import annotations

import logging
import re
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as charts_metadata
from tensorboard.plugins.hparams import metadata as hparams_metadata

from telemetry.alert import Alert
from telemetry.events import summaries
from telemetry.events.page_format import LAYOUT_PREFIX, LOSS_PREFIX
from telemetry.layers import STATISTICS, Statistic, table
from telemetry.layers.heat_map import heat_map
from telemetry.plain_text import printable
from telemetry.records import Layout, RankFacts, StepRecord
from telemetry.records.loss import LOSS_TAGS
from telemetry.tag_names import FULL_STEPS, RUN, TIMES, TOKENS_PER_S, plain
from telemetry.writing import tags
from telemetry.writing.page import PageWriter
from telemetry.writing.size_budget import SizeBudget

log = logging.getLogger("telemetry")

_SETTINGS = frozenset({charts_metadata.PLUGIN_NAME, hparams_metadata.PLUGIN_NAME})
_MARKS = [mark.encode() for mark in (LAYOUT_PREFIX, LOSS_PREFIX, *_SETTINGS)]


def needed_in_every_file(values: Iterable[bytes]) -> list[bytes]:
    """Return the values that readers need first: layouts, loss, charts, hyperparameters."""
    return [value for value in values if any(m in value for m in _MARKS) and _is_needed(value)]


def _is_needed(serialized: bytes) -> bool:
    value, *others = Summary.FromString(serialized).value
    plugin_name = value.metadata.plugin_data.plugin_name
    is_needed = value.tag.startswith((LAYOUT_PREFIX, LOSS_PREFIX)) or plugin_name in _SETTINGS
    return is_needed and not others


class Dashboard:
    """Turns records and alerts into values for TensorBoard's dashboards and the Telemetry page.

    ``loss`` is its tag, if the user has named it. ``rates`` may need a point before a record's own.
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
        self._times, self._usage = StepTimes(), Usage()
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
            *self._usage.values_of(record),
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
        counts = summaries.scalars(full_steps)
        return self.page.last_step, (value, self._alert_curve(), *pictures, counts)

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


# --- curves of the whole run ---------------------------------------------------------------------


class LearningRates:
    """Selects the points of the curves. A full step has one point of each curve.

    TensorBoard joins points by straight lines. When a rate changes, the step before gets a point
    with the old rate, so that the jump is drawn as a jump.
    """

    def __init__(self) -> None:
        self._step, self._wall_time = -1, 0.0
        self._rates: tuple[float, ...] = ()
        self._drawn: dict[int, int] = {}  # step of each curve's last point

    def late_values(self, record: StepRecord) -> tuple[int, float, Sequence[bytes]]:
        """Return step, time and values of an event to write before that of :meth:`values_of`."""
        if record.step <= self._step:
            self._rates = ()  # back to a checkpoint
        late = [
            _value(group, self._rates[group])
            for group in self._changed(record)
            if group < len(self._rates) and self._drawn[group] < self._step
        ]
        return self._step, self._wall_time, late

    def values_of(self, record: StepRecord) -> Iterator[bytes]:
        if not record.learning_rates:
            return
        changed = range(len(record.learning_rates)) if record.full else self._changed(record)
        self._step, self._wall_time = record.step, record.wall_time
        self._rates = record.learning_rates
        for group in changed:
            self._drawn[group] = record.step
            yield _value(group, record.learning_rates[group])

    def _changed(self, record: StepRecord) -> Sequence[int]:
        before, now = self._rates, record.learning_rates
        if now == before:
            return ()
        return [g for g, rate in enumerate(now) if g >= len(before) or _differs(rate, before[g])]


def _differs(rate: float, other: float) -> bool:
    return rate != other and not (rate != rate and other != other)  # NaN equals NaN here


def _value(group: int, rate: float) -> bytes:
    return summaries.scalar(f"{RUN}learning_rate/{group}", rate)


class StepTimes:
    """Mean time from step to step since the last full step; a full step has a point.

    Time between two steps counts, such as waiting for data. Intervals with a phase do not.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None  # step and wall time
        self._steps, self._taken_s = 0, 0.0

    def values_of(self, record: StepRecord) -> Iterator[bytes]:
        """Yield ``~run/time/step_s`` of a full step, and ``examples_per_s`` of a known batch."""
        if record.phase:
            self._last = None
            return
        if self._last is not None:
            self._steps += record.step - self._last[0]
            self._taken_s += record.wall_time - self._last[1]
            if record.step < self._last[0]:  # back to a checkpoint
                self._steps, self._taken_s = 0, 0.0
        self._last = record.step, record.wall_time
        if not record.full:
            return
        if self._steps > 0 and self._taken_s > 0:  # a clock may be set back
            step_s = self._taken_s / self._steps
            yield summaries.scalar(f"{RUN}time/step_s", step_s)
            if record.examples:
                yield summaries.scalar(f"{RUN}time/examples_per_s", record.examples / step_s)
        self._steps, self._taken_s = 0, 0.0


class Usage:
    """Means of the parts of a step since the last full step, and memory; a full step has a point.

    Parts of full steps, which measuring prolongs, count only where no other step was measured.
    """

    def __init__(self) -> None:
        self._memory: dict[str, float] = {}
        self._sums = defaultdict[str, float](float)  # over measured steps, by tag; their number

    def values_of(self, record: StepRecord) -> list[bytes]:
        if record.phase:
            return []
        self._memory |= {tag: v for tag, v in record.usage.items() if tag not in TIMES}
        if record.bare_step_s and not (record.full and self._sums):
            parts = {tag: record.usage[tag] for tag in TIMES}
            for tag, value in {**parts, "tokens": record.tokens, "steps": 1}.items():
                self._sums[tag] += value
        if not record.full:
            return []
        sums, self._sums = self._sums, defaultdict(float)
        points = {tag: sums[tag] / sums["steps"] for tag in TIMES if sums}
        if sums["tokens"]:
            points[TOKENS_PER_S] = sums["tokens"] / sum(sums[tag] for tag in TIMES)
        points |= self._memory
        return [summaries.scalars((f"{RUN}{tag}", value) for tag, value in points.items())]


QUANTILES: Mapping[str, float] = {"p05": 0.05, "median": 0.5, "p95": 0.95}

# Statistics whose quantiles over all layers are curves, by the name in their tags. Where magnitudes
# matter, the curves are of log10, because TensorBoard's charts have a linear axis.
DEPTH_CURVES: Mapping[str, Statistic] = {
    f"log10_{statistic.name}" if statistic.log else statistic.name: statistic
    for statistic in STATISTICS
    if statistic.over_depth
}


def depth_values(record: StepRecord) -> list[bytes]:
    """Return ``~run/depth/<name>/p05``, ``median`` and ``p95`` of a full step.

    Quantiles are over the finite values of all layers; for a logarithm, over the positive ones.
    """
    if not record.full or record.phase or record.skipped:
        return []
    layers, shares = table(record), list(QUANTILES.values())
    first = record.layout.input_count
    points: list[tuple[str, float]] = []
    for name, statistic in DEPTH_CURVES.items():
        known = layers.column(statistic.name)[first:]  # NaN if it was not measured
        values = known[np.isfinite(known) & ((known > 0) | (not statistic.log))]
        values.sort()
        if count := len(values):
            scaled = np.log10(values) if statistic.log else values
            # numpy.quantile returns the same and takes ten times as long for a few values.
            quantiles = np.interp(np.multiply(shares, count - 1), np.arange(count), scaled)
            tags = [f"{RUN}depth/{name}/{quantile}" for quantile in QUANTILES]
            points += zip(tags, quantiles.tolist(), strict=True)
    return [summaries.scalars(points)]


def rank_values(facts: RankFacts) -> list[bytes]:
    """Return ``rank_time/slowest``, in seconds per step, and ``rank_spread/<tag>/...``.

    A tag that is equal on all ranks, or that one rank alone has logged, has no points.
    """
    points: list[tuple[str, float]] = []
    if facts.step_s is not None:
        points.append((f"{RUN}rank_time/slowest", facts.step_s.high))
        points.append((f"{RUN}rank_time/slowest_rank", facts.step_s.high_rank))
    for tag, spread in {**facts.scalars, **facts.usage}.items():
        if spread.low_rank != spread.high_rank:
            prefix = f"{RUN}rank_spread/{plain(tag)}"
            points.append((f"{prefix}/min", spread.low))
            points.append((f"{prefix}/min_rank", spread.low_rank))
            points.append((f"{prefix}/max", spread.high))
            points.append((f"{prefix}/max_rank", spread.high_rank))
    return [summaries.scalars(points)]


def custom_scalars_value(loss: str | None = None) -> bytes:
    """Return the charts of the Custom Scalars dashboard, to write once, at step 0.

    TensorBoard merges the charts of all runs by their titles, so tags are patterns that match in
    every run. ``loss`` is the tag of the loss, if the user has named it.
    """
    losses = [LOSS_TAGS] if loss is None else [f"^{re.escape(loss)}$", LOSS_TAGS]
    charts = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title="Telemetry",
                chart=[
                    _curves("Loss", *losses),
                    _curves("Alerts", f"^({RUN})?alerts/count$"),
                    _curves("Seconds per step", f"^{RUN}time/step_s$"),
                    *(
                        _curves(
                            f"{_title(name)}: median over all layers", f"^{RUN}depth/{name}/median$"
                        )
                        for name in DEPTH_CURVES
                    ),
                ],
            ),
            # Bands of several runs hide each other.
            layout_pb2.Category(
                title="Telemetry: ranges over all layers, for one run",
                chart=[*map(_margins, DEPTH_CURVES)],
                closed=True,
            ),
        ]
    )
    return summaries.tensor(
        charts_metadata.CONFIG_SUMMARY_TAG, charts.SerializeToString(), charts_metadata.PLUGIN_NAME
    )


def _curves(title: str, *patterns: str) -> layout_pb2.Chart:
    return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=patterns))


def _title(name: str) -> str:
    return DEPTH_CURVES[name].title + (" (log10)" if DEPTH_CURVES[name].log else "")


def _margins(name: str) -> layout_pb2.Chart:
    prefix = f"{RUN}depth/{name}"
    series = layout_pb2.MarginChartContent.Series(
        value=f"{prefix}/median", lower=f"{prefix}/p05", upper=f"{prefix}/p95"
    )
    return layout_pb2.Chart(
        title=f"{_title(name)}: median over all layers, 5 to 95 %",
        margin=layout_pb2.MarginChartContent(series=[series]),
    )


# --- picture -------------------------------------------------------------------------------------

HEATMAP_TAG = f"{RUN}telemetry_heatmap"
_MAX_COLUMNS = 512
_MAX_ROWS = 512
_FIRST_PICTURE = 8  # full steps
_GROWTH = 1.25
_PAUSE_S = 10.0


class HeatmapPicture:
    """Picture of layers × steps for TensorBoard's Images tab: gradient norms of full steps.

    It draws after 25 % more steps and at least ten seconds, and once more at the end. TensorBoard
    always keeps the last picture.
    """

    def __init__(self, size_budget: SizeBudget | None = None) -> None:
        self._size_budget = size_budget or SizeBudget()
        self._layout: Layout | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps: list[int] = []
        self._columns: list[NDArray[np.float64]] = []
        self._stride = 1  # full steps per column
        self._taken = 0
        self._drawn, self._drawn_at_s = 0, 0.0  # full steps in the last picture, and its time

    def values_of(self, record: StepRecord) -> Iterator[bytes]:
        """Add a record; yield a picture if one is due."""
        if not record.full or record.phase or record.skipped:
            return
        if record.layout is not self._layout:
            self._begin()
            self._layout = record.layout
        self._add(record)
        is_due = self._taken >= max(_FIRST_PICTURE, self._drawn * _GROWTH)
        if is_due and record.wall_time > self._drawn_at_s + _PAUSE_S:
            self._drawn_at_s = record.wall_time
            yield self._picture()

    def last_values(self) -> Iterator[bytes]:
        """Yield a picture of all steps, unless the last one shows them or they are few."""
        if self._taken > self._drawn and self._taken >= _FIRST_PICTURE:
            yield self._picture()

    def _add(self, record: StepRecord) -> None:
        norms = np.where(record.grad_present, record.grad_norms, -1.0)[record.layout.depth_order]
        if self._taken % self._stride:
            self._columns[-1] = np.maximum(self._columns[-1], norms)
        else:
            self._columns.append(norms)
            self._steps.append(record.step)
        self._taken += 1
        if len(self._columns) == _MAX_COLUMNS and self._taken % self._stride == 0:
            pairs = zip(self._columns[::2], self._columns[1::2], strict=True)
            self._columns = [np.maximum(a, b) for a, b in pairs]
            self._steps = self._steps[::2]
            self._stride *= 2

    def _picture(self) -> bytes:
        assert self._layout is not None
        self._drawn = self._taken
        matrix = np.stack(self._columns, axis=1)
        starts = np.arange(0, len(matrix), -(-len(matrix) // _MAX_ROWS))
        names = [
            printable(self._layout.parameters[i].name) for i in self._layout.depth_order[starts]
        ]
        drawn = heat_map(
            np.maximum.reduceat(matrix, starts), names, self._steps, title="gradient norm"
        )
        return self._size_budget.picture(HEATMAP_TAG, drawn.pixels())

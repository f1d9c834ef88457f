"""All values that a run writes for TensorBoard, and the curves of the whole run."""

from __future__ import annotations

import logging
import reprlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from telemetry.alert import Alert
from telemetry.events import summaries
from telemetry.layers import STATISTICS, Statistic, table
from telemetry.plain_text import printable
from telemetry.records import Layout, RankFacts, StepRecord
from telemetry.tag_names import FULL_STEPS, RUN, TIMES, TOKENS_PER_S, plain
from telemetry.writing import tags

log = logging.getLogger("telemetry")


class Dashboard:
    """Turns records and alerts into values for TensorBoard's dashboards.

    ``rates`` may need a point before a record's own.
    """

    def __init__(self) -> None:
        self._pictures = tags.Pictures()
        self.rates = LearningRates()
        self._times, self._usage = StepTimes(), Usage()
        self._alert_count = 0
        self._layout: Layout | None = None

    def first_values(self) -> Sequence[bytes]:
        """Return the values to write at the beginning of the run."""
        return (self._alert_curve(),)

    def values_of(self, record: StepRecord) -> Iterator[Sequence[bytes]]:
        """Yield the values to write in events with the record's step, some at a time."""
        if not record.phase and record.layout is not self._layout:
            yield list(self._changes(record))
            self._layout = record.layout
        yield from tags.values_of(record, self._pictures)
        yield [
            *(rank_values(record.ranks) if record.ranks is not None else ()),
            *self.rates.values_of(record),
            *self._times.values_of(record),
            *self._usage.values_of(record),
            *depth_values(record),
        ]

    def alert_values(self, alert: Alert) -> Sequence[bytes]:
        """Return the values to write in an event with the alert's step."""
        number, before = self._alert_count, self._alert_curve()
        self._alert_count += 1
        return tags.alert_value(alert, number), before, self._alert_curve()  # drawn as a jump

    def end_values(self, *, scheduled: int, requested: int) -> Sequence[bytes]:
        """Return the values of the last event; the arguments are numbers of full steps."""
        if self._layout is None and not self._alert_count:
            return ()
        full_steps = zip(FULL_STEPS, (scheduled, requested), strict=True)
        return self._alert_curve(), summaries.scalars(full_steps)

    def _changes(self, record: StepRecord) -> Iterator[bytes]:
        """Yield a text with the parameters that changed since the last step, if any did."""
        before = self._layout
        if before is None:
            return
        old, new = ({p.name: p.shape for p in one.parameters} for one in (before, record.layout))
        found = {
            "added": [name for name in new if name not in old],
            "removed": [name for name in old if name not in new],
            # A lazy parameter has no shape before.
            "reshaped": [name for name in new if old.get(name) and old[name] != new[name]],
        }
        changes = [f"{what}: {printable(reprlib.repr(of))}" for what, of in found.items() if of]
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

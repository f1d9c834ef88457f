"""All values that a run writes for TensorBoard, and the curves of the whole run."""

from __future__ import annotations

import logging
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

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
        self._costs = StepCosts()
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
        points = chain(
            rank_points(record.ranks) if record.ranks is not None else (),
            self.rates.points_of(record),
            depth_points(record),
        )
        yield [summaries.scalars((f"{RUN}{tag}", value) for tag, value in points)]

    def costs_of(self, record: StepRecord) -> dict[str, float]:
        """Return times and memory of a full step, by tag; call it for each record."""
        return {f"{RUN}{tag}": value for tag, value in self._costs.points_of(record)}

    def alert_values(self, alert: Alert) -> Sequence[bytes]:
        """Return the values to write in an event with the alert's step."""
        number, before = self._alert_count, self._alert_curve()
        self._alert_count += 1
        return tags.alert_value(alert, number), before, self._alert_curve()  # drawn as a jump

    def end_values(self, full_steps: tuple[int, int]) -> Sequence[bytes]:
        """Return the values of the last event."""
        if self._layout is None and not self._alert_count:
            return ()
        return self._alert_curve(), summaries.scalars(zip(FULL_STEPS, full_steps, strict=True))

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
    """Selects the points of the curves: those of full steps, and of steps where a rate changes.

    TensorBoard joins points by straight lines. When a rate changes, the step before gets a point
    with the old rate, so that the jump is drawn as a jump.
    """

    def __init__(self) -> None:
        self._step, self._wall_time = -1, 0.0
        self._rates: tuple[float, ...] = ()
        self._is_drawn = True  # the latest step

    def late_values(self, record: StepRecord) -> tuple[int, float, Sequence[bytes]]:
        """Return step, time and values of an event to write before that of the record."""
        is_late = self._changes(record) and not self._is_drawn and record.step > self._step
        points = [(f"{RUN}{tag}", rate) for tag, rate in _rates(self._rates)] if is_late else []
        return self._step, self._wall_time, [summaries.scalars(points)] if points else []

    def points_of(self, record: StepRecord) -> Iterable[tuple[str, float]]:
        if not record.learning_rates:
            return ()
        self._is_drawn = record.full or self._changes(record)
        self._step, self._wall_time = record.step, record.wall_time
        self._rates = record.learning_rates
        return _rates(self._rates) if self._is_drawn else ()

    def _changes(self, record: StepRecord) -> bool:
        now, before = record.learning_rates, self._rates
        # NaN equals NaN here.
        return bool(now) and now != before and not np.array_equal(now, before, equal_nan=True)


def _rates(rates: Sequence[float]) -> list[tuple[str, float]]:
    return [(f"learning_rate/{group}", rate) for group, rate in enumerate(rates)]


class StepCosts:
    """Means since the last full step of a step's time and of its parts; memory.

    A full step has a point of each. Time between two steps counts, such as waiting for data, but
    no interval with a phase. Parts of full steps, which measuring prolongs, count only where no
    other step was measured.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None  # step and wall time
        self._sums = defaultdict[str, float](float)
        self._memory: dict[str, float] = {}

    def points_of(self, record: StepRecord) -> Iterator[tuple[str, float]]:
        """Yield the points of a full step; ``examples_per_s`` needs a known batch."""
        last, self._last = self._last, None if record.phase else (record.step, record.wall_time)
        if record.phase:
            return
        sums = self._sums
        if last is not None and record.step < last[0]:  # back to a checkpoint
            sums.clear()
        elif last is not None:
            sums["steps"] += record.step - last[0]
            sums["s"] += record.wall_time - last[1]
        if record.bare_step_s and not (record.full and sums["measured"]):
            for tag in TIMES:
                sums[tag] += record.usage[tag]
            sums["tokens"] += record.tokens
            sums["measured"] += 1
        self._memory |= {tag: v for tag, v in record.usage.items() if tag not in TIMES}
        if not record.full:
            return
        if sums["steps"] and sums["s"] > 0:  # a clock may be set back
            step_s = sums["s"] / sums["steps"]
            yield "time/step_s", step_s
            if record.examples:
                yield "time/examples_per_s", record.examples / step_s
        if sums["measured"]:
            yield from ((tag, sums[tag] / sums["measured"]) for tag in TIMES)
        if sums["tokens"]:
            yield TOKENS_PER_S, sums["tokens"] / sum(sums[tag] for tag in TIMES)
        yield from self._memory.items()
        sums.clear()


QUANTILES: Mapping[str, float] = {"p05": 0.05, "median": 0.5, "p95": 0.95}

# Statistics whose quantiles over all layers are curves, by the name in their tags. Where magnitudes
# matter, the curves are of log10, because TensorBoard's charts have a linear axis.
DEPTH_CURVES: Mapping[str, Statistic] = {
    f"log10_{statistic.name}" if statistic.log else statistic.name: statistic
    for statistic in STATISTICS
    if statistic.over_depth
}


def depth_points(record: StepRecord) -> Iterator[tuple[str, float]]:
    """Yield ``depth/<name>/p05``, ``median`` and ``p95`` of a full step.

    Quantiles are over the finite values of all layers; for a logarithm, over the positive ones.
    """
    if not record.full or record.phase or record.skipped:
        return
    layers, shares = table(record), list(QUANTILES.values())
    first = record.layout.input_count
    for name, statistic in DEPTH_CURVES.items():
        known = layers.column(statistic.name)[first:]  # NaN if it was not measured
        values = known[np.isfinite(known) & ((known > 0) | (not statistic.log))]
        values.sort()
        if count := len(values):
            scaled = np.log10(values) if statistic.log else values
            # numpy.quantile returns the same and takes ten times as long for a few values.
            quantiles = np.interp(np.multiply(shares, count - 1), np.arange(count), scaled)
            tags = [f"depth/{name}/{quantile}" for quantile in QUANTILES]
            yield from zip(tags, quantiles.tolist(), strict=True)


def rank_points(facts: RankFacts) -> Iterator[tuple[str, float]]:
    """Yield ``rank_time/slowest``, in seconds per step, and ``rank_spread/<tag>/...``.

    A tag that is equal on all ranks, or that one rank alone has logged, has no points.
    """
    if facts.step_s is not None:
        yield "rank_time/slowest", facts.step_s.high
        yield "rank_time/slowest_rank", facts.step_s.high_rank
    for tag, spread in {**facts.scalars, **facts.usage}.items():
        if spread.low_rank != spread.high_rank:
            prefix = f"rank_spread/{plain(tag)}"
            yield f"{prefix}/min", spread.low
            yield f"{prefix}/min_rank", spread.low_rank
            yield f"{prefix}/max", spread.high
            yield f"{prefix}/max_rank", spread.high_rank

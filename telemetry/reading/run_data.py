"""Reads and caches what the Telemetry page shows of one run."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.page_format import ALERT_PREFIX, PLUGIN_NAME, ChunkKind, NewerFormatError
from telemetry.reading import derived
from telemetry.reading.matrix import Matrix, Region, in_order
from telemetry.reading.numbers import CALL_TAGS, NumberCache, Numbers, Wanted
from telemetry.reading.sessions import (
    Layer,
    ParsedLayout,
    Segment,
    Structure,
    TagRange,
    TextParser,
    assemble,
    is_layout,
)
from telemetry.reading.sources import Point, RunSource

_OF_RANKS = {statistic.name for statistic in PAGE_STATISTICS if statistic.of_ranks}

MAX_ALERTS = 10_000
"""Alerts of one run; the page lists every one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Overview:
    """Layers, steps and alerts of a run.

    Attributes:
        version: Changes when earlier answers no longer fit, because of new layers or sessions.
        layers: All rows, in forward order.
        first_step: The first step with data.
        last_step: The last step with data.
        alerts: In the order of their steps.
        session_count: How often the run was started or resumed.
        of_ranks: Whether several ranks have written it.
    """

    version: str
    layers: tuple[Layer, ...]
    first_step: int
    last_step: int
    alerts: tuple[Alert, ...]
    session_count: int
    of_ranks: bool


class RunData:
    """One run. Each call looks for new data; calls may come from any thread.

    Args:
        source: Where to read from.
    """

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self._lock = threading.RLock()
        self._numbers = NumberCache()
        self._last_steps: dict[str, int] = {}
        self._forget()

    def overview(self) -> Overview:
        """What the run holds now.

        Raises:
            NewerFormatError: The run has a later format, and nothing in it can be read.
        """
        with self._lock:
            self._refresh()
            structure = self._structure
            if self._newer is not None and not structure.layers:
                raise NewerFormatError(self._newer)
            lasts = [
                min(tag.last, segment.end - 1)
                for segment in structure.segments
                for tags in segment.tags.values()
                for tag in tags[-1:]
            ]
            first = min(structure.sessions.begins.values(), default=0)
            return Overview(
                version=self._version(),
                layers=structure.layers,
                first_step=first,
                last_step=max(lasts, default=first),
                alerts=self._current_alerts(),
                session_count=len(structure.sessions.begins),
                of_ranks=any(_OF_RANKS & set(s.statistic_names) for s in structure.segments),
            )

    def matrix(self, statistic: str, region: Region | None = None) -> Matrix:
        """One statistic of all layers at all steps, or of a region of both.

        Raises:
            KeyError: The page has no statistic of this name.
        """
        if statistic not in {known.name for known in PAGE_STATISTICS}:
            raise KeyError(statistic)
        region = region or Region()
        with self._lock:
            self._refresh()
            count = len(self._structure.layers)
            rows = region.layers(count)
            sampled, parts = self._read("n" if statistic in derived.EVERY_STEP else "m", region)
            steps, values = [np.empty(0, np.int64)], [np.empty((0, count), np.float32)[:, rows]]
            for segment, part_steps, numbers in parts:
                of_modules = derived.of_modules(segment, numbers, statistic)
                if of_modules is not None:
                    steps.append(part_steps)
                    values.append(_spread(of_modules, segment.rows, count)[:, rows])
        all_steps, all_values = in_order(np.concatenate(steps), np.concatenate(values))
        return Matrix(steps=all_steps, values=all_values, first_layer=rows.start, sampled=sampled)

    def layer_series(self, name: str) -> derived.LayerSeries:
        """All statistics of the layer with this name at all steps; empty if the run lacks it."""
        with self._lock:
            self._refresh()
            full, norms = self._read("m", Region())[1], self._read("n", Region())[1]
            return derived.layer_series(name, full, norms)

    def _version(self) -> str:
        """A hash that changes when columns read earlier no longer fit new ones."""
        parts = [
            f"{segment.begin},{len(segment.layout.modules)}" for segment in self._structure.segments
        ]
        names = [layer.name for layer in self._structure.layers]
        text = "\n".join([*self._structure.sessions.begins, *parts, *names])
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

    def _current_alerts(self) -> tuple[Alert, ...]:
        current = []
        for tag, alert in self._alerts.items():
            session = tag.removeprefix(ALERT_PREFIX).rsplit("/", 1)[0]
            if alert.step < self._structure.sessions.end_of(session):
                current.append(alert)
        return tuple(sorted(current, key=lambda alert: alert.step))

    def _refresh(self) -> None:
        last_steps = dict(self.source.tensor_tags(PLUGIN_NAME))
        if last_steps == self._last_steps:
            return
        if self._last_steps.keys() - last_steps.keys():  # another run in the same place
            self._forget()
        new = [tag for tag in last_steps if tag not in self._last_steps]
        self._parse([tag for tag in new if is_layout(tag)])
        self._parse(self._alerts_to_read([tag for tag in new if tag.startswith(ALERT_PREFIX)]))
        self._structure = assemble(self._layouts.values(), last_steps, self.source.problems)
        self._last_steps = last_steps

    def _forget(self) -> None:
        self._last_steps = {}
        self._layouts: dict[str, ParsedLayout] = {}
        self._alerts: dict[str, Alert] = {}
        self._newer: str | None = None
        self._texts = TextParser()
        self._structure = Structure()
        self._numbers.clear()

    def _alerts_to_read(self, new: Sequence[str]) -> Sequence[str]:
        room = MAX_ALERTS - len(self._alerts)
        if len(new) > room:
            self.source.problems.add("the rest of the alerts", f"there are more than {MAX_ALERTS}")
        return new[:room]

    def _parse(self, tags: Sequence[str]) -> None:
        for tag, point in self._read_texts(tags):
            try:
                if is_layout(tag):
                    self._layouts[tag] = self._texts.layout(tag, point)
                else:
                    self._alerts[tag] = self._texts.alert(point)
            except ValueError as error:
                self.source.problems.add(tag, error)
                if isinstance(error, NewerFormatError):
                    self._newer = str(error)

    def _read_texts(self, tags: Sequence[str]) -> Iterator[tuple[str, Point]]:
        for start in range(0, len(tags), CALL_TAGS):
            batch = tags[start : start + CALL_TAGS]
            for tag, points in self.source.read_tensors(PLUGIN_NAME, batch).items():
                if points:
                    yield tag, points[-1]

    def _read(self, kind: ChunkKind, region: Region) -> tuple[bool, Iterator[derived.Part]]:
        """Whether steps are left out, and what the tags hold at steps inside of the region."""
        structure = self._structure
        wanted = [
            Wanted(kind=kind, segment=segment, tag=tag, layer_count=len(structure.layers))
            for segment in structure.segments
            for tag in segment.tags[kind]
            if _reaches(tag, segment, region)
        ]
        sampled, found = self._numbers.read(self.source, wanted)
        return sampled, (_cut(segment, numbers, region) for segment, numbers in found)


def _reaches(tag: TagRange, segment: Segment, region: Region) -> bool:
    if tag.after + 1 >= segment.end:
        return False
    if region.first_step is not None and tag.last < region.first_step:
        return False
    return region.last_step is None or tag.after < region.last_step


def _cut(segment: Segment, numbers: Numbers, region: Region) -> derived.Part:
    """What lies inside of the region and was not replaced by a later session."""
    inside = region.holds(numbers.steps) & (numbers.steps < segment.end)
    if inside.all():
        return segment, numbers.steps, numbers.values
    return segment, numbers.steps[inside], numbers.values[inside]


def _spread(values: NDArray[np.float32], rows: NDArray[np.intp], count: int) -> NDArray[np.float32]:
    """Moves the columns of a segment's modules to their places among all layers."""
    if len(rows) == count and (rows == np.arange(count)).all():
        return values
    spread = np.full((len(values), count), MISSING, np.float32)
    spread[:, rows] = values
    return spread

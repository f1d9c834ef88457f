"""Read and cache the data of one run for the Telemetry page."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.events import page_format
from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.layers.formulas import TRAINING_STATES
from telemetry.layers.onset import FEWEST_TO_SHOW, LOOK_BACK, Onset, onsets
from telemetry.layers.units import decode_units
from telemetry.reading.matrix import (
    CALL_TAGS,
    EVERY_STEP,
    WHOLE,
    Matrix,
    NumberCache,
    Numbers,
    Region,
    UnitExtremes,
    in_order,
    of_modules,
)
from telemetry.reading.sessions import Layer, NumberTag, Segment, Structure, WrittenLayout, assemble
from telemetry.reading.sources import RunSource
from telemetry.records import Layout
from telemetry.records.step import INPUT, is_inside
from telemetry.untrusted import MAX_INTEGER

# Limit of one answer; beyond it, steps are omitted.
READ_BYTES = 256 << 20
MAX_UNITS = READ_BYTES // 8
# Alerts of one run; the page lists every one.
MAX_ALERTS = 10_000
# All alerts and distinct layouts of a run together: fifteen layouts of 20,000 modules.
MAX_TEXT_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Overview:
    """Layers, steps with data, and alerts of a run."""

    version: str  # changes with new layers or sessions: earlier answers are then invalid
    layers: tuple[Layer, ...]  # in forward order
    first_step: int
    last_step: int
    alerts: tuple[Alert, ...]  # by step
    started_s: float | None  # of the newest session, seconds since the epoch; None if unknown
    statistics: frozenset[str]  # names of those that are written at full steps

    @property
    def layer_count(self) -> int:
        """Number of layers without the rows of the input."""
        return sum(not is_inside(layer.name, INPUT) for layer in self.layers)

    @property
    def extent(self) -> str:
        """Number of layers and range of steps, for a heading."""
        if not self.layers:
            return "no steps"
        return f"{self.layer_count} layers, steps {self.first_step} to {self.last_step}"


class RunData:
    """Data of one run. Each call reads new data; calls may come from any thread."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self._lock = threading.RLock()
        self._last_steps: dict[str, int] = {}
        self._forget()

    def overview(self) -> Overview:
        """Return layers, steps and alerts; raise NewerFormatError if nothing can be read."""
        with self._lock:
            self._refresh()
            structure, sessions = self._structure, self._structure.sessions
            if self._newer is not None and not structure.layers:
                raise page_format.NewerFormatError(self._newer)
            lasts = {(t.segment, t.kind): min(t.last, t.segment.end - 1) for t in structure.tags}
            first = min(sessions.begins.values(), default=0)
            ends = [
                step
                for tag, step in self._last_steps.items()
                if tag.startswith(page_format.END_PREFIX)
                and step < sessions.end_of(page_format.session_of(tag))
            ]
            alerts = [
                alert
                for tag, alert in self._alerts.items()
                if alert.step < sessions.end_of(page_format.session_of(tag))
            ]
            return Overview(
                version=self._version(),
                layers=structure.layers,
                first_step=first,
                last_step=max([first, *lasts.values(), *ends]),
                alerts=tuple(sorted(alerts, key=lambda alert: alert.step)),
                started_s=page_format.session_start_s(max(sessions.begins, default="")),
                statistics=frozenset().union(*(s.statistic_names for s in structure.segments)),
            )

    def matrix(self, statistic: str, region: Region = WHOLE) -> Matrix:
        """Return one statistic of all layers and steps, or a region; KeyError: no statistic."""
        if statistic not in {known.name for known in PAGE_STATISTICS}:
            raise KeyError(statistic)
        with self._lock:
            self._refresh()
            return self._matrix(statistic, region)

    def training_states(self) -> list[str]:
        """Return what each layer's parameters did at the last full step, a text for each layer.

        It is one of :data:`~telemetry.layers.formulas.TRAINING_STATES`, or empty for layers
        without parameters or before the first full step.
        """
        with self._lock:
            self._refresh()
            full = [tag for tag in self._structure.tags if tag.kind == "m"]
            since = max((tag.after + 1 for tag in full), default=0)
            values = self._matrix("training_state", Region(first_step=since)).values
        last = [column[column != MISSING][-1:] for column in values.T]
        text_of = dict(enumerate(TRAINING_STATES))
        return [text_of.get(of[0], "") if len(of) else "" for of in last]

    def _matrix(self, statistic: str, region: Region) -> Matrix:
        count = len(self._structure.layers)
        rows = region.layers(count)
        width = len(range(count)[rows])
        sampled, parts = self._read("n" if statistic in EVERY_STEP else "m", region)
        steps, values = [np.empty(0, np.int64)], [np.empty((0, width), np.float32)]
        for segment, (part_steps, numbers) in parts:
            inside = (segment.rows >= rows.start) & (segment.rows < rows.stop)
            modules = np.flatnonzero(inside)
            of_some = of_modules(segment, numbers, statistic, modules)
            if of_some is not None:
                of_all = np.full((len(part_steps), width), MISSING, np.float32)
                of_all[:, segment.rows[modules] - rows.start] = of_some
                steps.append(part_steps)
                values.append(of_all)
        all_steps, all_values = in_order(np.concatenate(steps), np.concatenate(values))
        return Matrix(steps=all_steps, values=all_values, first_layer=rows.start, sampled=sampled)

    def layer_series(self, name: str) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
        """Return a layer's statistics and its parameters' gradient norms, if they were measured."""
        with self._lock:
            self._refresh()
            found: dict[str, Numbers] = {}
            for row, layer in enumerate(self._structure.layers):
                if layer.name == name:
                    region = Region(first_layer=row, last_layer=row)
                    for statistic in PAGE_STATISTICS:
                        matrix = self._matrix(statistic.name, region)
                        found[statistic.name] = matrix.steps, matrix.values[:, 0]
            norms: dict[str, list[Numbers]] = defaultdict(list)
            for segment, (steps, values) in self._read("n", WHOLE)[1]:
                place = segment.layout.position.get(name)
                for index in () if place is None else segment.layout.owned[place]:
                    parameter = segment.layout.parameters[index].name
                    norms[parameter].append((steps, values[:, index]))
        joined = {
            parameter: in_order(*(np.concatenate(column) for column in zip(*parts, strict=True)))
            for parameter, parts in norms.items()
        }
        return _measured(found), _measured(joined)

    def units(self, name: str, region: Region = WHOLE) -> UnitExtremes:
        """Return the units of a layer at recorded steps of a region; KeyError: not in the run."""
        with self._lock:
            self._refresh()
            type_name = {one.name: one.type_name for one in self._structure.layers}[name]
            sampled, tags = self._wanted("u", region)
            segments = {tag.tag: tag.segment for tag in tags}
            found: dict[int, NDArray[np.float32]] = {}
            for tag, step, data in self._events(list(segments), sampled):
                segment = segments[tag]
                if not region.first_step <= step <= min(region.last_step, segment.end - 1):
                    continue
                try:
                    units = decode_units(data, segment.layout.position.get(name, -1))
                except ValueError as error:
                    self.source.problems.add(tag, error)
                    continue
                if units is not None:
                    found[step] = units
                    if max(map(len, found.values())) * len(found) > MAX_UNITS:
                        found, sampled = dict(list(found.items())[::2]), True
        return UnitExtremes.of(type_name, found, sampled)

    def onsets_by(self, step: int) -> list[Onset] | None:
        """Return the layers whose gradient norm has left its baseline by a step, earliest first.

        NaN counts as infinite; None: there are too few earlier steps for a baseline.
        """
        region = Region(first_step=max(0, step + 1 - LOOK_BACK), last_step=step)
        matrix = self.matrix("grad_norm", region)
        norms = np.where(np.isnan(matrix.values), np.inf, matrix.values).astype(np.float64)
        norms[norms == MISSING] = np.nan
        names = [layer.name for layer in self.overview().layers]
        return onsets(names, matrix.steps, norms, step, fewest=FEWEST_TO_SHOW)

    def _version(self) -> str:
        parts = [
            f"{segment.begin},{len(segment.layout.modules)}" for segment in self._structure.segments
        ]
        names = [layer.name for layer in self._structure.layers]
        text = "\n".join([*self._structure.sessions.begins, *parts, *names])
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

    def _refresh(self) -> None:
        last_steps = dict(self.source.tags(page_format.PLUGIN_NAME))
        if last_steps == self._last_steps:
            return
        if self._last_steps.keys() - last_steps.keys():  # another run in the same directory
            self._forget()
        new = [tag for tag in last_steps if tag not in self._last_steps]
        alerts = [tag for tag in new if tag.startswith(page_format.ALERT_PREFIX)]
        room = MAX_ALERTS - len(self._alerts)
        if len(alerts) > room:
            self.source.problems.add("the rest of the alerts", f"there are more than {MAX_ALERTS}")
        self._parse([tag for tag in new if tag.startswith(page_format.LAYOUT_PREFIX)])
        self._parse(alerts[:room])
        self._structure = assemble(self._layouts.values(), last_steps, self.source.problems)
        self._last_steps = last_steps

    def _forget(self) -> None:
        self._last_steps = {}
        self._layouts: dict[str, WrittenLayout] = {}
        self._decoded: dict[bytes, tuple[Layout, tuple[str, ...]]] = {}
        self._alerts: dict[str, Alert] = {}
        self._text_room = MAX_TEXT_BYTES
        self._newer: str | None = None
        self._structure = Structure()
        self._numbers = NumberCache()

    def _parse(self, tags: Sequence[str]) -> None:
        for tag, step, text in self._events(tags, sampled=True):
            try:
                if not isinstance(text, bytes):
                    raise ValueError("it is not a text")
                if text not in self._decoded:
                    if len(text) > self._text_room:
                        limit = MAX_TEXT_BYTES >> 20
                        raise ValueError(f"the texts of the run take more than {limit} MiB")
                    self._text_room -= len(text)
                if tag.startswith(page_format.ALERT_PREFIX):
                    self._alerts[tag] = page_format.decode_alert(text)
                    continue
                session, number = page_format.parse_layout_tag(tag)
                if not 0 <= step <= MAX_INTEGER:
                    raise ValueError("its step must be from 0 to 2**53")
                if text not in self._decoded:
                    self._decoded[text] = page_format.decode_layout(text)
                self._layouts[tag] = WrittenLayout(session, number, step, *self._decoded[text])
            except ValueError as error:
                self.source.problems.add(tag, error)
                if isinstance(error, page_format.NewerFormatError):
                    self._newer = str(error)

    def _events(self, tags: Sequence[str], sampled: bool) -> Iterator[tuple[str, int, object]]:
        for start in range(0, len(tags), CALL_TAGS):
            batch = tags[start : start + CALL_TAGS]
            read = self.source.read(page_format.PLUGIN_NAME, batch, sampled=sampled)
            yield from ((tag, step, data) for tag in batch for step, data in read.get(tag, ()))

    def _wanted(
        self, kind: page_format.ChunkKind, region: Region
    ) -> tuple[bool, Sequence[NumberTag]]:
        """Return whether to omit steps, and the tags to read for a region."""
        wanted = [
            tag
            for tag in self._structure.tags
            if tag.kind == kind
            and tag.after + 1 < tag.segment.end
            and tag.last >= region.first_step
            and tag.after < region.last_step
        ]
        total = sum(tag.estimated_bytes for tag in wanted)
        if total <= READ_BYTES:
            return False, wanted
        # Only one event of each tag is read: about a tenth.
        return True, wanted[:: max(1, -(-total // (page_format.EVENTS_PER_TAG * READ_BYTES)))]

    def _read(
        self, kind: page_format.ChunkKind, region: Region
    ) -> tuple[bool, Iterator[tuple[Segment, Numbers]]]:
        """Return whether steps are omitted, and the numbers in the region."""
        sampled, wanted = self._wanted(kind, region)
        found = self._numbers.read(self.source, wanted, sampled)
        return sampled, ((tag.segment, _cut(tag.segment, *read, region)) for tag, read in found)


def trained_share(layers: Sequence[Layer], states: Sequence[str]) -> float | None:
    """Return the share of the parameters that are in layers that train; None if unknown.

    ``states`` are those of :meth:`RunData.training_states`.
    """
    sizes: Counter[str] = Counter()
    for layer, state in zip(layers, states, strict=True):
        sizes[state] += sum(parameter.size for parameter in layer.parameters)
    del sizes[""]
    return sizes[TRAINING_STATES[0]] / sizes.total() if sizes.total() else None


def windows(
    runs: Sequence[RunData], statistics: Sequence[str], region: Region | None = None
) -> Iterator[list[list[Matrix]]]:
    """Yield a matrix for each run and statistic, in windows of steps that fit into memory."""
    if region is None:
        overviews = [run.overview() for run in runs]
        first = min(overview.first_step for overview in overviews)
        region = Region(first_step=first, last_step=max(o.last_step for o in overviews))
    matrices = [[run.matrix(name, region) for name in statistics] for run in runs]
    first, last = region.first_step, region.last_step
    if first < last and any(matrix.sampled for of_run in matrices for matrix in of_run):
        middle = (first + last) // 2
        yield from windows(runs, statistics, Region(first_step=first, last_step=middle))
        yield from windows(runs, statistics, Region(first_step=middle + 1, last_step=last))
    else:
        yield matrices


def _cut(
    segment: Segment, steps: NDArray[np.int64], values: NDArray[np.float32], region: Region
) -> Numbers:
    """Select the steps in the region that no later session replaces."""
    inside = region.holds(steps) & (steps < segment.end)
    return (steps, values) if inside.all() else (steps[inside], values[inside])


def _measured(curves: dict[str, Numbers]) -> dict[str, Numbers]:
    return {
        name: (steps[known], values[known])
        for name, (steps, values) in curves.items()
        if (known := values != MISSING).any()
    }

"""Reads what the Telemetry page shows of one run; remembers it, and reads only what is new."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.plugin_data import derived
from telemetry.plugin_data.format import (
    ALERT_PREFIX,
    MISSING,
    PLUGIN_NAME,
    ChunkKind,
)
from telemetry.plugin_data.sessions import (
    Layer,
    ParsedLayout,
    Segment,
    Structure,
    TagRange,
    assemble,
    is_layout,
    parse_alerts,
    parse_layouts,
)
from telemetry.plugin_data.sources import Point, RunSource
from telemetry.plugin_data.statistics import GRADIENT_STATISTICS, STATISTICS
from telemetry.plugin_data.windows import Matrix, Window
from telemetry.records import Alert

READ_BYTES = 256 << 20
"""What is read for one answer; of more, steps are left out."""
_CACHE_BYTES = 512 << 20
_CALL_BYTES = 64 << 20  # TensorBoard's data server sends at most 256 MiB in one message
_CALL_TAGS = 200
_GRADIENT_NAMES = {statistic.name for statistic in GRADIENT_STATISTICS}


@dataclass(frozen=True, kw_only=True, eq=False)
class Overview:
    """What there is of a run.

    Attributes:
        version: Another one if what was read before no longer counts: new layers, new sessions.
        layers: All rows, in forward order.
        first_step: The first step with data.
        last_step: The last.
        alerts: By step.
        session_count: How often the run was begun or resumed.
    """

    version: str
    layers: tuple[Layer, ...]
    first_step: int
    last_step: int
    alerts: tuple[Alert, ...]
    session_count: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSeries:
    """Everything about one layer over time.

    Attributes:
        statistics: Steps ``[k]`` and values ``[k]`` by the name of the statistic.
        parameters: Likewise the gradient norm of each of its parameters, by the parameter's name.
    """

    statistics: dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]
    parameters: dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Numbers:
    """The content of some tags: steps ``[k]``, values ``[k, ...]``."""

    last: int
    steps: NDArray[np.int64]
    values: NDArray[np.float32]


class RunData:
    """One run, as often as it is asked for; from any thread.

    Args:
        source: Where to read from.
    """

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self._lock = threading.RLock()
        self._last_steps: dict[str, int] = {}
        self._layouts: dict[str, ParsedLayout] = {}
        self._alerts: dict[str, Alert] = {}
        self._structure = Structure()
        self._cache: OrderedDict[tuple[str, bool], _Numbers] = OrderedDict()
        self._cached_bytes = 0

    def overview(self) -> Overview:
        """What there is now; looks for new data.

        Raises:
            NewerFormatError: Some of it has a later format.
        """
        with self._lock:
            self._refresh()
            structure = self._structure
            lasts = [
                min(tag.last, segment.end - 1)
                for segment in structure.segments
                for tags in segment.tags.values()
                for tag in tags[-1:]
            ]
            first = min(structure.session_begins.values(), default=0)
            return Overview(
                version=self._version(),
                layers=structure.layers,
                first_step=first,
                last_step=max(lasts, default=first),
                alerts=self._current_alerts(),
                session_count=len(structure.session_begins),
            )

    def matrix(self, statistic: str, window: Window | None = None) -> Matrix:
        """One statistic of all layers at all steps, or of a part of both.

        Raises:
            KeyError: There is no such statistic.
        """
        if statistic not in {known.name for known in STATISTICS}:
            raise KeyError(statistic)
        window = window or Window()
        with self._lock:
            self._refresh()
            count = len(self._structure.layers)
            rows = window.layers(count)
            kind: ChunkKind = "n" if statistic in _GRADIENT_NAMES else "m"
            sampled, parts = self._read(kind, window)
            steps, values = [np.empty(0, np.int64)], [np.empty((0, count), np.float32)[:, rows]]
            for segment, numbers in parts:
                of_modules = _statistic(segment, numbers.values, statistic)
                if of_modules is None:
                    continue
                inside = window.holds(numbers.steps) & (numbers.steps < segment.end)
                steps.append(numbers.steps[inside])
                values.append(_spread(of_modules[inside], segment.rows, count)[:, rows])
        return Matrix(
            steps=np.concatenate(steps),
            values=np.concatenate(values),
            first_layer=rows.start,
            sampled=sampled,
        )

    def layer_series(self, layer: int) -> LayerSeries:
        """All statistics of one layer at all steps.

        Raises:
            IndexError: There is no such layer.
        """
        with self._lock:
            self._refresh()
            name = self._structure.layers[layer].name
            series = derived.SeriesBuilder()
            for kind in ("m", "n"):
                for segment, numbers in self._read(kind, Window())[1]:
                    place = segment.layout.position.get(name)
                    if place is None:
                        continue
                    valid = numbers.steps < segment.end
                    steps, values = numbers.steps[valid], numbers.values[valid]
                    if kind == "m":
                        series.add_matrix(segment, place, steps, values)
                    else:
                        series.add_norms(segment, place, steps, values)
        return LayerSeries(statistics=series.statistics(), parameters=series.parameters())

    def _version(self) -> str:
        """Tells structures apart that columns already read cannot be put together with."""
        parts = [
            f"{segment.begin},{len(segment.layout.modules)}" for segment in self._structure.segments
        ]
        names = [layer.name for layer in self._structure.layers]
        text = "\n".join([*self._structure.session_begins, *parts, *names])
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

    def _current_alerts(self) -> tuple[Alert, ...]:
        current = []
        for tag, alert in self._alerts.items():
            session = tag.removeprefix(ALERT_PREFIX).rsplit("/", 1)[0]
            if alert.step < self._structure.end_of(session):
                current.append(alert)
        return tuple(sorted(current, key=lambda alert: alert.step))

    def _refresh(self) -> None:
        last_steps = dict(self.source.tensor_tags(PLUGIN_NAME))
        if last_steps == self._last_steps:
            return
        new = [tag for tag in last_steps if tag not in self._last_steps]
        removed = self._last_steps.keys() - last_steps.keys()
        if removed:  # another run in the same place: begin anew
            self._layouts, self._alerts, new = {}, {}, list(last_steps)
            self._cache.clear()
            self._cached_bytes = 0
        self._layouts |= parse_layouts(self._read_points([tag for tag in new if is_layout(tag)]))
        self._alerts |= parse_alerts(
            self._read_points([tag for tag in new if tag.startswith(ALERT_PREFIX)])
        )
        self._structure = assemble(self._layouts.values(), last_steps)
        self._last_steps = last_steps

    def _read_points(self, tags: Sequence[str]) -> dict[str, Sequence[Point]]:
        points: dict[str, Sequence[Point]] = {}
        for start in range(0, len(tags), _CALL_TAGS):
            batch = tags[start : start + _CALL_TAGS]
            points.update(self.source.read_tensors(PLUGIN_NAME, batch))
        return points

    # --- numbers -------------------------------------------------------------------------------

    def _read(
        self, kind: ChunkKind, window: Window
    ) -> tuple[bool, Iterator[tuple[Segment, _Numbers]]]:
        """Whether steps are left out, and what the tags that reach into the window hold."""
        wanted = [
            (segment, tag)
            for segment in self._structure.segments
            for tag in segment.tags[kind]
            if _reaches(tag, segment, window)
        ]
        sizes = [_estimated_bytes(kind, segment, tag) for segment, tag in wanted]
        sampled = sum(sizes) > READ_BYTES
        if sampled:
            # One event of each tag is read, so about a tenth of it.
            stride = max(1, -(-sum(sizes) // (10 * READ_BYTES)))
            wanted, sizes = wanted[::stride], [size // 10 for size in sizes[::stride]]
        return sampled, self._numbers(wanted, sizes, sampled)

    def _numbers(
        self, wanted: Sequence[tuple[Segment, TagRange]], sizes: Sequence[int], sampled: bool
    ) -> Iterator[tuple[Segment, _Numbers]]:
        for batch in _batches(wanted, sizes):
            found = self._read_batch([tag for _, tag in batch], sampled)
            for segment, tag in batch:
                if tag.tag in found:
                    yield segment, found[tag.tag]

    def _read_batch(self, tags: Sequence[TagRange], sampled: bool) -> dict[str, _Numbers]:
        found: dict[str, _Numbers] = {}
        missing = []
        for tag in tags:
            cached = self._cache.get((tag.tag, sampled))
            if cached is not None and cached.last == tag.last:
                self._cache.move_to_end((tag.tag, sampled))
                found[tag.tag] = cached
            else:
                missing.append(tag)
        if missing:
            points = self.source.read_tensors(
                PLUGIN_NAME, [tag.tag for tag in missing], sampled=sampled
            )
            for tag in missing:
                if points.get(tag.tag):
                    numbers = _join(tag, points[tag.tag])
                    self._remember((tag.tag, sampled), numbers)
                    found[tag.tag] = numbers
        return found

    def _remember(self, key: tuple[str, bool], numbers: _Numbers) -> None:
        old = self._cache.pop(key, None)
        self._cached_bytes += numbers.values.nbytes - (old.values.nbytes if old else 0)
        self._cache[key] = numbers
        while self._cached_bytes > _CACHE_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.values.nbytes


def _reaches(tag: TagRange, segment: Segment, window: Window) -> bool:
    if tag.after + 1 >= segment.end:
        return False
    if window.first_step is not None and tag.last < window.first_step:
        return False
    return window.last_step is None or tag.after < window.last_step


def _estimated_bytes(kind: ChunkKind, segment: Segment, tag: TagRange) -> int:
    steps = tag.last - tag.after
    # A tag of matrices holds ten at most.
    return 4 * segment.width(kind) * (min(steps, 10) if kind == "m" else steps)


def _batches(
    wanted: Sequence[tuple[Segment, TagRange]], sizes: Sequence[int]
) -> Iterator[list[tuple[Segment, TagRange]]]:
    batch: list[tuple[Segment, TagRange]] = []
    nbytes = 0
    for item, size in zip(wanted, sizes, strict=True):
        if batch and (len(batch) == _CALL_TAGS or nbytes + size > _CALL_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch


def _join(tag: TagRange, points: Sequence[Point]) -> _Numbers:
    """All events of a tag as one array; those of norms bring several steps each."""
    arrays = [np.asarray(point.value, np.float32) for point in points]
    if tag.tag.startswith("telemetry/n/"):
        steps = np.concatenate(
            [point.step + a[:, 0].astype(np.int64) for point, a in zip(points, arrays, strict=True)]
        )
        values = np.concatenate([array[:, 1:] for array in arrays])
    else:
        steps = np.array([point.step for point in points], dtype=np.int64)
        values = np.stack(arrays)
    return _Numbers(last=tag.last, steps=steps, values=values)


def _statistic(
    segment: Segment, values: NDArray[np.float32], name: str
) -> NDArray[np.float32] | None:
    """One statistic of the segment's modules, ``[k, modules]``; None if it does not have it."""
    if name in _GRADIENT_NAMES:
        return derived.gradient_statistic(segment, values, name)
    if name not in segment.statistic_names:
        return None
    return values[:, :, segment.statistic_names.index(name)]


def _spread(values: NDArray[np.float32], rows: NDArray[np.intp], count: int) -> NDArray[np.float32]:
    """Columns of a segment's modules in their places among all layers."""
    if len(rows) == count and (rows == np.arange(count)).all():
        return values
    spread = np.full((len(values), count), MISSING, np.float32)
    spread[:, rows] = values
    return spread

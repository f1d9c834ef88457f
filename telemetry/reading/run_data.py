"""Data of one run for the page and the commands: layers, statistics over steps, units, alerts."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.events.run_log import (
    Alerted,
    End,
    Frame,
    FullStep,
    Hyperparameters,
    LaidOut,
    LossFound,
    Norms,
    layout_of,
)
from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.layers.formulas import TRAINING_STATES
from telemetry.layers.onset import FEWEST_TO_SHOW, LOOK_BACK, Onset, onsets
from telemetry.layers.units import decode_units
from telemetry.reading.matrix import (
    EVERY_STEP,
    WHOLE,
    Limit,
    Matrix,
    Numbers,
    Region,
    UnitExtremes,
    in_order,
    largest,
    of_modules,
)
from telemetry.reading.run_log import AnyFrame, Part, RunDirectory
from telemetry.reading.sources import FileSource, Period, RunSource
from telemetry.records import Layout, Module, Parameter
from telemetry.records.step import INPUT, is_inside

# Limit of the numbers that are read at once.
READ_BYTES = 256 << 20
MAX_UNITS = READ_BYTES // 8
_STEPS_AT_ONCE = 256
# Full steps in which a layer's training state is looked for.
_LATEST = 10


@dataclass(frozen=True, kw_only=True)
class Layer(Module):
    """Row of the heat map: a module, its parameters, and its positions in the forward order."""

    parameters: tuple[Parameter, ...]
    places: frozenset[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Steps of one layout in one part of a run."""

    part: Part
    layout: Layout
    statistics: tuple[str, ...]  # rows of the tables
    first: int
    end: int  # the first step of the next segment, or that a later part hides
    rows: NDArray[np.intp]  # row of each module among all layers of the run, ``[modules]``

    def indices(self, kind: type[Frame], region: Region) -> list[int]:
        """Return the indices of its frames in a region."""
        first, end = max(self.first, region.first_step), min(self.end, region.last_step + 1)
        return self.part.frames[kind].between(first, end)

    def modules(self, rows: slice) -> NDArray[np.intp]:
        """Return its modules among some rows of the run, ascending."""
        return np.flatnonzero((self.rows >= rows.start) & (self.rows < rows.stop))


@dataclass(frozen=True, kw_only=True, eq=False)
class Overview:
    """Layers, steps with data, and alerts of a run."""

    version: str  # changes with new layers or parts: earlier answers are then invalid
    layers: tuple[Layer, ...]  # in forward order
    first_step: int
    last_step: int
    resumed: tuple[int, ...]  # steps at which the run was resumed
    alerts: tuple[Alert, ...]  # by step
    started_s: float | None  # seconds since the epoch; None without a begin
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
    """Data of one run. Each call reads what is new; calls may come from any thread.

    Args:
        directory: Its run logs.
        run: Id of the run in the directory; without one, the newest.
        source: Its event files; without one, those of the directory.
    """

    def __init__(
        self, directory: RunDirectory, run: str = "", source: RunSource | None = None
    ) -> None:
        self.directory = directory
        self._run = run
        self._lock = directory.lock
        self._parts: Sequence[Part] = ()
        self._layouts: list[tuple[LaidOut, Layout]] = []  # different ones
        self._state: Sequence[object] = ()
        self._segments: tuple[Segment, ...] = ()
        self._layers: tuple[Layer, ...] = ()
        self.source = source or FileSource(directory.path)
        self._refresh()

    @property
    def problems(self) -> list[str]:
        """One line for each part of the files that was skipped."""
        return [*self.directory.problems, *self.source.problems]

    @property
    def run(self) -> str:
        """Id of the run; empty without a run log."""
        return self._parts[0].begin.run if self._parts else ""

    @property
    def is_newest(self) -> bool:
        """Whether it was opened as the newest run of its directory."""
        return not self._run

    def overview(self) -> Overview:
        """Return layers, steps and alerts."""
        with self._lock:
            self._refresh()
            begins = [part.begin for part in self._parts if not part.begin.continues]
            first = min((segment.first for segment in self._segments), default=0)
            alerts = [frame.alert for part in self._parts for frame in part.few(Alerted)]
            return Overview(
                version=self._version(),
                layers=self._layers,
                first_step=first,
                last_step=max(first, self.last_step() or 0),
                resumed=tuple(sorted({begin.step for begin in begins[1:]})),
                alerts=tuple(sorted(alerts, key=lambda alert: alert.step)),
                started_s=begins[-1].time_s if begins else None,
                statistics=frozenset().union(*(s.statistics for s in self._segments)),
            )

    def check_format(self) -> None:
        """Raise NewerFormatError if a later version has written all there is."""
        if self.directory.newer is not None and not self._parts:
            raise self.directory.newer

    def frames(self, kind: type[AnyFrame]) -> list[AnyFrame]:
        """Return the frames of a rare kind, without hidden ones, in the order of writing."""
        with self._lock:
            self._refresh()
            return [frame for part in self._parts for frame in part.few(kind)]

    def end(self) -> End | None:
        """Return the end of the run; None while it is open."""
        with self._lock:
            self._refresh()
            ends = self._parts[-1].few(End)[-1:] if self._parts else ()
            # Steps after an end make it void.
            return next((end for end in ends if end.time_s >= self._parts[-1].last_time_s), None)

    def written_s(self) -> float:
        """Return the time of the last frame, in seconds since the epoch."""
        times = [part.last_time_s for part in self._parts if math.isfinite(part.last_time_s)]
        return max(times, default=0.0)

    def _period(self, runs: Mapping[str, Sequence[Part]]) -> Period:
        """Return the time of the run, if others have used its directory before or after it."""
        others = [parts for run, parts in runs.items() if run != self.run]
        if not self._parts or not others:
            return Period()
        began_s, ended_s = self._parts[0].begin.time_s, self.written_s()
        later_s = [parts[0].begin.time_s for parts in others]
        is_first = all(max(p.last_time_s for p in parts) > began_s for parts in others)
        end_s = min((time_s for time_s in later_s if time_s > ended_s), default=math.inf)
        return Period(-math.inf if is_first else began_s, end_s)

    def seed(self) -> int | None:
        """Return the seed of torch's generator when the run began."""
        return self._parts[0].begin.seed if self._parts else None

    def hyperparameters(self) -> dict[str, str | float | bool]:
        found = [frame.values for frame in self.frames(Hyperparameters)]
        return dict(found[-1]) if found else {}

    def loss_tag(self) -> str | None:
        """Return the tag of the loss that the logger has found."""
        found = self.frames(LossFound)
        return found[-1].tag if found else None

    def loss_delay(self) -> int:
        """Return the steps between a batch and its loss."""
        found = self.frames(LossFound)
        return found[-1].delay if found else 0

    def last_step(self) -> int | None:
        """Return the last step with data, or the last one of the training; None without any."""
        with self._lock:
            self._refresh()
            found = [
                part.frames[kind].steps[index]
                for part in self._parts
                for kind in (Norms, FullStep, End)
                for index in part.frames[kind].between(0, part.end)[-1:]
            ]
        return max(found, default=None)

    def logged(self) -> dict[str, list[tuple[int, float]]]:
        """Return steps and values of the scalars that the user has logged, by tag."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        with self._lock:
            self._refresh()
            for part in self._parts:
                for tag, (steps, values) in part.curves().items():
                    found[tag].update(zip(steps.tolist(), values.tolist(), strict=True))
        return {tag: sorted(points.items()) for tag, points in found.items() if points}

    # --- statistics of layers --------------------------------------------------------------------

    def matrix(self, statistic: str, region: Region = WHOLE, limit: Limit | None = None) -> Matrix:
        """Return one statistic of all layers and steps, or a region; KeyError: no statistic."""
        if statistic not in {known.name for known in PAGE_STATISTICS}:
            raise KeyError(statistic)
        with self._lock:
            self._refresh()
            rows = region.layers(len(self._layers))
            width = len(range(len(self._layers))[rows])
            of_steps = Norms if statistic in EVERY_STEP else FullStep
            count = sum(len(segment.indices(of_steps, region)) for segment in self._segments)
            per_column, per_row = limit.factors(count, width) if limit else (1, 1)
            at_once = per_column * max(1, _STEPS_AT_ONCE // per_column)
            steps, values = (
                [np.empty(0, np.int64)],
                [np.empty((0, -(-width // per_row)), np.float32)],
            )
            for segment, found, modules, columns in self._of_modules(
                statistic, region, rows, at_once
            ):
                of_all = np.full((len(found), width), MISSING, np.float32)
                of_all[:, segment.rows[modules] - rows.start] = columns
                steps.append(found[::per_column])
                values.append(largest(largest(of_all, per_column, 0), per_row, 1))
        all_steps, all_values = in_order(np.concatenate(steps), np.concatenate(values))
        return Matrix(
            steps=all_steps,
            values=all_values,
            first_layer=rows.start,
            layer_factor=per_row,
            step_factor=per_column,
        )

    def _of_modules(
        self, statistic: str, region: Region, rows: slice, at_once: int
    ) -> Iterator[tuple[Segment, NDArray[np.int64], NDArray[np.intp], NDArray[np.float32]]]:
        """Yield segment, steps, the modules of some rows, and a statistic, ``[steps, modules]``."""
        if statistic in EVERY_STEP:
            for segment, steps, norms in self._gradients(region, at_once):
                modules = segment.modules(rows)
                values = of_modules(segment.layout, norms, statistic, modules)
                yield segment, steps, modules, values
            return
        for segment in self._segments:
            if statistic in segment.statistics:
                place, modules = segment.statistics.index(statistic), segment.modules(rows)
                tables = self._tables(segment, region)
                while found := [
                    (step, table[place, modules]) for step, table in islice(tables, at_once)
                ]:
                    steps, values = _stacked(found)
                    yield segment, steps, modules, values

    def _gradients(
        self, region: Region, at_once: int = _STEPS_AT_ONCE
    ) -> Iterator[tuple[Segment, NDArray[np.int64], NDArray[np.float32]]]:
        """Yield segment, some steps, and norms of all gradients, ``[steps, parameters]``."""
        for segment in self._segments:
            indices, shape = segment.indices(Norms, region), (len(segment.layout.parameters),)
            rows = (
                (frame.step, numbers)
                for _, frame in segment.part.read(Norms, indices)
                if (numbers := self._array(frame, frame.norms, shape)) is not None
            )
            while found := [*islice(rows, at_once)]:
                yield segment, *_stacked(found)

    def norms(self, region: Region) -> list[Norms]:
        """Return the last frame of each of some steps, without the norms of the parameters."""
        found: dict[int, Norms] = {}
        with self._lock:
            self._refresh()
            for segment in self._segments:
                for _, frame in segment.part.read(Norms, segment.indices(Norms, region)):
                    frame.norms = memoryview(b"")  # it holds all bytes of the frame
                    found[frame.step] = frame
        return [found[step] for step in sorted(found)]

    def _tables(
        self, segment: Segment, region: Region
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield step and table, ``[statistics, modules]``, of full steps."""
        shape = len(segment.statistics), len(segment.layout.modules)
        for _, frame in segment.part.read(FullStep, segment.indices(FullStep, region)):
            if (table := self._array(frame, frame.table, shape)) is not None:
                yield frame.step, table

    def _array(
        self, frame: Frame, data: memoryview, shape: tuple[int, ...]
    ) -> NDArray[np.float32] | None:
        """Return numbers of a frame; None, and a problem, if they do not fit the layout."""
        if len(data) != 4 * math.prod(shape):
            self.directory.problems.add(
                f"a frame of step {frame.step}",
                f"it has {len(data)} bytes of numbers, its layout needs {4 * math.prod(shape)}",
            )
            return None
        return np.frombuffer(data, "<f4").reshape(shape)

    def steps(self, kind: type[Frame] = Norms) -> NDArray[np.int64]:
        """Return the steps with norms, or the full steps, ascending."""
        with self._lock:
            self._refresh()
            found = [
                np.array(segment.part.frames[kind].steps, np.int64)[segment.indices(kind, WHOLE)]
                for segment in self._segments
            ]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def estimated(self) -> bool:
        """Whether some figures of the last full step are those of a sample, not of all elements."""
        with self._lock:
            self._refresh()
            latest = [
                (segment.part, index)
                for segment in self._segments
                for index in segment.indices(FullStep, WHOLE)[-1:]
            ]
            frames = (frame for part, at in latest[-1:] for _, frame in part.read(FullStep, [at]))
            return any(frame.estimated for frame in frames)

    def training_states(self) -> list[str]:
        """Return what each layer's parameters did at the last full step, a text for each layer.

        It is one of :data:`~telemetry.layers.formulas.TRAINING_STATES`, or empty for layers
        without parameters or before the first full step.
        """
        since = int(min(self.steps(FullStep)[-_LATEST:], default=0))
        values = self.matrix("training_state", Region(first_step=since)).values
        last = [column[column != MISSING][-1:] for column in values.T]
        text_of = dict(enumerate(TRAINING_STATES))
        return [text_of.get(of[0], "") if len(of) else "" for of in last]

    def layer_series(self, name: str) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
        """Return a layer's statistics and its parameters' gradient norms, if they were measured."""
        found: dict[str, list[Numbers]] = {statistic.name: [] for statistic in PAGE_STATISTICS}
        norms: dict[str, list[Numbers]] = defaultdict(list)
        with self._lock:
            self._refresh()
            for segment, steps, of_step in self._gradients(WHOLE):
                if (place := segment.layout.position.get(name)) is not None:
                    for statistic in EVERY_STEP:
                        values = of_modules(segment.layout, of_step, statistic, np.array([place]))
                        found[statistic].append((steps, values[:, 0]))
                    for index in segment.layout.owned[place]:
                        parameter = segment.layout.parameters[index].name
                        norms[parameter].append((steps, of_step[:, index]))
            for segment in self._segments:
                if (place := segment.layout.position.get(name)) is not None:
                    for step, table in self._tables(segment, WHOLE):
                        for row, statistic in enumerate(segment.statistics):
                            one = np.array([step], np.int64), table[row, place : place + 1]
                            found.get(statistic, []).append(one)
        return _measured(found), _measured(norms)

    def units(self, name: str, region: Region = WHOLE) -> UnitExtremes:
        """Return the units of a layer at recorded steps of a region; KeyError: not in the run."""
        with self._lock:
            self._refresh()
            type_name = {one.name: one.type_name for one in self._layers}[name]
            found: dict[int, NDArray[np.float32]] = {}
            sampled = False
            for segment in self._segments:
                place = segment.layout.position.get(name, -1)
                for _, frame in segment.part.read(FullStep, segment.indices(FullStep, region)):
                    try:
                        units = decode_units(frame.units, place) if len(frame.units) else None
                    except ValueError as error:
                        self.directory.problems.add(f"the units of step {frame.step}", error)
                        continue
                    if units is not None:
                        found[frame.step] = units
                        if max(map(len, found.values())) * len(found) > MAX_UNITS:
                            found, sampled = dict(list(found.items())[::2]), True
        return UnitExtremes.of(type_name, found, sampled)

    def onsets_by(self, step: int, first_step: int | None = None) -> list[Onset] | None:
        """Return the layers whose gradient norm has left its baseline by a step, earliest first.

        NaN counts as infinite; None: there are too few earlier steps for a baseline. It looks back
        to ``first_step``, by default 120 steps.
        """
        first = max(0, step + 1 - LOOK_BACK) if first_step is None else first_step
        matrix = self.matrix("grad_norm", Region(first_step=first, last_step=step))
        norms = np.where(np.isnan(matrix.values), np.inf, matrix.values).astype(np.float64)
        norms[norms == MISSING] = np.nan
        names = [layer.name for layer in self.overview().layers]
        return onsets(names, matrix.steps, norms, step, fewest=FEWEST_TO_SHOW)

    # --- structure -------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self.directory.refresh()
        runs = self.directory.runs()
        self._parts = runs.get(self._run or next(reversed([*runs]), ""), ())
        state = [(part, part.end, len(part.frames[LaidOut].steps)) for part in self._parts]
        if state != self._state:
            self._state = state
            self._assemble()
        self.source.period = self._period(runs)

    def _assemble(self) -> None:
        found: list[tuple[Part, LaidOut, int, Layout]] = []
        for part in self._parts:
            laid_out = part.few(LaidOut)
            ends = [*(frame.step for frame in laid_out[1:]), part.end]
            for frame, end in zip(laid_out, ends, strict=False):
                try:
                    found.append((part, frame, min(end, part.end), self._layout_of(frame)))
                except ValueError as error:
                    what = f"the layout of step {frame.step}"
                    self.directory.problems.add(what, error)
        newest_first = {id(layout): layout for *_, layout in reversed(found)}
        self._layers = _merge_layers(newest_first.values())
        row_of = {layer.name: row for row, layer in enumerate(self._layers)}
        rows = {
            key: np.array([row_of[module.name] for module in layout.modules], np.intp)
            for key, layout in newest_first.items()
        }
        self._segments = tuple(
            [
                Segment(
                    part=part,
                    layout=layout,
                    statistics=tuple(frame.statistics),
                    first=frame.step,
                    end=end,
                    rows=rows[id(layout)],
                )
                for part, frame, end, layout in found
            ]
        )

    def _layout_of(self, frame: LaidOut) -> Layout:
        """Return the layout of a frame; the same object for equal ones."""
        for known, layout in self._layouts:
            if (known.modules, known.parameters, known.code) == (
                frame.modules, frame.parameters, frame.code
            ):  # fmt: skip
                return layout
        self._layouts.append((frame, layout_of(frame)))
        return self._layouts[-1][1]

    def _version(self) -> str:
        parts = [f"{segment.first},{len(segment.layout.modules)}" for segment in self._segments]
        begins = [f"{part.begin.run} {part.begin.step}" for part in self._parts]
        text = "\n".join([*begins, *parts, *(layer.name for layer in self._layers)])
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _merge_layers(newest_first: Iterable[Layout]) -> tuple[Layer, ...]:
    """Return the newest layout's modules; older modules follow their former predecessor."""
    found: dict[str, tuple[Module, tuple[Parameter, ...]]] = {}
    places: dict[str, set[int]] = defaultdict(set)
    ordered: list[str] = []
    for layout in newest_first:
        behind: dict[str | None, list[str]] = defaultdict(list)
        before: str | None = None
        for number, module, owned in zip(layout.numbers, layout.modules, layout.owned, strict=True):
            places[module.name].add(number)
            if module.name in found:
                before = module.name
            else:
                behind[before].append(module.name)
                parameters = tuple([layout.parameters[index] for index in owned])
                found[module.name] = module, parameters
        ordered = [*behind[None], *(n for name in ordered for n in (name, *behind.get(name, ())))]
    return tuple(
        [
            Layer(**vars(module), parameters=own, places=frozenset(places[module.name]))
            for module, own in (found[name] for name in ordered)
        ]
    )


def trained_share(layers: Sequence[Layer], states: Sequence[str]) -> float | None:
    """Return the share of the parameters that are in layers that train; None if unknown.

    ``states`` are those of :meth:`RunData.training_states`.
    """
    sizes: Counter[str] = Counter()
    for layer, state in zip(layers, states, strict=True):
        sizes[state] += sum(parameter.size for parameter in layer.parameters)
    del sizes[""]
    return sizes[TRAINING_STATES[0]] / sizes.total() if sizes.total() else None


def windows(runs: Sequence[RunData], statistics: Sequence[str]) -> Iterator[list[list[Matrix]]]:
    """Yield a matrix for each run and statistic, in windows of steps that fit into memory."""
    steps = np.unique(
        np.concatenate([run.steps(kind) for run in runs for kind in (Norms, FullStep)])
    )
    most_layers = max(len(run.overview().layers) for run in runs)
    at_once = max(1, READ_BYTES // (4 * max(1, most_layers) * len(statistics) * len(runs)))
    for start in range(0, max(len(steps), 1), at_once):
        some = steps[start : start + at_once]
        region = Region(first_step=int(some[0]), last_step=int(some[-1])) if len(some) else WHOLE
        yield [[run.matrix(name, region) for name in statistics] for run in runs]


def _stacked(
    rows: Sequence[tuple[int, NDArray[np.float32]]],
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    return np.array([step for step, _ in rows], np.int64), np.stack([row for _, row in rows])


def _measured(curves: Mapping[str, Sequence[Numbers]]) -> dict[str, Numbers]:
    """Join the parts of each curve, without those that were not measured."""
    found = {}
    for name, parts in curves.items():
        if parts:
            steps, values = in_order(*map(np.concatenate, zip(*parts, strict=True)))
            if (known := values != MISSING).any():
                found[name] = steps[known], values[known]
    return found

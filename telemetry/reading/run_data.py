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
    LossFound,
    Norms,
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
from telemetry.reading.run_log import KindOfFrame, Part, RunDirectory, Segment
from telemetry.reading.sources import FileSource, Period, RunSource
from telemetry.records import Layout, Module, Parameter
from telemetry.records.step import INPUT, is_inside
from telemetry.tag_names import RUN, plain

# Limit of the extremes of units that are read at once, 8 bytes each.
MAX_UNITS = 32 << 20
_STEPS_AT_ONCE = 256
# Full steps in which a layer's training state is looked for.
_LATEST = 10


@dataclass(frozen=True, kw_only=True)
class Layer(Module):
    """Row of the heat map: a module, its parameters, and its positions in the forward order."""

    parameters: tuple[Parameter, ...]
    places: frozenset[int]


class RunData:
    """Data of one run, as of the latest :meth:`refresh`.

    Args:
        directory: Its run logs.
        run: Id of the run in the directory; without one, the newest.
        source: Its event files; without one, those of the directory.

    Attributes:
        layers: In forward order.
    """

    def __init__(
        self, directory: RunDirectory, run: str = "", source: RunSource | None = None
    ) -> None:
        self.directory = directory
        self.layers: tuple[Layer, ...] = ()
        self._run = run
        self._source = source or FileSource(directory.path)
        self._parts: Sequence[Part] = ()
        self._segments: Sequence[Segment] = ()
        # Row of each module among the layers of the run, by the id of its layout.
        self._rows: Mapping[int, NDArray[np.intp]] = {}
        self.update()

    def refresh(self) -> None:
        """Read what is new."""
        self.directory.refresh()
        self.update()

    @property
    def source(self) -> RunSource:
        """Its event files."""
        self._source.period = self._period()
        return self._source

    @property
    def problems(self) -> list[str]:
        """One line for each part of the files that was skipped."""
        return [*self.directory.problems, *self._source.problems]

    @property
    def unreadable(self) -> str:
        """Reason why the directory's run logs hold no run that can be read; empty if one can."""
        return "" if self._parts else next(iter(self.directory.problems), "")

    @property
    def run(self) -> str:
        """Id of the run; empty without a run log."""
        return self._parts[0].begin.run if self._parts else ""

    @property
    def version(self) -> str:
        """Text that changes with new layers or parts: earlier answers are then invalid."""
        segments = [f"{segment.first},{len(segment.layout.modules)}" for segment in self._segments]
        begins = [f"{part.begin.run} {part.begin.step}" for part in self._parts]
        text = "\n".join([*begins, *segments, *(layer.name for layer in self.layers)])
        return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]

    @property
    def layer_count(self) -> int:
        """Number of layers without the rows of the input."""
        return sum(not is_inside(layer.name, INPUT) for layer in self.layers)

    @property
    def first_step(self) -> int:
        return min((segment.first for segment in self._segments), default=0)

    @property
    def last_step(self) -> int | None:
        """The last step with data, or the last one of the training; None without any."""
        found = [end.step for end in self.frames(End)]
        for segment in self._segments:
            for kind in (Norms, FullStep):
                found += segment.find(kind)[-1:, 0].tolist()
        return max([self.first_step, *found]) if found else None

    @property
    def extent(self) -> str:
        """Number of layers and range of steps, for a heading."""
        if not self.layers:
            return "no steps"
        return f"{self.layer_count} layers, steps {self.first_step} to {self.last_step or 0}"

    @property
    def resumed(self) -> list[int]:
        """Steps at which the run was resumed."""
        begins = [part.begin.step for part in self._parts if not part.begin.continues]
        return sorted({*begins[1:]})

    @property
    def started_s(self) -> float | None:
        """Time at which the run began or was resumed, in seconds since the epoch."""
        begins = [part.begin.time_s for part in self._parts if not part.begin.continues]
        return begins[-1] if begins else None

    @property
    def written_s(self) -> float:
        """Time of the last frame, in seconds since the epoch."""
        return max((part.last_time_s for part in self._parts), default=0.0)

    @property
    def statistics(self) -> set[str]:
        """Names of the statistics that are written at full steps."""
        return set().union(*(segment.statistics for segment in self._segments))

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Alerts by step."""
        found = [frame.alert for frame in self.frames(Alerted)]
        return tuple(sorted(found, key=lambda alert: alert.step))

    def frames(self, kind: type[KindOfFrame]) -> list[KindOfFrame]:
        """Return the frames of a rare kind, without hidden ones, in the order of writing."""
        return [frame for part in self._parts for frame in part.few(kind)]

    def end(self) -> End | None:
        """Return the end of the run; None while it is open."""
        ends = self._parts[-1].few(End)[-1:] if self._parts else ()
        # Steps after an end make it void.
        return next((end for end in ends if end.time_s >= self._parts[-1].last_time_s), None)

    def seed(self) -> int | None:
        """Return the seed of torch's generator when the run began."""
        return self._parts[0].begin.seed if self._parts else None

    def hyperparameters(self) -> dict[str, str | float | bool]:
        found = self.frames(Hyperparameters)
        return dict(found[-1].values) if found else {}

    def loss_tag(self) -> str | None:
        """Return the tag of the loss that the logger has found."""
        found = self.frames(LossFound)
        return found[-1].tag if found else None

    def loss_delay(self) -> int:
        """Return the steps between a batch and its loss."""
        found = self.frames(LossFound)
        return found[-1].delay if found else 0

    def logged(self) -> dict[str, list[tuple[int, float]]]:
        """Return steps and values of the scalars that the user has logged, by tag."""
        return self._curves(of_run=False)

    def costs(self) -> dict[str, list[tuple[int, float]]]:
        """Return steps and values of times and memory, by tag without TensorBoard's group."""
        return {plain(tag): points for tag, points in self._curves(of_run=True).items()}

    def _curves(self, *, of_run: bool) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for part in self._parts:
            for tag, (steps, values) in part.curves().items():
                if tag.startswith(RUN) == of_run:
                    found[tag].update(zip(steps.tolist(), values.tolist(), strict=True))
        return {tag: sorted(points.items()) for tag, points in found.items() if points}

    # --- statistics of layers --------------------------------------------------------------------

    def matrix(self, statistic: str, region: Region = WHOLE, limit: Limit | None = None) -> Matrix:
        """Return one statistic of all layers and steps, or a region; KeyError: no statistic."""
        if statistic not in {known.name for known in PAGE_STATISTICS}:
            raise KeyError(statistic)
        rows = region.layers(len(self.layers))
        width = len(range(len(self.layers))[rows])
        kind = Norms if statistic in EVERY_STEP else FullStep
        count = sum(len(segment.find(kind, *region.steps)) for segment in self._segments)
        per_column, per_row = limit.factors(count, width) if limit else (1, 1)
        steps = [np.empty(0, np.int64)]
        values = [np.empty((0, -(-width // per_row)), np.float32)]
        segments = [s for s in self._segments if kind is Norms or statistic in s.statistics]
        for segment, found, numbers in self._numbers(segments, kind, region, per_column):
            row_of = self._rows[id(segment.layout)]
            modules = np.flatnonzero((row_of >= rows.start) & (row_of < rows.stop))
            if kind is Norms:
                columns = of_modules(segment.layout, np.stack(numbers), statistic, modules)
            else:
                place = segment.statistics.index(statistic)
                columns = np.stack([table[place, modules] for table in numbers])
            of_all = np.full((len(found), width), MISSING, np.float32)
            of_all[:, row_of[modules] - rows.start] = columns
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

    def _numbers(
        self,
        segments: Iterable[Segment],
        kind: type[Norms | FullStep],
        region: Region,
        multiple_of: int = 1,
    ) -> Iterator[tuple[Segment, NDArray[np.int64], Sequence[NDArray[np.float32]]]]:
        """Yield segment, some steps, and the numbers of each: a row of norms, or a table."""
        at_once = multiple_of * max(1, _STEPS_AT_ONCE // multiple_of)
        for segment in segments:
            found = self._numbers_of(segment, kind, region)
            while some := [*islice(found, at_once)]:
                steps, numbers = zip(*some, strict=True)
                yield segment, np.array(steps, np.int64), numbers

    def _numbers_of(
        self, segment: Segment, kind: type[Norms | FullStep], region: Region
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the numbers of each step; add a problem for those that do not fit the layout."""
        shape: tuple[int, ...] = (len(segment.layout.parameters),)
        if kind is FullStep:
            shape = len(segment.statistics), len(segment.layout.modules)
        size = 4 * math.prod(shape)
        for frame in segment.read(kind, segment.find(kind, *region.steps)):
            data = frame.norms if isinstance(frame, Norms) else frame.table
            if len(data) == size:
                yield frame.step, np.frombuffer(data, "<f4").reshape(shape)
            else:
                what, why = f"a frame of step {frame.step}", f"numbers, its layout needs {size}"
                self.directory.problems.add(what, f"it has {len(data)} bytes of {why}")

    def norms(self, region: Region) -> list[Norms]:
        """Return the last frame of each of some steps, without the norms of the parameters."""
        found: dict[int, Norms] = {}
        for segment in self._segments:
            for frame in segment.read(Norms, segment.find(Norms, *region.steps)):
                frame.norms = memoryview(b"")  # it holds all bytes of the frame
                found[frame.step] = frame
        return [found[step] for step in sorted(found)]

    def steps(self, kind: type[Frame] = Norms) -> NDArray[np.int64]:
        """Return the steps with norms, or the full steps, ascending."""
        found = [segment.find(kind)[:, 0] for segment in self._segments]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def estimated(self) -> bool:
        """Whether some figures of the last full step are those of a sample, not of all elements."""
        for segment in reversed(self._segments):
            for frame in segment.read(FullStep, segment.find(FullStep)[-1:]):
                return frame.estimated
        return False

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
        found, norms = defaultdict[str, list[Numbers]](list), defaultdict[str, list[Numbers]](list)
        segments = [segment for segment in self._segments if name in segment.layout.position]
        for segment, steps, numbers in self._numbers(segments, Norms, WHOLE):
            layout, of_step = segment.layout, np.stack(numbers)
            place = layout.position[name]
            for statistic in EVERY_STEP:
                values = of_modules(layout, of_step, statistic, np.array([place]))
                found[statistic].append((steps, values[:, 0]))
            for index in layout.owned[place]:
                norms[layout.parameters[index].name].append((steps, of_step[:, index]))
        for segment, steps, tables in self._numbers(segments, FullStep, WHOLE):
            place = segment.layout.position[name]
            columns = np.stack([table[:, place] for table in tables], axis=1)
            for statistic, values in zip(segment.statistics, columns, strict=True):
                found[statistic].append((steps, values))
        shown = {known.name: found[known.name] for known in PAGE_STATISTICS if known.name in found}
        return _measured(shown), _measured(norms)

    def units(self, name: str, region: Region = WHOLE) -> UnitExtremes:
        """Return the units of a layer at recorded steps of a region; KeyError: not in the run."""
        type_name = {one.name: one.type_name for one in self.layers}[name]
        found: dict[int, NDArray[np.float32]] = {}
        sampled = False
        for segment in self._segments:
            place = segment.layout.position.get(name, -1)
            for frame in segment.read(FullStep, segment.find(FullStep, *region.steps)):
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
        names = [layer.name for layer in self.layers]
        return onsets(names, matrix.steps, norms, step, fewest=FEWEST_TO_SHOW)

    # --- structure -------------------------------------------------------------------------------

    def update(self) -> None:
        """Take what its directory has read."""
        runs = self.directory.runs
        run = self._run or next(reversed(runs), "")
        self._parts = runs.get(run, ())
        segments = [s for part in self._parts for s in part.segments if s.first < part.end]
        if segments != self._segments:
            self._segments = segments
            newest_first = {id(s.layout): s.layout for s in reversed(segments)}
            self.layers = _merge_layers(newest_first.values())
            place_of = {layer.name: place for place, layer in enumerate(self.layers)}
            self._rows = {
                key: np.array([place_of[module.name] for module in layout.modules], np.intp)
                for key, layout in newest_first.items()
            }

    def _period(self) -> Period:
        """Return the time of the run, if others have used its directory before or after it."""
        others = [parts for run, parts in self.directory.runs.items() if run != self.run]
        if not self._parts or not others:
            return Period()
        began_s, ended_s = self._parts[0].begin.time_s, self.written_s
        later_s = [parts[0].begin.time_s for parts in others]
        is_first = all(max(p.last_time_s for p in parts) > began_s for parts in others)
        end_s = min((time_s for time_s in later_s if time_s > ended_s), default=math.inf)
        return Period(-math.inf if is_first else began_s, end_s)


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


def _measured(curves: Mapping[str, Sequence[Numbers]]) -> dict[str, Numbers]:
    """Join the parts of each curve, without those that were not measured."""
    found = {}
    for name, parts in curves.items():
        if parts:
            steps, values = in_order(*map(np.concatenate, zip(*parts, strict=True)))
            if (known := values != MISSING).any():
                found[name] = steps[known], values[known]
    return found

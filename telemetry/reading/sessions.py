"""Group a run's tags by session and layout, and drop steps that a later session replaced."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.events.page_format import EVENTS_PER_TAG, NORM_BLOCK_BYTES, ChunkKind, parse_chunk
from telemetry.layers.units import MOST_BYTES
from telemetry.reading.sources import Problems
from telemetry.records import Layout, Module, Parameter
from telemetry.untrusted import MAX_INTEGER

_NEVER = 2**62
_STEPS_BEYOND = 64  # steps of a block of norms above its size limit


@dataclass(frozen=True, kw_only=True)
class Layer(Module):
    """Row of the heat map: a module, its parameters, and its positions in the forward order."""

    parameters: tuple[Parameter, ...]
    places: frozenset[int]


class WrittenLayout(NamedTuple):
    session: str
    number: int
    step: int
    layout: Layout
    statistic_names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Records of one session with one layout."""

    layout: Layout
    statistic_names: tuple[str, ...]  # columns of its ``m`` tags
    begin: int  # first step of its session
    end: int  # first step that a later session replaces
    rows: NDArray[np.intp]  # row of each module among all layers of the run, ``[modules]``
    layer_count: int  # of the run

    def shape(self, kind: ChunkKind) -> tuple[int, ...]:
        if kind == "n":
            return (len(self.layout.parameters),)
        return (len(self.layout.modules), len(self.statistic_names))


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberTag:
    """Tag of numbers, whose steps are in ``after < step <= last``."""

    tag: str
    kind: ChunkKind
    segment: Segment
    after: int
    last: int

    @property
    def estimated_bytes(self) -> int:
        """Upper limit of its size if telemetry wrote it, also when expanded to all layers."""
        steps = max(0, self.last - self.after)
        if self.kind == "u":
            return MOST_BYTES * min(steps, EVENTS_PER_TAG)
        width = math.prod(self.segment.shape(self.kind)) + (self.kind == "n")
        step_bytes = 4 * max(width, self.segment.layer_count)
        if self.kind == "m":
            return step_bytes * min(steps, EVENTS_PER_TAG)
        block_bytes = NORM_BLOCK_BYTES + _STEPS_BEYOND * step_bytes
        return min(step_bytes * steps, EVENTS_PER_TAG * block_bytes)


class Sessions:
    """First step of each session, and the step from which a later one replaces it."""

    def __init__(self, starts: Iterable[tuple[str, int]] = ()) -> None:
        self.begins: dict[str, int] = {}
        for session, step in starts:
            self.begins[session] = min(step, self.begins.get(session, step))
        self._sorted = sorted(self.begins)
        # The smallest first step of each session and all later ones.
        later = accumulate((self.begins[session] for session in reversed(self._sorted)), min)
        self._ends = [*reversed(list(later)), _NEVER]

    def end_of(self, session: str) -> int:
        """Return the first step of a session that a later one replaces."""
        return self._ends[bisect_right(self._sorted, session)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """All layers, segments and tags of numbers of a run, oldest segment first."""

    layers: tuple[Layer, ...] = ()
    segments: tuple[Segment, ...] = ()
    tags: tuple[NumberTag, ...] = ()
    sessions: Sessions = field(default_factory=Sessions)


def assemble(
    layouts: Iterable[WrittenLayout], last_steps: Mapping[str, int], problems: Problems
) -> Structure:
    """Combine the layouts of a run, in any order, into layers, segments and tags.

    Equal layouts should be one object. ``last_steps`` has the last step of each tag.
    """
    ordered = sorted(layouts, key=lambda written: (written.session, written.number))
    sessions = Sessions((written.session, written.step) for written in ordered)
    layouts_by_id = {id(written.layout): written.layout for written in reversed(ordered)}
    layers = _merge_layers(layouts_by_id.values())
    row_of = {layer.name: row for row, layer in enumerate(layers)}
    rows = {
        key: np.array([row_of[module.name] for module in layout.modules], dtype=np.intp)
        for key, layout in layouts_by_id.items()
    }
    ranges = _group(last_steps, problems)
    segments, tags = [], []
    for session, number, step, layout, names in ordered:
        segment = Segment(
            layout=layout,
            statistic_names=names,
            begin=step,
            end=sessions.end_of(session),
            rows=rows[id(layout)],
            layer_count=len(layers),
        )
        segments.append(segment)
        tags += [
            NumberTag(tag=tag, kind=kind, segment=segment, after=after, last=last)
            for kind, tag, after, last in ranges[session, number]
        ]
    return Structure(layers=layers, segments=tuple(segments), tags=tuple(tags), sessions=sessions)


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


def _group(
    last_steps: Mapping[str, int], problems: Problems
) -> Mapping[tuple[str, int], list[tuple[ChunkKind, str, int, int]]]:
    """Return kind, tag, ``after`` and ``last`` of the number tags by session and layout."""
    groups: dict[tuple[str, int], list[tuple[ChunkKind, str, int, int]]] = defaultdict(list)
    previous: dict[tuple[str, int, ChunkKind], int] = {}
    chunks = [(chunk, tag) for tag in last_steps if (chunk := parse_chunk(tag))]
    for chunk, tag in sorted(chunks, key=lambda pair: pair[0].number):
        last = last_steps[tag]
        if not 0 <= last <= MAX_INTEGER:
            problems.add(tag, "its last step must be from 0 to 2**53")
            continue
        key = chunk.session, chunk.layout, chunk.kind
        # Where steps decrease, the first step is unknown.
        after = previous[key] if previous.get(key, _NEVER) <= last else -1
        previous[key] = last
        groups[chunk.session, chunk.layout].append((chunk.kind, tag, after, last))
    return groups

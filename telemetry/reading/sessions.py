"""Groups a run's tags by session and layout, and drops what a later session replaced."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.page_format import (
    LAYOUT_PREFIX,
    ChunkKind,
    decode_alert,
    decode_layout,
    parse_chunk,
    parse_layout_tag,
)
from telemetry.reading.sources import Point, Problems
from telemetry.records import Layout, Parameter
from telemetry.untrusted import MAX_WHOLE

MAX_TEXT_BYTES = 32 << 20
"""All alerts and distinct layouts of a run together: fifteen layouts of 20,000 modules."""
_NEVER = 2**62


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One row of the picture: a module with its own parameters.

    ``places`` are its places in the forward order, which may have changed during the run.
    """

    name: str
    type_name: str
    parameters: tuple[Parameter, ...]
    places: frozenset[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class TagRange:
    """A tag of numbers: its steps lie in ``after < step <= last``."""

    tag: str
    after: int
    last: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """What one session wrote with one layout.

    Attributes:
        layout: Its modules and parameters.
        statistic_names: Columns of its ``m`` tags.
        begin: First step of its session.
        end: First step that a later session replaces.
        tags: Its tags of numbers, in the order of their steps.
        rows: The row of each module among all layers of the run, shape ``[modules]``.
    """

    layout: Layout
    statistic_names: tuple[str, ...]
    begin: int
    end: int
    tags: Mapping[ChunkKind, Sequence[TagRange]]
    rows: NDArray[np.intp]

    @cached_property
    def owners(self) -> NDArray[np.intp]:
        """Position of each parameter's module in the layout, shape ``[parameters]``."""
        position = self.layout.position
        return np.array([position[p.module_name] for p in self.layout.parameters], dtype=np.intp)

    @cached_property
    def by_owner(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Parameters in the order of their modules, those modules, and where each one begins."""
        order = np.argsort(self.owners, kind="stable")
        return order, *np.unique(self.owners[order], return_index=True)

    @cached_property
    def sizes(self) -> NDArray[np.float64]:
        """Number of elements of each parameter, shape ``[parameters]``."""
        return np.array([p.size for p in self.layout.parameters], dtype=np.float64)

    def shape(self, kind: ChunkKind) -> tuple[int, ...]:
        """Shape of one step's values."""
        if kind == "n":
            return (len(self.layout.parameters),)
        return (len(self.layout.modules), len(self.statistic_names))

    def width(self, kind: ChunkKind) -> int:
        """Numbers in one step."""
        return math.prod(self.shape(kind)) + (kind == "n")


class Sessions:
    """Where each session of a run begins, and where a later one replaces it.

    Args:
        begins: First step of each session, by its id.
    """

    def __init__(self, begins: Mapping[str, int] | None = None) -> None:
        self.begins = begins or {}
        self._sorted = sorted(self.begins)
        # The smallest first step of each session and all later ones.
        later = accumulate((self.begins[session] for session in reversed(self._sorted)), min)
        self._ends = [*reversed(list(later)), _NEVER]

    def end_of(self, session: str) -> int:
        """First step of a session that a later one replaces."""
        return self._ends[bisect_right(self._sorted, session)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """All layers and segments of a run, oldest segment first."""

    layers: tuple[Layer, ...] = ()
    segments: tuple[Segment, ...] = ()
    sessions: Sessions = field(default_factory=Sessions)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsedLayout:
    """One layout tag."""

    session: str
    number: int
    step: int
    layout: Layout
    names: tuple[str, ...]


class TextParser:
    """Parses the texts of one run; sessions with the same layout share one object."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, tuple[Layout, tuple[str, ...]]] = {}
        self._room = MAX_TEXT_BYTES

    def layout(self, tag: str, point: Point) -> ParsedLayout:
        """The layout in a tag.

        Raises:
            NewerFormatError: It has a later format.
            ValueError: It is not a layout, or the texts of the run are too large.
        """
        session, number = parse_layout_tag(tag)
        step, text = point.step, _text(point)
        if not 0 <= step <= MAX_WHOLE:
            raise ValueError("its step must be from 0 to 2**53")
        if text not in self._layouts:
            self._take_room(text)
            self._layouts[text] = decode_layout(text)
        layout, names = self._layouts[text]
        return ParsedLayout(session=session, number=number, step=step, layout=layout, names=names)

    def alert(self, point: Point) -> Alert:
        """The alert in a tag; raises like :meth:`layout`."""
        text = _text(point)
        self._take_room(text)
        return decode_alert(text)

    def _take_room(self, text: bytes) -> None:
        if len(text) > self._room:
            raise ValueError(f"the texts of the run take more than {MAX_TEXT_BYTES >> 20} MiB")
        self._room -= len(text)


def _text(point: Point) -> bytes:
    if not isinstance(point.value, bytes):
        raise ValueError("it is not a text")
    return point.value


def assemble(
    layouts: Iterable[ParsedLayout], last_steps: Mapping[str, int], problems: Problems
) -> Structure:
    """The layers and segments of a run.

    Args:
        layouts: All of its layouts, in any order.
        last_steps: Last step of each of the plugin's tags.
        problems: Receives the tags that are skipped.
    """
    ordered = sorted(layouts, key=lambda parsed: (parsed.session, parsed.number))
    begins: dict[str, int] = {}
    for parsed in ordered:
        begins[parsed.session] = min(parsed.step, begins.get(parsed.session, _NEVER))
    sessions = Sessions(begins)
    # Sessions with the same layout share one object.
    layouts_by_id = {id(parsed.layout): parsed.layout for parsed in reversed(ordered)}
    layers = _merge_layers(layouts_by_id.values())
    row_of = {layer.name: row for row, layer in enumerate(layers)}
    rows = {
        key: np.array([row_of[module.name] for module in layout.modules], dtype=np.intp)
        for key, layout in layouts_by_id.items()
    }
    tags = _group(last_steps, problems)
    segments = tuple(
        Segment(
            layout=parsed.layout,
            statistic_names=parsed.names,
            begin=parsed.step,
            end=sessions.end_of(parsed.session),
            tags=tags[parsed.session, parsed.number],
            rows=rows[id(parsed.layout)],
        )
        for parsed in ordered
    )
    return Structure(layers=layers, segments=segments, sessions=sessions)


def is_layout(tag: str) -> bool:
    return tag.startswith(LAYOUT_PREFIX)


def _merge_layers(newest_first: Iterable[Layout]) -> tuple[Layer, ...]:
    """The newest layout's modules; a module of older layouts only follows its predecessor there."""
    found: dict[str, tuple[str, tuple[Parameter, ...]]] = {}
    places: dict[str, set[int]] = defaultdict(set)
    follower: dict[str | None, str | None] = {None: None}  # a linked list; None is both of its ends
    for layout in newest_first:
        parameters = defaultdict(list)
        for parameter in layout.parameters:
            parameters[parameter.module_name].append(parameter)
        before: str | None = None
        for place, module in enumerate(layout.modules):
            places[module.name].add(place)
            if module.name not in found:
                follower[before], follower[module.name] = module.name, follower[before]
                found[module.name] = module.type_name, tuple(parameters[module.name])
            before = module.name
    ordered = []
    name = follower[None]
    while name is not None:
        type_name, own = found[name]
        ordered.append(
            Layer(name=name, type_name=type_name, parameters=own, places=frozenset(places[name]))
        )
        name = follower[name]
    return tuple(ordered)


def _group(
    last_steps: Mapping[str, int], problems: Problems
) -> Mapping[tuple[str, int], Mapping[ChunkKind, Sequence[TagRange]]]:
    groups: dict[tuple[str, int], dict[ChunkKind, list[TagRange]]]
    groups = defaultdict(lambda: {"m": [], "n": []})
    chunks = [(chunk, tag) for tag in last_steps if (chunk := parse_chunk(tag))]
    for chunk, tag in sorted(chunks, key=lambda pair: pair[0].number):
        last = last_steps[tag]
        if not 0 <= last <= MAX_WHOLE:
            problems.add(tag, "its last step must be from 0 to 2**53")
            continue
        ranges = groups[chunk.session, chunk.layout][chunk.kind]
        # Where steps go back, the first step is unknown.
        after = ranges[-1].last if ranges and ranges[-1].last <= last else -1
        ranges.append(TagRange(tag=tag, after=after, last=last))
    return groups

"""Which tags of a run belong together, and which of them still count."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from telemetry.plugin_data.format import (
    LAYOUT_PREFIX,
    ChunkKind,
    NewerFormatError,
    decode_alert,
    decode_layout,
    parse_chunk,
    parse_layout_tag,
)
from telemetry.plugin_data.sources import Point
from telemetry.records import Alert, Layout, Parameter

log = logging.getLogger(__name__)

_NEVER = 2**62
Parsed = TypeVar("Parsed")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One row of the picture: a module with its own parameters.

    ``places``: those that it had in the forward order while the run went on.
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
        end: First step that no longer counts, because a later session begins there.
        tags: Its tags of numbers, in the order of their steps.
        rows: Row of each of its modules among all layers of the run, shape ``[modules]``.
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
    def sizes(self) -> NDArray[np.float64]:
        """Elements of each parameter, shape ``[parameters]``."""
        return np.array([p.size for p in self.layout.parameters], dtype=np.float64)

    def width(self, kind: ChunkKind) -> int:
        """Numbers in one step."""
        if kind == "n":
            return 1 + len(self.layout.parameters)
        return len(self.layout.modules) * len(self.statistic_names)


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """All layers and segments of a run, oldest segment first."""

    layers: tuple[Layer, ...] = ()
    segments: tuple[Segment, ...] = ()
    session_begins: Mapping[str, int] = field(default_factory=dict)

    def end_of(self, session: str) -> int:
        """First step of a session that no longer counts."""
        return _end_of(session, self.session_begins)


@dataclass(frozen=True, kw_only=True, eq=False)
class ParsedLayout:
    """One layout tag."""

    session: str
    number: int
    step: int
    layout: Layout
    names: tuple[str, ...]


def parse_layouts(points: Mapping[str, Sequence[Point]]) -> dict[str, ParsedLayout]:
    """Layouts by tag; tags that hold none are left out.

    Raises:
        NewerFormatError: One has a later format.
    """

    def parse(tag: str, text: bytes, step: int) -> ParsedLayout:
        session, number = parse_layout_tag(tag)
        layout, names = decode_layout(text)
        return ParsedLayout(session=session, number=number, step=step, layout=layout, names=names)

    return _parse_all(points, parse)


def parse_alerts(points: Mapping[str, Sequence[Point]]) -> dict[str, Alert]:
    """Alerts by tag, likewise."""
    return _parse_all(points, lambda tag, text, step: decode_alert(text))


def _parse_all(
    points: Mapping[str, Sequence[Point]], parse: Callable[[str, bytes, int], Parsed]
) -> dict[str, Parsed]:
    found = {}
    for tag, values in points.items():
        text = values[-1].value if values else None
        try:
            if not isinstance(text, bytes):
                raise ValueError("it holds no text")
            found[tag] = parse(tag, text, values[-1].step)
        except NewerFormatError:
            raise
        except ValueError as error:
            log.warning("%s: is left out: %s", tag, error)
    return found


def assemble(layouts: Iterable[ParsedLayout], last_steps: Mapping[str, int]) -> Structure:
    """How the tags of a run fit together.

    Args:
        layouts: All of them, in any order.
        last_steps: Last step of each of the plugin's tags.
    """
    ordered = sorted(layouts, key=lambda parsed: (parsed.session, parsed.number))
    begins: dict[str, int] = {}
    for parsed in ordered:
        begins[parsed.session] = min(parsed.step, begins.get(parsed.session, _NEVER))
    layers = _merge_layers([parsed.layout for parsed in ordered])
    row_of = {layer.name: row for row, layer in enumerate(layers)}
    tags = _group(last_steps)
    segments = tuple(
        Segment(
            layout=parsed.layout,
            statistic_names=parsed.names,
            begin=parsed.step,
            end=_end_of(parsed.session, begins),
            tags=tags[parsed.session, parsed.number],
            rows=np.array([row_of[m.name] for m in parsed.layout.modules], dtype=np.intp),
        )
        for parsed in ordered
    )
    return Structure(layers=layers, segments=segments, session_begins=begins)


def is_layout(tag: str) -> bool:
    return tag.startswith(LAYOUT_PREFIX)


def _end_of(session: str, begins: Mapping[str, int]) -> int:
    return min((begin for other, begin in begins.items() if other > session), default=_NEVER)


def _merge_layers(layouts: Sequence[Layout]) -> tuple[Layer, ...]:
    """The newest layout's modules; those that only older ones have follow their predecessor."""
    names: list[str] = []
    layers: dict[str, Layer] = {}
    for layout in reversed(layouts):
        place = 0
        for module in layout.modules:
            if module.name in layers:
                place = names.index(module.name) + 1
                continue
            names.insert(place, module.name)
            place += 1
            layers[module.name] = Layer(
                name=module.name,
                type_name=module.type_name,
                parameters=tuple(p for p in layout.parameters if p.module_name == module.name),
                places=frozenset(
                    known.position[module.name]
                    for known in layouts
                    if module.name in known.position
                ),
            )
    return tuple(layers[name] for name in names)


def _group(
    last_steps: Mapping[str, int],
) -> Mapping[tuple[str, int], Mapping[ChunkKind, Sequence[TagRange]]]:
    groups: dict[tuple[str, int], dict[ChunkKind, list[TagRange]]]
    groups = defaultdict(lambda: {"m": [], "n": []})
    chunks = [(chunk, tag) for tag in last_steps if (chunk := parse_chunk(tag))]
    for chunk, tag in sorted(chunks, key=lambda pair: pair[0].number):
        ranges = groups[chunk.session, chunk.layout][chunk.kind]
        after = ranges[-1].last if ranges else -1
        ranges.append(TagRange(tag=tag, after=after, last=last_steps[tag]))
    return groups

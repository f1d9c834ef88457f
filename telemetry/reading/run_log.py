"""Run logs of one directory, which may still grow: an index of their frames, by run."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat import tf

from telemetry.events import framing
from telemetry.events.reading import read_frames
from telemetry.events.run_log import (
    FORMAT,
    SUFFIX,
    Alerted,
    Begin,
    End,
    Frame,
    FullStep,
    LaidOut,
    Logged,
    Norms,
    decode,
)
from telemetry.reading.sources import Problems
from telemetry.records import Layout
from telemetry.untrusted import open_file

NEVER = 2**62

# Limits of what is kept in memory of one file: begins; rare frames of each kind, such as alerts.
MAX_PARTS = 10_000
MAX_KEPT_BYTES = 32 << 20
_FRAME_BYTES = 3 << 10  # for the objects of a frame, besides those of its data

KindOfFrame = TypeVar("KindOfFrame", bound=Frame)


@dataclass(eq=False)
class Part:
    """Frames of one logger, from its begin, or a checkpoint that it restored, to the next one."""

    begin: Begin
    end: int = NEVER  # first step that a later part hides
    last_time_s: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    # Rare frames, by kind; steps and values of the scalars that the user has logged, by tag.
    kept: dict[type[Frame], list[Any]] = field(default_factory=lambda: defaultdict(list))
    scalars: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)

    def few(self, kind: type[KindOfFrame]) -> list[KindOfFrame]:
        """Return the frames of a kind that is rare, without hidden ones."""
        return [frame for frame in self.kept[kind] if frame.step < self.end]

    def curves(self) -> Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Return steps and values of logged scalars, and of times and memory, by tag."""
        found = {tag: (np.array(s), np.array(v)) for tag, (s, v) in self.scalars.items()}
        return {tag: (s[s < self.end], v[s < self.end]) for tag, (s, v) in found.items()}


@dataclass(frozen=True, eq=False)
class Segment:
    """Norms and full steps of one layout in a part of a run; they are read when needed."""

    file: LogFile
    part: Part
    layout: Layout
    statistics: list[str]  # rows of the tables
    first: int
    # Step, offset and size of each frame, one after the other.
    places: Mapping[type[Frame], array[int]] = field(
        default_factory=lambda: {Norms: array("q"), FullStep: array("q")}
    )

    def find(self, kind: type[Frame], first: int = 0, end: int = NEVER) -> NDArray[np.int64]:
        """Return step, offset and size of its frames ``[k, 3]`` between two steps, without the end.

        They are in the order of writing.
        """
        places = np.array(self.places[kind], np.int64).reshape(-1, 3)
        steps = places[:, 0]
        return places[(steps >= max(self.first, first)) & (steps < min(self.part.end, end))]

    def read(self, kind: type[KindOfFrame], places: NDArray[np.int64]) -> Iterator[KindOfFrame]:
        """Yield norms or full steps that :meth:`find` has found, without damaged ones."""
        if not len(places):
            return
        try:
            with open_file(self.file.local_path) as file:
                for _, offset, size in places.tolist():
                    file.seek(offset)
                    try:
                        yield decode(file.read(size), kind)
                    except ValueError as error:
                        self.file.skipped(f"a frame at byte {offset}", error)
        except OSError as error:  # the run was deleted
            self.file.skipped("the steps", error.strerror or error)


class LogFile:
    """One file; each :meth:`refresh` reads what has been added.

    Files of a directory share equal ``layouts``.
    """

    def __init__(self, path: str, problems: Problems, layouts: dict[Layout, Layout]) -> None:
        self.path = self.local_path = path
        self.parts: list[Part] = []
        self._part: Part | None = None  # to which new frames belong
        self._problems = problems
        self._layouts = layouts
        self._kept_bytes = Counter[type[Frame]]()
        self._offset = 0  # end of what was read
        self._seen: tuple[int, ...] = ()  # size and time of the latest change that was read

    def skipped(self, what: str, why: object) -> None:
        """Add a problem of this file."""
        self._problems.add(f"{what} of {self.path}", why)

    def refresh(self) -> None:
        """Read what is new; raise OSError."""
        status = os.stat(self.local_path)
        seen = status.st_size, status.st_mtime_ns
        if seen == self._seen:
            return
        for data, end in read_frames(self.local_path, self.skipped, self._offset):
            self._offset = end
            offset = end - framing.FOOTER_BYTES - len(data)
            try:
                self._add(data, offset)
            except ValueError as error:
                self.skipped(f"the frame at byte {offset}", error)
        self._seen = seen

    def _add(self, data: bytes, offset: int) -> None:
        frame = decode(data)
        kind = type(frame)
        if kind is Begin:
            self._begin(frame)
        if (part := self._part) is None:
            self.skipped("frames", "nothing began, or nothing that can be read")
            return
        part.last_time_s = frame.time_s
        if kind is Norms or kind is FullStep:
            for segment in part.segments[-1:]:
                segment.places[kind].extend((frame.step, offset, len(data)))
        elif kind is Logged:
            self._add_scalars(part, frame)
        elif kind is not Begin and self._has_room(kind, len(data)):
            if kind is LaidOut:
                layout = self._layouts.setdefault(frame.layout, frame.layout)
                part.segments.append(Segment(self, part, layout, frame.statistics, frame.step))
            else:
                part.kept[kind].append(frame)

    def _begin(self, begin: Begin) -> None:
        self._part = None
        if begin.format > FORMAT:
            self.skipped(
                "the run",
                f"its log has format {begin.format}, this version of telemetry reads {FORMAT}; "
                "update telemetry on this machine",
            )
        elif len(self.parts) == MAX_PARTS:
            self.skipped("the rest", f"more than {MAX_PARTS} begins")
        else:
            self._part = Part(begin)
            self.parts.append(self._part)

    def _has_room(self, kind: type[Frame], size: int) -> bool:
        self._kept_bytes[kind] += size + _FRAME_BYTES
        if self._kept_bytes[kind] <= MAX_KEPT_BYTES:
            return True
        limit = f"they take more than {MAX_KEPT_BYTES >> 20} MiB of memory"
        self.skipped(f"the rest of the frames {kind.__name__}", limit)
        return False

    def _add_scalars(self, part: Part, frame: Logged) -> None:
        for tag, value in frame.scalars.items():
            if tag in part.scalars or self._has_room(Logged, len(tag)):
                steps, values = part.scalars.setdefault(tag, (array("q"), array("d")))
                steps.append(frame.step)
                values.append(value)


class RemoteLogFile(LogFile):
    """File in a remote directory, of which a local copy is read.

    TensorBoard's file systems read forward only; what is new is appended to the copy.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._copy = tempfile.NamedTemporaryFile(suffix=SUFFIX)  # noqa: SIM115 - as long as this
        self.local_path = self._copy.name
        self._source: Any = None

    def __del__(self) -> None:
        self._copy.close()

    def refresh(self) -> None:
        self._source = self._source or tf.io.gfile.GFile(self.path, "rb")
        while data := self._source.read(1 << 20):
            self._copy.write(data)
        self._copy.flush()
        super().refresh()


class RunDirectory:
    """Run logs in a directory, local or remote, as of the latest :meth:`refresh`.

    One thread at a time may use it and its runs.

    Args:
        path: The directory; one that cannot be read has no runs.
        problems: Receives a line for each skipped part.

    Attributes:
        runs: Parts of each run by its id, the oldest run first. A run without steps and alerts
            counts only if there is no other.
    """

    def __init__(self, path: str | os.PathLike[str], problems: Problems | None = None) -> None:
        self.path = os.fspath(path)
        self.problems = problems or Problems()
        self.runs: dict[str, list[Part]] = {}
        self._files: dict[str, LogFile] = {}
        self._layouts: dict[Layout, Layout] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what is new."""
        is_remote, names = "://" in self.path, list[str]()
        with suppress(OSError):
            listed = tf.io.gfile.listdir if is_remote else os.listdir
            names = sorted(filter(is_run_log, listed(self.path)))
        if self._files.keys() - set(names):  # another run in the same directory
            self._files.clear()
        for name in names:
            path = os.path.join(self.path, name)
            if name not in self._files:
                make = RemoteLogFile if is_remote else LogFile
                self._files[name] = make(path, self.problems, self._layouts)
            try:
                self._files[name].refresh()
            except OSError as error:
                self.problems.add(path, error.strerror or error)
        self.runs = self._assembled()

    def _assembled(self) -> dict[str, list[Part]]:
        found: dict[str, list[Part]] = {}
        for name in sorted(self._files):
            for part in self._files[name].parts:
                found.setdefault(part.begin.run, []).append(part)
        for parts in found.values():
            end = NEVER
            for part in reversed(parts):
                part.end = end
                if not part.begin.continues:
                    end = min(end, part.begin.step)
        filled = {run: parts for run, parts in found.items() if _has_data(parts)} or found
        return dict(sorted(filled.items(), key=lambda item: item[1][0].begin.time_s))


def _has_data(parts: Sequence[Part]) -> bool:
    return any(
        part.kept[Alerted]
        or part.kept[End]
        or any(places for segment in part.segments for places in segment.places.values())
        for part in parts
    )


def is_run_log(name: str) -> bool:
    return name.endswith(SUFFIX)

"""Run logs of one directory, which may still grow: an index of their frames, by run."""

from __future__ import annotations

import os
import tempfile
import threading
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat import tf

from telemetry.events import framing
from telemetry.events.message_pack import encode
from telemetry.events.reading import CorruptFileError, FrameReader
from telemetry.events.run_log import (
    KINDS,
    SUFFIX,
    Alerted,
    Begin,
    End,
    Frame,
    FullStep,
    Head,
    LaidOut,
    Logged,
    NewerFormatError,
    Norms,
    decode,
    layout_of,
)
from telemetry.reading.sources import Problems
from telemetry.records import Layout
from telemetry.untrusted import open_file

NEVER = 2**62

# Limits of what is kept in memory of one file: frames of one kind, such as alerts; begins; tags.
MAX_FEW = 10_000
MAX_FEW_BYTES = 32 << 20
MAX_PARTS = 10_000
MAX_TAGS = 50_000

AnyFrame = TypeVar("AnyFrame", bound=Frame)


@dataclass(eq=False)
class Places:
    """Places of the frames of one kind in a file."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))


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

    def few(self, kind: type[AnyFrame]) -> list[AnyFrame]:
        """Return the frames of a kind that is rare, without hidden ones."""
        return [frame for frame in self.kept[kind] if frame.step < self.end]

    def curves(self) -> Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Return steps and values of the scalars that the user has logged, by tag."""
        found = {tag: (np.array(s), np.array(v)) for tag, (s, v) in self.scalars.items()}
        return {tag: (s[s < self.end], v[s < self.end]) for tag, (s, v) in found.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """Norms and full steps of one layout in a part of a run; they are read when needed."""

    file: LogFile
    part: Part
    layout: Layout
    statistics: list[str]  # rows of the tables
    first: int
    places: Mapping[type[Frame], Places] = field(
        default_factory=lambda: {Norms: Places(), FullStep: Places()}
    )

    def indices(self, kind: type[Frame], first: int = 0, end: int = NEVER) -> list[int]:
        """Return the indices of its frames from a step to another one, which is not included."""
        steps = np.array(self.places[kind].steps, np.int64)
        first, end = max(self.first, first), min(self.part.end, end)
        return np.flatnonzero((steps >= first) & (steps < end)).tolist()

    def read(self, kind: type[AnyFrame], indices: Sequence[int]) -> Iterator[AnyFrame]:
        """Yield norms or full steps, without damaged ones."""
        if not indices:
            return
        places = self.places[kind]
        with self.file.opened() as file:
            for index in indices:
                file.seek(places.offsets[index])
                try:
                    yield decode(kind, file.read(places.sizes[index]))
                except ValueError as error:
                    self.file.skipped(f"a frame at byte {places.offsets[index]}", error)


class LogFile:
    """One file; each :meth:`refresh` reads what has been added.

    Files of a directory share ``layouts``, by their encoded content.
    """

    def __init__(self, path: str, problems: Problems, layouts: dict[bytes, Layout]) -> None:
        self.path = path
        self.parts: list[Part] = []
        self._problems = problems
        self._layouts = layouts
        self._kept = Counter[type[Frame]]()  # number of frames, by kind
        self._kept_bytes = Counter[type[Frame]]()
        self._offset = 0  # end of what was read
        self._seen: tuple[int, ...] = ()  # size and time of the latest change that was read
        self._ends = False  # the rest is not read

    def opened(self) -> BinaryIO:
        return open_file(self.path)

    def skipped(self, what: str, why: object) -> None:
        """Add a problem of this file."""
        self._problems.add(f"{what} of {self.path}", why)

    def refresh(self) -> None:
        """Read what is new; raise OSError or NewerFormatError."""
        path = self._local()
        status = os.stat(path)
        seen = status.st_size, status.st_mtime_ns
        if self._ends or seen == self._seen:
            return
        reader = FrameReader(path, self._offset)
        try:
            for data in reader:
                self._offset = reader.offset
                self._add(data, reader.offset - framing.FOOTER_BYTES - len(data))
                if len(self.parts) > MAX_PARTS:
                    self._ends = True
                    self.skipped("the rest", f"more than {MAX_PARTS} begins")
                    return
        except CorruptFileError as error:
            self.skipped("the rest", f"damaged at byte {error.offset}")
        except NewerFormatError:
            self._ends = True
            raise
        for offset, size in reader.oversized:
            self.skipped(f"the frame at byte {offset}", f"it has {size} bytes")
        self._offset, self._seen = reader.offset, seen

    def _local(self) -> str:
        return self.path

    def _add(self, data: bytes, offset: int) -> None:
        try:
            head = decode(Head, data)
            kind = KINDS.get(head.kind)
            if kind is Begin:
                self.parts.append(Part(decode(Begin, data)))
            if kind is None or not self.parts:
                raise ValueError("it is of an unknown kind" if kind is None else "nothing began")
            part = self.parts[-1]
            part.last_time_s = head.time_s
            if kind in (Norms, FullStep):
                for segment in part.segments[-1:]:
                    places = segment.places[kind]
                    places.steps.append(head.step)
                    places.offsets.append(offset)
                    places.sizes.append(len(data))
            elif kind is Logged:
                self._add_scalars(part, decode(Logged, data))
            elif kind is not Begin and self._has_room(kind, len(data)):
                frame = decode(kind, data)
                if kind is LaidOut:
                    self._add_segment(part, frame)
                else:
                    part.kept[kind].append(frame)
        except NewerFormatError:
            raise
        except ValueError as error:
            self.skipped(f"the frame at byte {offset}", error)

    def _add_segment(self, part: Part, frame: LaidOut) -> None:
        key = encode((frame.modules, frame.parameters, frame.code))
        if key not in self._layouts:
            self._layouts[key] = layout_of(frame)
        part.segments.append(
            Segment(
                file=self,
                part=part,
                layout=self._layouts[key],
                statistics=frame.statistics,
                first=frame.step,
            )
        )

    def _has_room(self, kind: type[Frame], size: int) -> bool:
        self._kept[kind] += 1
        self._kept_bytes[kind] += size
        if self._kept[kind] <= MAX_FEW and self._kept_bytes[kind] <= MAX_FEW_BYTES:
            return True
        self.skipped(
            f"the rest of the frames {kind.__name__}",
            f"more than {MAX_FEW} or {MAX_FEW_BYTES >> 20} MiB",
        )
        return False

    def _add_scalars(self, part: Part, frame: Logged) -> None:
        for tag, value in frame.scalars.items():
            if tag not in part.scalars and len(part.scalars) == MAX_TAGS:
                self.skipped("the rest of the scalars", f"more than {MAX_TAGS} tags")
                continue
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
        self._source: Any = None

    def __del__(self) -> None:
        self._copy.close()

    def opened(self) -> BinaryIO:
        return open_file(self._copy.name)

    def _local(self) -> str:
        self._source = self._source or tf.io.gfile.GFile(self.path, "rb")
        while data := self._source.read(1 << 20):
            self._copy.write(data)
        self._copy.flush()
        return self._copy.name


class RunDirectory:
    """Run logs in a directory, local or remote, as of the latest :meth:`refresh`.

    Threads that share its runs hold ``lock`` while they read them.

    Args:
        path: The directory; one that cannot be read has no runs.
        problems: Receives a line for each skipped part.
        names: Names of the files to read; by default, of all run logs.

    Attributes:
        runs: Parts of each run by its id, the oldest run first. A run without steps and alerts
            counts only if there is no other.
        newer: Error of a file that this version cannot read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        problems: Problems | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.lock = threading.RLock()
        self.problems = problems or Problems()
        self.newer: NewerFormatError | None = None
        self.runs: dict[str, list[Part]] = {}
        self._names = names
        self._files: dict[str, LogFile] = {}
        self._layouts: dict[bytes, Layout] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what is new."""
        with self.lock:
            try:
                names = log_names(self.path) if self._names is None else self._names
            except OSError:
                names = []
            if self._files.keys() - set(names):  # another run in the same directory
                self._files.clear()
                self.newer = None
            for name in names:
                path = os.path.join(self.path, name)
                if name not in self._files:
                    make = RemoteLogFile if "://" in self.path else LogFile
                    self._files[name] = make(path, self.problems, self._layouts)
                try:
                    self._files[name].refresh()
                except OSError as error:
                    self.problems.add(path, error.strerror or error)
                except NewerFormatError as error:
                    self.newer = error
                    self.problems.add(path, error)
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
        or any(places.steps for segment in part.segments for places in segment.places.values())
        for part in parts
    )


def log_names(directory: str | os.PathLike[str]) -> list[str]:
    """Return the names of the run logs in a directory; OSError if it cannot be read."""
    path = os.fspath(directory)
    listed: Callable[[str], list[str]] = tf.io.gfile.listdir if "://" in path else os.listdir
    return sorted(name for name in listed(path) if name.endswith(SUFFIX))

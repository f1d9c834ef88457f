"""Run logs of one directory, which may still grow: an index of their frames, by run."""

from __future__ import annotations

import os
import tempfile
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat import tf

from telemetry.events import framing
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
    Logged,
    NewerFormatError,
    Norms,
    decode,
)
from telemetry.reading.sources import Problems
from telemetry.untrusted import open_file

NEVER = 2**62

# Limits of what is kept in memory of one file: frames of one kind, such as alerts; begins; tags.
MAX_FEW = 10_000
MAX_FEW_BYTES = 32 << 20
MAX_PARTS = 10_000
MAX_TAGS = 50_000

AnyFrame = TypeVar("AnyFrame", bound=Frame)


@dataclass(eq=False)
class Frames:
    """Places of the frames of one kind in a file."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))

    def between(self, first: int, end: int) -> list[int]:
        """Return the indices of the frames from a step to another one, which is not included."""
        steps = np.array(self.steps, np.int64)
        return np.flatnonzero((steps >= first) & (steps < end)).tolist()


@dataclass(eq=False)
class Part:
    """Frames of one logger, from its begin, or a checkpoint that it restored, to the next one."""

    file: LogFile
    begin: Begin
    frames: dict[type[Frame], Frames] = field(
        default_factory=lambda: {kind: Frames() for kind in KINDS.values()}
    )
    end: int = NEVER  # first step that a later part hides
    last_time_s: float = 0.0
    _decoded: dict[type[Frame], list[Any]] = field(default_factory=dict)
    _curves: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    _curves_end: int = 0  # frames that they include

    def few(self, kind: type[AnyFrame]) -> list[AnyFrame]:
        """Return the frames of a kind that is rare, without hidden ones; they are kept."""
        known, sizes = self._decoded.setdefault(kind, []), self.frames[kind].sizes
        room, end = self.file.room[kind], len(known)
        while end < len(sizes) and room[0] and room[1] >= sizes[end]:
            room -= 1, sizes[end]
            end += 1
        for _, frame in self.read(kind, range(len(known), end), keep_damaged=True):
            known.append(frame)
        if end < len(sizes):
            what = f"the rest of the frames {kind.__name__} of {self.file.path}"
            self.file.problems.add(what, f"more than {MAX_FEW} or {MAX_FEW_BYTES >> 20} MiB")
        return [frame for frame in known if frame is not None and frame.step < self.end]

    def curves(self) -> Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Return steps and values of the scalars that the user has logged, by tag."""
        indices = range(self._curves_end, len(self.frames[Logged].steps))
        self._curves_end = indices.stop
        for _, frame in self.read(Logged, indices):
            for tag, value in frame.scalars.items():
                if tag not in self._curves and len(self._curves) == MAX_TAGS:
                    what = f"the rest of the scalars of {self.file.path}"
                    self.file.problems.add(what, f"more than {MAX_TAGS} tags")
                    continue
                steps, values = self._curves.setdefault(tag, (array("q"), array("d")))
                steps.append(frame.step)
                values.append(value)
        found = {tag: (np.array(s), np.array(v)) for tag, (s, v) in self._curves.items()}
        return {tag: (s[s < self.end], v[s < self.end]) for tag, (s, v) in found.items()}

    def read(
        self, kind: type[AnyFrame], indices: Sequence[int], *, keep_damaged: bool = False
    ) -> Iterator[tuple[int, AnyFrame]]:
        """Yield index and content of frames; damaged ones are omitted, or None."""
        if not len(indices):
            return
        frames = self.frames[kind]
        with self.file.opened() as file:
            for index in indices:
                file.seek(frames.offsets[index])
                try:
                    yield index, decode(kind, file.read(frames.sizes[index]))
                except ValueError as error:
                    what = f"a frame at byte {frames.offsets[index]} of {self.file.path}"
                    self.file.problems.add(what, error)
                    if keep_damaged:
                        yield index, None  # type: ignore[misc]


class LogFile:
    """One file; each :meth:`refresh` reads what has been added."""

    def __init__(self, path: str, problems: Problems) -> None:
        self.path = path
        self.parts: list[Part] = []
        self.problems = problems
        # Number and bytes of further frames of a kind that may be kept.
        self.room = defaultdict[type[Frame], NDArray[np.int64]](
            lambda: np.array([MAX_FEW, MAX_FEW_BYTES])
        )
        self.offset = 0  # end of what was read
        self._seen: tuple[int, ...] = ()  # size and time of the latest change that was read
        self._ends = False  # the rest is not read

    def opened(self) -> BinaryIO:
        return open_file(self.path)

    def refresh(self) -> None:
        """Read what is new; raise OSError or NewerFormatError."""
        path = self._local()
        status = os.stat(path)
        seen = status.st_size, status.st_mtime_ns
        if self._ends or seen == self._seen:
            return
        reader = FrameReader(path, self.offset)
        try:
            for data in reader:
                self.offset = reader.offset
                self._add(data, reader.offset - framing.FOOTER_BYTES - len(data))
                if len(self.parts) > MAX_PARTS:
                    self._ends = True
                    self.problems.add(f"the rest of {self.path}", f"more than {MAX_PARTS} begins")
                    return
        except CorruptFileError as error:
            self.problems.add(f"the rest of {self.path}", f"damaged at byte {error.offset}")
        except NewerFormatError:
            self._ends = True
            raise
        for offset, size in reader.oversized:
            self.problems.add(f"the frame at byte {offset} of {self.path}", f"it has {size} bytes")
        self.offset, self._seen = reader.offset, seen

    def _local(self) -> str:
        return self.path

    def _add(self, data: bytes, offset: int) -> None:
        try:
            head = decode(Head, data)
            kind = KINDS.get(head.kind)
            if kind is Begin:
                self.parts.append(Part(self, decode(Begin, data)))
            if kind is None or not self.parts:
                raise ValueError("it is of an unknown kind" if kind is None else "nothing began")
        except NewerFormatError:
            raise
        except ValueError as error:
            self.problems.add(f"the frame at byte {offset} of {self.path}", error)
            return
        part = self.parts[-1]
        frames = part.frames[kind]
        frames.steps.append(head.step)
        frames.offsets.append(offset)
        frames.sizes.append(len(data))
        part.last_time_s = head.time_s


class RemoteLogFile(LogFile):
    """File in a remote directory, of which a local copy is read.

    TensorBoard's file systems read forward only; what is new is appended to the copy.
    """

    def __init__(self, path: str, problems: Problems) -> None:
        super().__init__(path, problems)
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
    """Run logs in a directory, local or remote; ``names`` are those of some files in it.

    Readers of its runs hold ``lock``: they share files, of which each call reads what is new.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        problems: Problems | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.lock = threading.RLock()
        self._names = names
        self.problems = problems or Problems()
        self.newer: NewerFormatError | None = None  # of a file that this version cannot read
        self._files: dict[str, LogFile] = {}
        self._runs: dict[str, list[Part]] = {}

    def refresh(self) -> None:
        """Read what is new."""
        with self.lock:
            before = self._offsets()
            self._refresh_files()
            if self._offsets() != before:
                self._assemble()

    def _refresh_files(self) -> None:
        try:
            names = log_names(self.path) if self._names is None else self._names
        except OSError:
            names = []
        if self._files.keys() - set(names):  # another run in the same directory
            self._files.clear()
            self._runs = {}
        for name in names:
            if name not in self._files:
                make = RemoteLogFile if "://" in self.path else LogFile
                self._files[name] = make(os.path.join(self.path, name), self.problems)
            try:
                self._files[name].refresh()
            except OSError as error:
                self.problems.add(os.path.join(self.path, name), error.strerror or error)
            except NewerFormatError as error:
                self.newer = error
                self.problems.add(os.path.join(self.path, name), error)

    def _offsets(self) -> list[tuple[LogFile, int]]:
        return [(file, file.offset) for file in self._files.values() if file.offset]

    def runs(self) -> Mapping[str, Sequence[Part]]:
        """Return the parts of each run by its id, the oldest run first.

        A run without steps and alerts counts only if there is no other.
        """
        return self._runs

    def _assemble(self) -> None:
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
        self._runs = dict(sorted(filled.items(), key=lambda item: item[1][0].begin.time_s))


def _has_data(parts: Sequence[Part]) -> bool:
    return any(
        part.frames[kind].steps for part in parts for kind in (Norms, FullStep, Alerted, End)
    )


def log_names(directory: str | os.PathLike[str]) -> list[str]:
    """Return the names of the run logs in a directory; OSError if it cannot be read."""
    path = os.fspath(directory)
    listed: Callable[[str], list[str]] = tf.io.gfile.listdir if "://" in path else os.listdir
    return sorted(name for name in listed(path) if name.endswith(SUFFIX))

"""Event files of one run: what readers ask of them, and files without TensorBoard's server."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.data_compat import migrate_value
from tensorboard.util.tensor_util import make_ndarray

from telemetry.events.reading import list_event_files, read_events
from telemetry.plain_text import printable

# Lines about one run.
MAX_PROBLEMS = 50
_MAX_LINE = 200  # characters


class Problems(Iterable[str]):
    """Lines about skipped parts of a run; each is reported and appears once."""

    def __init__(self, report: Callable[[str], object] | None = None) -> None:
        self._lines: dict[str, None] = {}
        self._report = report
        self._more = 0

    def add(self, what: str, why: object) -> None:
        """Add a line for a skipped file, tag or part of one; count it if there are many."""
        line = f"skipped {_shortened(what)}: {_shortened(str(why))}"
        if line in self._lines:
            return
        if len(self._lines) == MAX_PROBLEMS:
            self._more += 1
            return
        self._lines[line] = None
        if self._report is not None:
            self._report(line)

    def __iter__(self) -> Iterator[str]:
        yield from self._lines
        if self._more:
            yield f"skipped {self._more} more"


def _shortened(text: str) -> str:
    return printable(text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}…")


class Period(NamedTuple):
    """Time of a run, for the events of a directory that several runs have used, one after another.

    In seconds since the epoch; the end is not included.
    """

    begin_s: float = -math.inf
    end_s: float = math.inf

    def holds(self, time_s: float) -> bool:
        return self.begin_s <= time_s < self.end_s


class RunSource(Protocol):
    """Tags of one run in event files, by plugin; readers of their values add problems."""

    problems: Problems
    period: Period  # events of other times are omitted

    def tags(self, plugin_name: str) -> Collection[str]:
        """Return the tags of a plugin: ``scalars``, ``histograms``, ``images``."""

    def read(
        self, plugin_name: str, tags: Sequence[str]
    ) -> Mapping[str, Sequence[tuple[int, Any]]]:
        """Return steps and values of each tag by ascending step.

        Values of ``scalars`` are floats, those of ``histograms`` arrays. Values of ``images`` have
        no meaning.
        """

    def picture(self, tag: str, step: int) -> bytes | None:
        """Return a PNG file; None if the step has none."""


_Values: TypeAlias = dict[str, dict[str, dict[int, Any]]]
"""Values by plugin, tag and step; the last of each step counts."""

# Largest size of each plugin's values in memory.
MAX_KEPT_BYTES = dict.fromkeys(("scalars", "histograms", "images"), 512 << 20)

_MAX_ELEMENTS = 1 << 24  # of one tensor
_OVERHEAD_BYTES = 400  # of the Python objects around a value
# Errors of make_ndarray if type, shape and content do not fit together.
UNDECODABLE = (ValueError, TypeError, KeyError, OverflowError, MemoryError)


class FileSource:
    """All values in the event files of a directory, read when they are asked for first.

    It is a :class:`RunSource`, of some plugins only or of all. Values that a resumed run replaces
    (``purge_step``) are omitted, as in TensorBoard.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        plugin_names: Collection[str] = tuple(MAX_KEPT_BYTES),
    ) -> None:
        self.problems = Problems()
        self._plugin_names = plugin_names
        self._log_dir = log_dir
        self.period = Period()
        self._room = dict(MAX_KEPT_BYTES)

    def tags(self, plugin_name: str) -> Collection[str]:
        return [tag for tag, series in self._values[plugin_name].items() if series]

    def read(
        self, plugin_name: str, tags: Sequence[str]
    ) -> Mapping[str, Sequence[tuple[int, Any]]]:
        known = self._values[plugin_name]
        return {tag: sorted(known[tag].items()) for tag in tags if known.get(tag)}

    def picture(self, tag: str, step: int) -> bytes | None:
        return self._values["images"].get(tag, {}).get(step)

    @cached_property
    def _values(self) -> _Values:
        found: _Values = {name: {} for name in self._plugin_names}
        for path in list_event_files(self._log_dir):

            def skipped(what: str, why: object, path: Path = path) -> None:
                self.problems.add(f"{what} of {path}", why)

            try:
                for event in read_events(path, skipped):
                    self._take(event, found)
            except OSError as error:
                self.problems.add(str(path), error.strerror or error)
        return found

    def _take(self, event: Event, found: _Values) -> None:
        if event.session_log.status == SessionLog.START:
            for tags in found.values():
                for tag, series in tags.items():
                    tags[tag] = {step: of for step, of in series.items() if step < event.step}
        for value in event.summary.value if self.period.holds(event.wall_time) else ():
            try:
                plugin_name, content = _content(value)
            except ValueError as error:
                self.problems.add(value.tag, error)
                continue
            if content is None or plugin_name not in found:
                continue
            nbytes = max(value.ByteSize(), getattr(content, "nbytes", 0)) + _OVERHEAD_BYTES
            self._room[plugin_name] -= nbytes
            if self._room[plugin_name] < 0:
                limit = MAX_KEPT_BYTES[plugin_name] >> 20
                self.problems.add(f"the rest of {plugin_name}", f"there are more than {limit} MiB")
            else:
                found[plugin_name].setdefault(value.tag, {})[event.step] = content


def _content(value: Summary.Value) -> tuple[str, NDArray[Any] | bytes | float | None]:
    """Return plugin and content of a value, None if not shown; ValueError if damaged."""
    if value.HasField("simple_value"):
        return "scalars", value.simple_value
    if value.WhichOneof("value") in ("histo", "image"):  # in the form of torch
        value = migrate_value(value)
    plugin_name: str = value.metadata.plugin_data.plugin_name
    if plugin_name not in MAX_KEPT_BYTES:
        return plugin_name, None
    if plugin_name == "images":
        # The first two strings are the picture's width and height.
        strings = value.tensor.string_val
        return plugin_name, bytes(strings[2]) if len(strings) > 2 else None
    content = _decode(value.tensor)
    if content.dtype.kind != "f":
        raise ValueError(f"its type is {content.dtype}, not a float")
    if plugin_name != "scalars":
        return plugin_name, content
    if content.size != 1:
        raise ValueError("not a single number")
    return plugin_name, float(content.reshape(()))


def _decode(tensor: TensorProto) -> NDArray[Any]:
    """Return the array in a tensor; raise ValueError if it is damaged."""
    size = math.prod(dim.size for dim in tensor.tensor_shape.dim)
    if not 0 <= size <= _MAX_ELEMENTS:
        raise ValueError(f"it has {size} elements")
    try:
        return np.asarray(make_ndarray(tensor))
    except UNDECODABLE as error:
        raise ValueError(str(error)) from None

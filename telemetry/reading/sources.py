"""Sources of one run's data: the interface, and event files, without TensorBoard's server."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.data_compat import migrate_value
from tensorboard.plugins.hparams import metadata

from telemetry.events import CorruptEventFileError, list_event_files, read_events
from telemetry.events.page_format import PLUGIN_NAME
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


class RunSource(Protocol):
    """Tags of one run and their values, by plugin; readers of the values add problems."""

    problems: Problems

    def tags(self, plugin_name: str) -> Mapping[str, int]:
        """Return the last step of each tag of a plugin: ``scalars``, ``histograms``, ``images``."""

    def read(
        self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False
    ) -> Mapping[str, Sequence[tuple[int, Any]]]:
        """Return steps and values of each tag by ascending step; if ``sampled``, the last alone.

        Values of ``scalars`` are floats, others are arrays or the ``bytes`` of a text. Values of
        ``images`` have no meaning.
        """

    def picture(self, tag: str, step: int) -> bytes | None:
        """Return a PNG file; None if the step has none."""


# Largest size of each plugin's values in memory: 2 GiB are 20,000 full steps of 1000 layers.
MAX_KEPT_BYTES = {
    PLUGIN_NAME: 2 << 30,
    "scalars": 512 << 20,
    "histograms": 512 << 20,
    "images": 512 << 20,
    metadata.PLUGIN_NAME: 64 << 20,
}


class Series(NamedTuple):
    """Last step and time of a tag, as TensorBoard's server returns them."""

    max_step: int
    max_wall_time: float


_NONE = Series(-1, -math.inf)
_MAX_DIMENSIONS = 4  # telemetry writes at most 2
_OVERHEAD_BYTES = 400  # of the Python objects around a value
_DTYPES: Mapping[int, np.dtype[Any]] = {
    types_pb2.DT_FLOAT: np.dtype(np.float32),
    types_pb2.DT_DOUBLE: np.dtype(np.float64),
}


class FileSource:
    """All values of one run, read once into memory: a :class:`RunSource`.

    Values that a later session replaces (``purge_step``) are omitted, as in TensorBoard.
    ``is_read`` selects the values by plugin name and tag; ``series`` has all tags of the page. A
    directory without event files raises FileNotFoundError.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        is_read: Callable[[str, str], bool] = lambda plugin_name, tag: True,
    ) -> None:
        self.problems = Problems()
        self.series: dict[str, Series] = {}
        self._is_read = is_read
        # By plugin and tag: pairs of step and value.
        self._values: dict[str, dict[str, list[tuple[int, Any]]]] = defaultdict(dict)
        self._room = dict(MAX_KEPT_BYTES)
        paths = list_event_files(log_dir) if Path(log_dir).is_dir() else []
        if not paths:
            raise FileNotFoundError(f"no event files in {os.fspath(log_dir)}")
        for path in paths:
            self._read_file(path)
        for plugin_name, tags in self._values.items():
            if plugin_name != PLUGIN_NAME:  # the last value of each step counts
                self._values[plugin_name] = {
                    tag: sorted(dict(series).items()) for tag, series in tags.items() if series
                }

    def tags(self, plugin_name: str) -> Mapping[str, int]:
        return {tag: series[-1][0] for tag, series in self._values[plugin_name].items()}

    def read(
        self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False
    ) -> Mapping[str, Sequence[tuple[int, Any]]]:
        known = self._values[plugin_name]
        return {tag: known[tag][-1 if sampled else 0 :] for tag in tags if tag in known}

    def picture(self, tag: str, step: int) -> bytes | None:
        return dict(self._values["images"].get(tag, ())).get(step)

    def _read_file(self, path: Path) -> None:
        events = read_events(path)
        try:
            for event in events:
                self._take(event)
        except CorruptEventFileError as error:
            self.problems.add(f"the rest of {path}", f"damaged at byte {error.offset}")
        except OSError as error:
            self.problems.add(str(path), error.strerror or error)
        for offset, size in events.oversized:
            self.problems.add(f"the event at byte {offset} of {path}", f"it has {size} bytes")

    def _take(self, event: Event) -> None:
        if event.session_log.status == SessionLog.START:
            self._purge(event.step)
        for value in event.summary.value:
            plugin_name = value.metadata.plugin_data.plugin_name
            if value.HasField("simple_value"):
                plugin_name = "scalars"
            elif plugin_name == PLUGIN_NAME:
                before = self.series.get(value.tag, _NONE)
                latest = map(max, before, (event.step, event.wall_time))
                self.series[value.tag] = Series(*latest)
            if not self._is_read(plugin_name, value.tag):
                continue
            try:
                plugin_name, content = _content(value)
            except ValueError as error:
                self.problems.add(value.tag, error)
                continue
            if content is not None:
                self._keep(plugin_name, value.tag, event.step, content)

    def _keep(self, plugin_name: str, tag: str, step: int, content: Any) -> None:
        nbytes = _OVERHEAD_BYTES + len(tag)
        if not isinstance(content, float):
            nbytes += content.nbytes if isinstance(content, np.ndarray) else len(content)
        if nbytes > self._room[plugin_name]:
            limit = MAX_KEPT_BYTES[plugin_name] >> 20
            self.problems.add(f"the rest of {plugin_name}", f"there are more than {limit} MiB")
            return
        self._room[plugin_name] -= nbytes
        self._values[plugin_name].setdefault(tag, []).append((step, content))

    def _purge(self, step: int) -> None:
        for plugin_name, tags in self._values.items():
            if plugin_name != PLUGIN_NAME:  # the page's data has its own sessions
                for tag, series in tags.items():
                    tags[tag] = [item for item in series if item[0] < step]


def _content(value: Summary.Value) -> tuple[str, NDArray[Any] | bytes | float | None]:
    """Return plugin and content of a value, None if not shown; ValueError if damaged."""
    if value.HasField("simple_value"):
        return "scalars", value.simple_value
    if value.WhichOneof("value") in ("histo", "image"):  # in the form of torch
        value = migrate_value(value)
    plugin_name: str = value.metadata.plugin_data.plugin_name
    if plugin_name not in MAX_KEPT_BYTES:
        return plugin_name, None
    if plugin_name == metadata.PLUGIN_NAME:
        return plugin_name, value.metadata.plugin_data.content
    if plugin_name == "images":
        # The first two strings are the picture's width and height.
        strings = value.tensor.string_val
        return plugin_name, bytes(strings[2]) if len(strings) > 2 else None
    content = _decode(value.tensor)
    if plugin_name != "scalars":
        return plugin_name, content
    if not isinstance(content, np.ndarray) or content.size != 1:
        raise ValueError("not a single number")
    return plugin_name, float(content.reshape(()))


def _decode(tensor: TensorProto) -> NDArray[Any] | bytes:
    """Return the array in a tensor, or its first string; raise ValueError if it is damaged."""
    if tensor.dtype == types_pb2.DT_STRING:
        if not tensor.string_val:
            raise ValueError("it has no text")
        return bytes(tensor.string_val[0])
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"its numbers have type {tensor.dtype}, not float32 or float64")
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"it has {len(shape)} dimensions")
    content = tensor.tensor_content or np.array(tensor.float_val or tensor.double_val, dtype)
    size = len(content) if isinstance(content, bytes) else content.nbytes
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{size} bytes do not make {dtype} of shape {shape}")
    return np.frombuffer(content, dtype).reshape(shape)

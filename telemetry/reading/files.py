"""Reads a run from its event files, without TensorBoard's server."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto

from telemetry.events import CorruptEventFileError, list_event_files, read_events
from telemetry.page_format import PLUGIN_NAME
from telemetry.reading.sources import Point, Problems

MAX_KEPT_BYTES = {
    PLUGIN_NAME: 2 << 30,
    "scalars": 512 << 20,
    "histograms": 512 << 20,
    "images": 512 << 20,
}
"""Largest size of each plugin's values in memory: 2 GiB are 60,000 full steps of 1000 layers."""

_MAX_DIMENSIONS = 4  # telemetry writes at most 2
_OVERHEAD_BYTES = 400  # of the Python objects around a value
_DTYPES: Mapping[int, np.dtype[Any]] = {
    types_pb2.DT_FLOAT: np.dtype(np.float32),
    types_pb2.DT_DOUBLE: np.dtype(np.float64),
}


class FileSource:
    """All values of one run, read once and kept in memory.

    Values that a later session replaces (``purge_step``) are left out, as in TensorBoard.

    Args:
        log_dir: The run's directory.

    Attributes:
        problems: One line for each file or tag that could not be read completely.

    Raises:
        FileNotFoundError: ``log_dir`` holds no event files.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self.problems = Problems()
        self._tensors: dict[str, dict[str, list[Point]]] = defaultdict(dict)
        self._scalars: dict[str, list[tuple[int, float]]] = {}
        self._room = dict(MAX_KEPT_BYTES)
        paths = list_event_files(log_dir) if Path(log_dir).is_dir() else []
        if not paths:
            raise FileNotFoundError(f"no event files in {os.fspath(log_dir)}")
        for path in paths:
            self._read(path)
        self._sort()

    def tensor_tags(self, plugin_name: str) -> Mapping[str, int]:
        return {tag: points[-1].step for tag, points in self._tensors[plugin_name].items()}

    def read_tensors(
        self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False
    ) -> Mapping[str, Sequence[Point]]:
        known = self._tensors[plugin_name]
        return {tag: known[tag][-1:] if sampled else known[tag] for tag in tags if tag in known}

    def scalar_tags(self) -> Sequence[str]:
        return list(self._scalars)

    def read_scalars(self, tags: Sequence[str]) -> Mapping[str, Sequence[tuple[int, float]]]:
        return {tag: self._scalars[tag] for tag in tags if tag in self._scalars}

    def image_tags(self) -> Sequence[str]:
        return list(self._tensors["images"])

    def image_steps(self, tag: str) -> Sequence[int]:
        return [point.step for point in self._tensors["images"].get(tag, ())]

    def read_image(self, tag: str, step: int) -> bytes | None:
        for point in self._tensors["images"].get(tag, ()):
            if point.step == step and isinstance(point.value, bytes):
                return point.value
        return None

    def _read(self, path: Path) -> None:
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
            if value.HasField("simple_value"):
                self._take_scalar(value.tag, event.step, value.simple_value)
            elif (plugin_name := value.metadata.plugin_data.plugin_name) in self._room:
                try:
                    self._take_tensor(plugin_name, value, event)
                except ValueError as error:
                    self.problems.add(value.tag, error)

    def _take_tensor(self, plugin_name: str, value: Summary.Value, event: Event) -> None:
        decode = _picture if plugin_name == "images" else decode_tensor
        content = decode(value.tensor)
        if plugin_name == "scalars":
            if not isinstance(content, np.ndarray) or content.size != 1:
                raise ValueError("not a single number")
            self._take_scalar(value.tag, event.step, float(content.reshape(())))
        elif content is not None:
            nbytes = content.nbytes if isinstance(content, np.ndarray) else len(content)
            if self._has_room(plugin_name, value.tag, nbytes):
                point = Point(step=event.step, wall_time=event.wall_time, value=content)
                self._tensors[plugin_name].setdefault(value.tag, []).append(point)

    def _take_scalar(self, tag: str, step: int, value: float) -> None:
        if self._has_room("scalars", tag, 0):
            self._scalars.setdefault(tag, []).append((step, value))

    def _has_room(self, plugin_name: str, tag: str, nbytes: int) -> bool:
        nbytes += _OVERHEAD_BYTES + len(tag)
        if nbytes > self._room[plugin_name]:
            limit = MAX_KEPT_BYTES[plugin_name] >> 20
            self.problems.add(f"the rest of {plugin_name}", f"there are more than {limit} MiB")
            return False
        self._room[plugin_name] -= nbytes
        return True

    def _purge(self, step: int) -> None:
        for tag, series in self._scalars.items():
            self._scalars[tag] = [item for item in series if item[0] < step]
        for plugin_name, tags in self._tensors.items():
            if plugin_name != PLUGIN_NAME:  # the page's data has its own sessions
                for tag, points in tags.items():
                    tags[tag] = [point for point in points if point.step < step]

    def _sort(self) -> None:
        """Sorts by step, and keeps what was written last for each step."""
        for tag, series in self._scalars.items():
            self._scalars[tag] = sorted(dict(series).items())
        self._scalars = {tag: series for tag, series in self._scalars.items() if series}
        for plugin_name, tags in self._tensors.items():
            if plugin_name != PLUGIN_NAME:
                for tag, points in tags.items():
                    latest = {point.step: point for point in points}
                    tags[tag] = [latest[step] for step in sorted(latest)]
            self._tensors[plugin_name] = {tag: points for tag, points in tags.items() if points}


def decode_tensor(tensor: TensorProto) -> NDArray[Any] | bytes:
    """The array in a tensor, or the first of its strings.

    Raises:
        ValueError: Type, shape and content do not fit together, or the type is not supported.
    """
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


def _picture(tensor: TensorProto) -> bytes | None:
    """The first picture; None for a tensor without one."""
    # The first two strings are the pictures' width and height.
    return bytes(tensor.string_val[2]) if len(tensor.string_val) > 2 else None

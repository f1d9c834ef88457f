"""Reads a run straight from its event files."""

from __future__ import annotations

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
from telemetry.plugin_data.format import PLUGIN_NAME
from telemetry.plugin_data.sources import Point

_KEPT = {PLUGIN_NAME, "histograms", "images", "scalars"}
_DTYPES: Mapping[int, np.dtype[Any]] = {
    types_pb2.DT_FLOAT: np.dtype(np.float32),
    types_pb2.DT_DOUBLE: np.dtype(np.float64),
}


class FileSource:
    """All values of one run, read at once and kept in memory.

    What a later session of the run overwrites (``purge_step``) is left out, as in TensorBoard.

    Args:
        log_dir: The run's directory.

    Attributes:
        problems: Files that could not be read to their end, in words.

    Raises:
        FileNotFoundError: There are no event files in it.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self.problems: list[str] = []
        self._tensors: dict[str, dict[str, list[Point]]] = defaultdict(dict)
        self._scalars: dict[str, list[tuple[int, float]]] = {}
        paths = list_event_files(log_dir) if Path(log_dir).is_dir() else []
        if not paths:
            raise FileNotFoundError(f"{os.fspath(log_dir)}: holds no event files")
        for path in paths:
            try:
                for event in read_events(path):
                    self._take(event)
            except (CorruptEventFileError, OSError) as error:
                self.problems.append(str(error))
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

    def _take(self, event: Event) -> None:
        if event.session_log.status == SessionLog.START:
            self._purge(event.step)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                self._scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
            elif (plugin_name := value.metadata.plugin_data.plugin_name) in _KEPT:
                self._take_tensor(plugin_name, value, event)

    def _take_tensor(self, plugin_name: str, value: Summary.Value, event: Event) -> None:
        content = _content(value.tensor, picture=plugin_name == "images")
        if content is None:
            return
        if plugin_name == "scalars":
            if isinstance(content, np.ndarray) and content.size == 1:
                series = self._scalars.setdefault(value.tag, [])
                series.append((event.step, float(content.reshape(()))))
            return
        point = Point(step=event.step, wall_time=event.wall_time, value=content)
        self._tensors[plugin_name].setdefault(value.tag, []).append(point)

    def _purge(self, step: int) -> None:
        for tag, series in self._scalars.items():
            self._scalars[tag] = [item for item in series if item[0] < step]
        for plugin_name, tags in self._tensors.items():
            if plugin_name != PLUGIN_NAME:  # its sessions say themselves what they replace
                for tag, points in tags.items():
                    tags[tag] = [point for point in points if point.step < step]

    def _sort(self) -> None:
        """By step; of one step what was written last."""
        for tag, series in self._scalars.items():
            self._scalars[tag] = sorted(dict(series).items())
        self._scalars = {tag: series for tag, series in self._scalars.items() if series}
        for plugin_name, tags in self._tensors.items():
            if plugin_name != PLUGIN_NAME:
                for tag, points in tags.items():
                    latest = {point.step: point for point in points}
                    tags[tag] = [latest[step] for step in sorted(latest)]
            self._tensors[plugin_name] = {tag: points for tag, points in tags.items() if points}


def _content(tensor: TensorProto, *, picture: bool) -> NDArray[Any] | bytes | None:
    """An array, or bytes; None for what the page does not use."""
    if tensor.dtype == types_pb2.DT_STRING:
        strings = tensor.string_val
        # The first two strings of images are their width and height.
        index = 2 if picture else 0
        return bytes(strings[index]) if len(strings) > index else None
    if tensor.dtype not in _DTYPES or picture:
        return None
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    dtype = _DTYPES[tensor.dtype]
    if tensor.tensor_content:
        flat = np.frombuffer(tensor.tensor_content, dtype)
    else:
        flat = np.array(tensor.float_val or tensor.double_val, dtype)
    return flat.reshape(shape) if flat.size == np.prod(shape, dtype=int) else None

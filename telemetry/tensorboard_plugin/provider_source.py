"""Reads a run through TensorBoard's data provider, with either of its loaders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from tensorboard import context
from tensorboard.data.provider import DataProvider, RunTagFilter

from telemetry.page_format import PLUGIN_NAME
from telemetry.reading.run_list import RunEntry, newest_first, run_entry
from telemetry.reading.sources import Point, Problems

_ALL = 10**9  # 0 would mean none
_CONTEXT = context.RequestContext()
# What tensor_util.make_ndarray raises if type, shape and content do not fit together.
_UNDECODABLE = (ValueError, TypeError, KeyError, OverflowError, MemoryError)

log = logging.getLogger(__name__)


def list_all_runs(provider: DataProvider, experiment: str) -> list[RunEntry]:
    """The runs that have data for the page, newest first."""
    listing = list_series(provider.list_tensors, experiment, PLUGIN_NAME)
    return newest_first(run_entry(run, tags) for run, tags in listing.items() if tags)


def list_series(
    list_tags: Callable[..., Any], experiment: str, plugin_name: str, run: str | None = None
) -> Mapping[str, Mapping[str, Any]]:
    """What TensorBoard says about each tag of a plugin that has values, by run; of all, or one."""
    found: Mapping[str, Mapping[str, Any]] = list_tags(
        _CONTEXT,
        experiment_id=experiment,
        plugin_name=plugin_name,
        run_tag_filter=None if run is None else RunTagFilter(runs=[run]),
    )
    # The slow loader also lists tags whose values a resumed run has all purged, without a step.
    return {
        name: {tag: series for tag, series in tags.items() if series.max_step is not None}
        for name, tags in found.items()
    }


def read_runs(
    read: Callable[..., Any],
    experiment: str,
    plugin_name: str,
    wanted: Mapping[str, Sequence[str]],
    most: int = _ALL,
) -> Mapping[str, Mapping[str, Sequence[Any]]]:
    """At most so many values of some tags of several runs, without runs that cannot be decoded.

    Args:
        read: The provider's method.
        experiment: The experiment's id.
        plugin_name: Whose tags they are.
        wanted: Tags by run; another run's tag of the same name may come along.
        most: Values per tag.
    """
    if not wanted:
        return {}
    filtered = RunTagFilter(
        runs=list(wanted), tags={tag for tags in wanted.values() for tag in tags}
    )
    try:
        found: Mapping[str, Mapping[str, Sequence[Any]]] = read(
            _CONTEXT,
            experiment_id=experiment,
            plugin_name=plugin_name,
            downsample=most,
            run_tag_filter=filtered,
        )
        return found
    except (*_UNDECODABLE, grpc.RpcError) as error:
        if len(wanted) == 1:
            log.warning("telemetry: run %r: %s", *wanted, error)
            return {}
    runs = list(wanted)
    halves = runs[: len(runs) // 2], runs[len(runs) // 2 :]
    parts = [{run: wanted[run] for run in half} for half in halves]
    first, second = [read_runs(read, experiment, plugin_name, part, most) for part in parts]
    return {**first, **second}


class ProviderSource:
    """One run of one experiment.

    Args:
        provider: TensorBoard's data provider.
        experiment: The experiment's id; empty for local files.
        run: The run's name.

    Attributes:
        problems: Tags that could not be read; each is also logged by the server.
    """

    def __init__(self, provider: DataProvider, experiment: str, run: str) -> None:
        self.problems = Problems(lambda line: log.warning("telemetry: run %r: %s", run, line))
        self._provider = provider
        self._experiment = experiment
        self._run = run

    def tensor_tags(self, plugin_name: str) -> Mapping[str, int]:
        listing = self._list(self._provider.list_tensors, plugin_name)
        return {tag: series.max_step for tag, series in listing.items()}

    def read_tensors(
        self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False
    ) -> Mapping[str, Sequence[Point]]:
        most = 1 if sampled else _ALL
        found = self._read(self._provider.read_tensors, plugin_name, tags, most)
        return {tag: [_point(datum) for datum in data] for tag, data in found.items()}

    def scalar_tags(self) -> Sequence[str]:
        return list(self._list(self._provider.list_scalars, "scalars"))

    def read_scalars(self, tags: Sequence[str]) -> Mapping[str, Sequence[tuple[int, float]]]:
        curves = {}
        for tag, data in self._read(self._provider.read_scalars, "scalars", tags).items():
            # The slow loader also lists a text as a scalar.
            curves[tag] = [(d.step, d.value) for d in data if isinstance(d.value, (int, float))]
            if len(curves[tag]) < len(data):
                self.problems.add(f"some of {tag}", "not a number")
        return curves

    def image_tags(self) -> Sequence[str]:
        return list(self._list(self._provider.list_blob_sequences, "images"))

    def image_steps(self, tag: str) -> Sequence[int]:
        return [datum.step for datum in self._images(tag)]

    def read_image(self, tag: str, step: int) -> bytes | None:
        for datum in self._images(tag):
            # The first two blobs are the picture's width and height.
            if datum.step == step and len(datum.values) > 2:
                key = datum.values[2].blob_key
                try:
                    blob = self._provider.read_blob(_CONTEXT, blob_key=key)
                except _UNDECODABLE as error:
                    self.problems.add(tag, error)
                    return None
                return blob if isinstance(blob, bytes) else None
        return None

    def _images(self, tag: str) -> Sequence[Any]:
        return self._read(self._provider.read_blob_sequences, "images", [tag]).get(tag, ())

    def _list(self, list_tags: Callable[..., Any], plugin_name: str) -> Mapping[str, Any]:
        """What TensorBoard says about each tag of a plugin."""
        listing = list_series(list_tags, self._experiment, plugin_name, self._run)
        return listing.get(self._run, {})

    def _read(
        self, read: Callable[..., Any], plugin_name: str, tags: Sequence[str], most: int = _ALL
    ) -> Mapping[str, Sequence[Any]]:
        """At most so many values of each tag, without tags that TensorBoard cannot decode."""
        if not tags:
            return {}
        try:
            found: Mapping[str, Mapping[str, Sequence[Any]]] = read(
                _CONTEXT,
                experiment_id=self._experiment,
                plugin_name=plugin_name,
                downsample=most,
                run_tag_filter=RunTagFilter(runs=[self._run], tags=tags),
            )
            return found.get(self._run, {})
        except _UNDECODABLE as error:
            reason = error
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # too large for a message
                raise
            reason = error.details()
        if len(tags) == 1:
            self.problems.add(tags[0], reason)
            return {}
        half = len(tags) // 2
        first = self._read(read, plugin_name, tags[:half], most)
        return {**first, **self._read(read, plugin_name, tags[half:], most)}


def text_of(datum: Any) -> bytes:
    """The text in a tensor; empty if it holds numbers."""
    value = _point(datum).value
    return value if isinstance(value, bytes) else b""


def _point(datum: Any) -> Point:
    array = np.asarray(datum.numpy)
    is_text = array.dtype.kind in "OSU" and array.size
    value = array.reshape(-1)[0] if is_text else array
    value = value.encode() if isinstance(value, str) else value
    return Point(step=datum.step, wall_time=datum.wall_time, value=value)

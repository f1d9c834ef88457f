"""Reads a run through TensorBoard's data provider, with either of its loaders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from tensorboard import context
from tensorboard.data.provider import DataProvider, RunTagFilter

from telemetry.reading.sources import Point, Problems

_ALL = 10**9  # 0 would mean none
_CONTEXT = context.RequestContext()
# What tensor_util.make_ndarray raises if type, shape and content do not fit together.
_UNDECODABLE = (ValueError, TypeError, KeyError, OverflowError, MemoryError)

log = logging.getLogger(__name__)


def list_runs(provider: DataProvider, experiment: str, plugin_name: str) -> dict[str, int]:
    """The runs that have data of a plugin, and the last step of that data."""
    listing = provider.list_tensors(_CONTEXT, experiment_id=experiment, plugin_name=plugin_name)
    return {
        run: max(series.max_step for series in tags.values())
        for run, tags in listing.items()
        if tags
    }


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
        listing = self._provider.list_tensors(
            _CONTEXT,
            experiment_id=self._experiment,
            plugin_name=plugin_name,
            run_tag_filter=RunTagFilter(runs=[self._run]),
        )
        return {tag: series.max_step for tag, series in listing.get(self._run, {}).items()}

    def read_tensors(
        self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False
    ) -> Mapping[str, Sequence[Point]]:
        found = self._read(
            tags,
            lambda some: self._provider.read_tensors(
                _CONTEXT,
                experiment_id=self._experiment,
                plugin_name=plugin_name,
                downsample=1 if sampled else _ALL,
                run_tag_filter=RunTagFilter(runs=[self._run], tags=some),
            ),
        )
        return {tag: [_point(datum) for datum in data] for tag, data in found.items()}

    def scalar_tags(self) -> Sequence[str]:
        listing = self._provider.list_scalars(
            _CONTEXT,
            experiment_id=self._experiment,
            plugin_name="scalars",
            run_tag_filter=RunTagFilter(runs=[self._run]),
        )
        return list(listing.get(self._run, {}))

    def read_scalars(self, tags: Sequence[str]) -> Mapping[str, Sequence[tuple[int, float]]]:
        found = self._read(
            tags,
            lambda some: self._provider.read_scalars(
                _CONTEXT,
                experiment_id=self._experiment,
                plugin_name="scalars",
                downsample=_ALL,
                run_tag_filter=RunTagFilter(runs=[self._run], tags=some),
            ),
        )
        # The slow loader also lists a text as a scalar.
        for tag, data in found.items():
            if not all(isinstance(datum.value, (int, float)) for datum in data):
                self.problems.add(f"some of {tag}", "not a number")
        return {
            tag: [(d.step, d.value) for d in data if isinstance(d.value, (int, float))]
            for tag, data in found.items()
        }

    def image_tags(self) -> Sequence[str]:
        listing = self._provider.list_blob_sequences(
            _CONTEXT,
            experiment_id=self._experiment,
            plugin_name="images",
            run_tag_filter=RunTagFilter(runs=[self._run]),
        )
        return list(listing.get(self._run, {}))

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
        found = self._read(
            [tag],
            lambda some: self._provider.read_blob_sequences(
                _CONTEXT,
                experiment_id=self._experiment,
                plugin_name="images",
                downsample=_ALL,
                run_tag_filter=RunTagFilter(runs=[self._run], tags=some),
            ),
        )
        return found.get(tag, ())

    def _read(
        self, tags: Sequence[str], read: Callable[[Sequence[str]], Mapping[str, Any]]
    ) -> Mapping[str, Sequence[Any]]:
        """The data of each tag, without those that TensorBoard cannot decode."""
        if not tags:
            return {}
        try:
            found: Mapping[str, Sequence[Any]] = read(tags).get(self._run, {})
            return found
        except _UNDECODABLE as error:
            reason = error
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # too large for a message
                raise
            reason = error.details()
        if len(tags) > 1:
            half = len(tags) // 2
            return {**self._read(tags[:half], read), **self._read(tags[half:], read)}
        self.problems.add(tags[0], reason)
        return {}


def _point(datum: Any) -> Point:
    array = np.asarray(datum.numpy)
    is_text = array.dtype.kind in "OSU" and array.size
    value = array.reshape(-1)[0] if is_text else array
    value = value.encode() if isinstance(value, str) else value
    return Point(step=datum.step, wall_time=datum.wall_time, value=value)

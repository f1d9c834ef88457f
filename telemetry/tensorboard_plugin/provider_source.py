"""Reads a run through TensorBoard's data provider, whichever loader is behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard import context
from tensorboard.data.provider import DataProvider, RunTagFilter

from telemetry.plugin_data.sources import Point

_ALL = 10**9  # 0 would mean none
_CONTEXT = context.RequestContext()


def list_runs(provider: DataProvider, experiment: str, plugin_name: str) -> dict[str, int]:
    """The runs that have data of a plugin, each with the last step of it."""
    listing = provider.list_tensors(_CONTEXT, experiment_id=experiment, plugin_name=plugin_name)
    return {
        run: max(series.max_step for series in tags.values())
        for run, tags in listing.items()
        if tags
    }


class ProviderSource:
    """One run of one experiment.

    Args:
        provider: TensorBoard's.
        experiment: Its id; empty with local files.
        run: The run's name.
    """

    def __init__(self, provider: DataProvider, experiment: str, run: str) -> None:
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
        if not tags:
            return {}
        found = self._provider.read_tensors(
            _CONTEXT,
            experiment_id=self._experiment,
            plugin_name=plugin_name,
            downsample=1 if sampled else _ALL,
            run_tag_filter=RunTagFilter(runs=[self._run], tags=tags),
        )
        return {
            tag: [_point(datum) for datum in data] for tag, data in found.get(self._run, {}).items()
        }

    def scalar_tags(self) -> Sequence[str]:
        listing = self._provider.list_scalars(
            _CONTEXT,
            experiment_id=self._experiment,
            plugin_name="scalars",
            run_tag_filter=RunTagFilter(runs=[self._run]),
        )
        return list(listing.get(self._run, {}))

    def read_scalars(self, tags: Sequence[str]) -> Mapping[str, Sequence[tuple[int, float]]]:
        if not tags:
            return {}
        found = self._provider.read_scalars(
            _CONTEXT,
            experiment_id=self._experiment,
            plugin_name="scalars",
            downsample=_ALL,
            run_tag_filter=RunTagFilter(runs=[self._run], tags=tags),
        )
        return {
            tag: [(datum.step, datum.value) for datum in data]
            for tag, data in found.get(self._run, {}).items()
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
                blob: bytes = self._provider.read_blob(_CONTEXT, blob_key=datum.values[2].blob_key)
                return blob
        return None

    def _images(self, tag: str) -> Sequence[Any]:
        found = self._provider.read_blob_sequences(
            _CONTEXT,
            experiment_id=self._experiment,
            plugin_name="images",
            downsample=_ALL,
            run_tag_filter=RunTagFilter(runs=[self._run], tags=[tag]),
        )
        data: Sequence[Any] = found.get(self._run, {}).get(tag, ())
        return data


def _point(datum: Any) -> Point:
    array = np.asarray(datum.numpy)
    is_text = array.dtype.kind in "OS"
    value = bytes(array.reshape(-1)[0]) if is_text and array.size else array
    return Point(step=datum.step, wall_time=datum.wall_time, value=value)

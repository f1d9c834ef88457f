"""Runs of TensorBoard: their directories, and their event files through its data provider."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tensorboard import context
from tensorboard.compat import tf
from tensorboard.data.provider import DataProvider, RunTagFilter

from telemetry.events.run_log import SUFFIX
from telemetry.plain_text import natural_key
from telemetry.reading.run import find_log_dirs
from telemetry.reading.run_data import RunData
from telemetry.reading.run_log import RunDirectory, log_names
from telemetry.reading.sources import Period, Problems

_ALL = 10**9  # all values of a tag; 0 would mean none
_CONTEXT = context.RequestContext()
# What tensor_util.make_ndarray raises if type, shape and content do not fit together.
_UNDECODABLE = (ValueError, TypeError, KeyError, OverflowError, MemoryError)

log = logging.getLogger(__name__)


def find_directories(flags: Any) -> dict[str, str]:
    """Return the directories with run logs by the names that TensorBoard gives their runs.

    ``flags`` are TensorBoard's: ``logdir``, or ``logdir_spec``, which is ``name:path,path``.
    """
    return {
        os.path.normpath(os.path.join(name, below)): folder
        for name, top in _log_dirs(flags)
        for below, folder in _folders(top)
    }


def _log_dirs(flags: Any) -> Iterator[tuple[str, str]]:
    if top := getattr(flags, "logdir", "") or "":
        yield "", top if "://" in top else os.path.expanduser(top)
    for one in (getattr(flags, "logdir_spec", "") or "").split(","):
        if one:
            name, colon, path = one.partition(":")
            is_named = colon and "/" not in name and not path.startswith("//")
            top = os.path.expanduser(path if is_named else one)
            yield name if is_named else "", top


def _folders(top: str) -> Iterator[tuple[str, str]]:
    """Yield the directories with run logs at and below ``top``, each after its path from there."""
    if "://" in top:
        for folder, _, names in tf.io.gfile.walk(top):
            if any(name.endswith(SUFFIX) for name in names):
                yield folder[len(top) :].strip("/"), folder
        return
    with suppress(OSError):  # it may not exist yet
        for path in find_log_dirs(Path(top), is_log_dir=log_names):
            yield os.path.relpath(path, top), str(path)


class Runs:
    """All runs below TensorBoard's log directory, read from their run logs.

    A run is named as in TensorBoard; an earlier one in the same directory ``name@id``.
    """

    def __init__(self, provider: DataProvider, flags: Any) -> None:
        self._provider, self._flags = provider, flags
        self._lock = threading.Lock()
        self._folders: dict[str, str] = {}  # directories by name
        self._directories: dict[str, RunDirectory] = {}  # by path
        self._runs: dict[tuple[str, str, str], RunData] = {}

    def exist(self) -> bool:
        """Whether there is a run."""
        tops = (top for _, top in _log_dirs(self._flags))
        return bool(self._folders) or any(True for top in tops for _ in _folders(top))

    def all(self, experiment: str) -> dict[str, RunData]:
        """Return all runs by name, the newest first; those of one start by name."""
        found: dict[str, RunData] = {}
        with self._lock:
            self._folders = find_directories(self._flags)
            for name in self._folders:
                found |= self._of(experiment, name)
            kept = set(self._folders.values())
            self._directories = {p: d for p, d in self._directories.items() if p in kept}
            self._runs = {key: run for key, run in self._runs.items() if key[1] in kept}
        started_s = {name: run.overview().started_s or 0.0 for name, run in found.items()}
        order = sorted(found, key=lambda name: (-started_s[name], natural_key(name)))
        return {name: found[name] for name in order}

    def one(self, experiment: str, name: str) -> RunData | None:
        """Return a run; None if it does not exist, or does not exist any more."""
        bases = [name, name.rpartition("@")[0]]
        with self._lock:
            if not any(base in self._folders for base in bases):
                self._folders = find_directories(self._flags)
            found: dict[str, RunData] = {}
            for base in bases:
                if base in self._folders:
                    found |= self._of(experiment, base)
        return found.get(name)

    def _of(self, experiment: str, name: str) -> dict[str, RunData]:
        """Return the runs in a directory; none if it was deleted."""
        folder = self._folders[name]
        if folder not in self._directories:
            report = partial(log.warning, "telemetry: run %r: %s", name)
            self._directories[folder] = RunDirectory(folder, Problems(report))
        directory = self._directories[folder]
        directory.refresh()
        found, ids = dict[str, RunData](), [*directory.runs()]
        if directory.newer is not None and not ids:
            ids = [""]
        for run in ids:
            key = experiment, folder, run
            if key not in self._runs:
                source = ProviderSource(self._provider, experiment, name)
                self._runs[key] = RunData(directory, run, source)
            found[name if run == ids[-1] else f"{name}@{run}"] = self._runs[key]
        return found


class ProviderSource:
    """Event files of one run: a :class:`~telemetry.reading.sources.RunSource`; logs problems."""

    def __init__(self, provider: DataProvider, experiment: str, run: str) -> None:
        self.problems = Problems(lambda line: log.warning("telemetry: run %r: %s", run, line))
        self.period = Period()
        self._provider = provider
        self._experiment = experiment
        self._run = run

    def tags(self, plugin_name: str) -> Collection[str]:
        found: Mapping[str, Mapping[str, Any]] = self._methods(plugin_name)[0](
            _CONTEXT,
            experiment_id=self._experiment,
            plugin_name=plugin_name,
            run_tag_filter=RunTagFilter(runs=[self._run]),
        )
        # The slow loader also lists tags whose values a resumed run has all purged, without a step.
        series = found.get(self._run, {})
        return [tag for tag, of_tag in series.items() if of_tag.max_step is not None]

    def read(
        self, plugin_name: str, tags: Sequence[str]
    ) -> Mapping[str, Sequence[tuple[int, Any]]]:
        read: dict[str, list[tuple[int, Any]]] = {}
        for tag, data in self._read(plugin_name, tags).items():
            if plugin_name == "images":
                read[tag] = [(datum.step, None) for datum in data]
            elif plugin_name == "scalars":
                # The slow loader also lists a text as a scalar.
                read[tag] = [(d.step, d.value) for d in data if isinstance(d.value, (int, float))]
                if len(read[tag]) < len(data):
                    self.problems.add(f"some of {tag}", "not a number")
            else:
                read[tag] = [(datum.step, np.asarray(datum.numpy)) for datum in data]
        return read

    def picture(self, tag: str, step: int) -> bytes | None:
        for datum in self._read("images", [tag]).get(tag, ()):
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

    def _read(self, plugin_name: str, tags: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        """Return the values of the run's time, without those that cannot be decoded."""
        if not tags:
            return {}
        reason: object
        try:
            found: Mapping[str, Mapping[str, Sequence[Any]]] = self._methods(plugin_name)[1](
                _CONTEXT,
                experiment_id=self._experiment,
                plugin_name=plugin_name,
                downsample=_ALL,
                run_tag_filter=RunTagFilter(runs=[self._run], tags=set(tags)),
            )
            of_tags = found.get(self._run, {}).items()
            return {
                tag: [d for d in data if self.period.holds(d.wall_time)] for tag, data in of_tags
            }
        except _UNDECODABLE as error:
            reason = error
        except grpc.RpcError as error:  # such as: too large for a message
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
            reason = error.details()
        if len(tags) == 1:
            self.problems.add(tags[0], reason)
            return {}
        half = len(tags) // 2
        return {**self._read(plugin_name, tags[:half]), **self._read(plugin_name, tags[half:])}

    def _methods(self, plugin_name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        provider = self._provider
        if plugin_name == "scalars":
            return provider.list_scalars, provider.read_scalars
        if plugin_name == "images":
            return provider.list_blob_sequences, provider.read_blob_sequences
        return provider.list_tensors, provider.read_tensors

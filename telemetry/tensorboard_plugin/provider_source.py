"""Runs of TensorBoard: their directories, and their event files through its data provider."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tensorboard import context
from tensorboard.compat import tf
from tensorboard.data.provider import DataProvider, RunTagFilter

from telemetry.plain_text import natural_key
from telemetry.reading.run import find_log_dirs
from telemetry.reading.run_data import RunData
from telemetry.reading.run_log import RunDirectory, is_run_log
from telemetry.reading.sources import UNDECODABLE, Period, Problems

_ALL = 10**9  # all values of a tag; 0 would mean none
_CONTEXT = context.RequestContext()
_EXPERIMENT = ""  # that of a local log directory

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
            if any(map(is_run_log, names)):
                yield folder[len(top) :].strip("/"), folder
        return
    with suppress(OSError):  # it may not exist yet
        for path in find_log_dirs(Path(top), is_of_run=is_run_log):
            yield os.path.relpath(path, top), str(path)


class Runs:
    """All runs below TensorBoard's log directory, read by one thread at a time.

    A run is named as in TensorBoard; an earlier one in the same directory ``name@id``.
    """

    def __init__(self, provider: DataProvider, flags: Any) -> None:
        self._provider, self._flags = provider, flags
        self._folders: dict[str, str] = {}  # directories by name
        self._directories: dict[str, RunDirectory] = {}  # by path
        self._runs: dict[tuple[str, str], RunData] = {}  # by path of the directory, and id

    def exist(self) -> bool:
        """Whether there is a run; any thread may ask."""
        tops = (top for _, top in _log_dirs(self._flags))
        return bool(self._folders) or any(True for top in tops for _ in _folders(top))

    def all(self) -> dict[str, RunData]:
        """Return all runs by name, the newest first; those of one start by name."""
        self._folders = find_directories(self._flags)
        found: dict[str, RunData] = {}
        for name in self._folders:
            found |= self._of(name)
        kept = set(self._folders.values())
        self._directories = {p: d for p, d in self._directories.items() if p in kept}
        self._runs = {key: run for key, run in self._runs.items() if key[0] in kept}
        order = sorted(found, key=lambda n: (-(found[n].started_s or 0.0), natural_key(n)))
        return {name: found[name] for name in order}

    def one(self, name: str) -> RunData | None:
        """Return a run; None if it does not exist, or does not exist any more."""
        bases = [name, name.rpartition("@")[0]]
        if not any(base in self._folders for base in bases):
            self._folders = find_directories(self._flags)
        found: dict[str, RunData] = {}
        for base in bases:
            if base in self._folders:
                found |= self._of(base)
        return found.get(name)

    def _of(self, name: str) -> dict[str, RunData]:
        """Return the runs in a directory, as of now; none if it was deleted."""
        folder = self._folders[name]
        if (directory := self._directories.get(folder)) is None:
            report = partial(log.warning, "telemetry: run %r: %s", name)
            directory = self._directories[folder] = RunDirectory(folder, Problems(report))
        else:
            directory.refresh()
        # A directory without a readable run is listed, too: its data is the reason.
        ids = [*directory.runs] or [""] * any(True for _ in directory.problems)
        for run in ids:
            if (folder, run) not in self._runs:
                source = ProviderSource(self._provider, name)
                self._runs[folder, run] = RunData(directory, run, source)
            self._runs[folder, run].update()
        return {name if run == ids[-1] else f"{name}@{run}": self._runs[folder, run] for run in ids}


class ProviderSource:
    """Event files of one run: a :class:`~telemetry.reading.sources.RunSource`; logs problems."""

    def __init__(self, provider: DataProvider, run: str) -> None:
        self.problems = Problems(lambda line: log.warning("telemetry: run %r: %s", run, line))
        self.period = Period()
        self._provider = provider
        self._run = run

    def tags(self, plugin_name: str) -> Collection[str]:
        found = self._call("list", plugin_name)
        # The slow loader also lists tags whose values a resumed run has all purged, without a step.
        return [tag for tag, of_tag in found.items() if of_tag.max_step is not None]

    def read(
        self, plugin_name: str, tags: Sequence[str]
    ) -> Mapping[str, Sequence[tuple[int, Any]]]:
        read: dict[str, list[tuple[int, Any]]] = {}
        for tag in tags:
            data = self._data(plugin_name, tag)
            if plugin_name == "images":
                read[tag] = [(datum.step, None) for datum in data]
            elif plugin_name == "scalars":
                # The slow loader also lists a text as a scalar.
                read[tag] = [(d.step, d.value) for d in data if isinstance(d.value, (int, float))]
                if len(read[tag]) < len(data):
                    self.problems.add(f"some of {tag}", "not a number")
            else:
                read[tag] = [(datum.step, np.asarray(datum.numpy)) for datum in data]
        return {tag: series for tag, series in read.items() if series}

    def picture(self, tag: str, step: int) -> bytes | None:
        for datum in self._data("images", tag):
            # The first two blobs are the picture's width and height.
            if datum.step == step and len(datum.values) > 2:
                key = datum.values[2].blob_key
                try:
                    blob = self._provider.read_blob(_CONTEXT, blob_key=key)
                except UNDECODABLE as error:
                    self.problems.add(tag, error)
                    return None
                return blob if isinstance(blob, bytes) else None
        return None

    def _data(self, plugin_name: str, tag: str) -> Sequence[Any]:
        """Return the values of a tag from the run's time; none if they cannot be decoded."""
        reason: object
        try:
            found = self._call("read", plugin_name, tags={tag}, downsample=_ALL)
            return [datum for datum in found.get(tag, ()) if self.period.holds(datum.wall_time)]
        except UNDECODABLE as error:
            reason = error
        except grpc.RpcError as error:  # such as: too large for a message
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
            reason = error.details()
        self.problems.add(tag, reason)
        return []

    def _call(
        self, verb: str, plugin_name: str, tags: Collection[str] | None = None, **options: Any
    ) -> Mapping[str, Any]:
        """Return what the provider lists or reads of the run, by tag."""
        kind = {"scalars": "scalars", "images": "blob_sequences"}.get(plugin_name, "tensors")
        found: Mapping[str, Mapping[str, Any]] = getattr(self._provider, f"{verb}_{kind}")(
            _CONTEXT,
            experiment_id=_EXPERIMENT,
            plugin_name=plugin_name,
            run_tag_filter=RunTagFilter(runs=[self._run], tags=tags),
            **options,
        )
        return found.get(self._run, {})

"""Runs and the run table, read through TensorBoard's data provider, with either of its loaders."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from tensorboard import context
from tensorboard.data.provider import DataProvider, RunTagFilter
from tensorboard.plugins.hparams import metadata

from telemetry.events.page_format import PLUGIN_NAME
from telemetry.reading.builtin_tags import loss_of, metrics_among
from telemetry.reading.run_entry import RunEntry, loss_summary, run_entry
from telemetry.reading.sources import Problems

ALL = 10**9  # all values of a tag; 0 would mean none
_CONTEXT = context.RequestContext()
# What tensor_util.make_ndarray raises if type, shape and content do not fit together.
_UNDECODABLE = (ValueError, TypeError, KeyError, OverflowError, MemoryError)

log = logging.getLogger(__name__)


def list_tags(
    provider: DataProvider, experiment: str, plugin_name: str, run: str | None = None
) -> Mapping[str, Mapping[str, Any]]:
    """Return the listing of a plugin's tags with values, by run; of one run or of all."""
    found: Mapping[str, Mapping[str, Any]] = _methods(provider, plugin_name)[0](
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


def read_tags(
    provider: DataProvider,
    experiment: str,
    plugin_name: str,
    wanted: Mapping[str, Sequence[str]],
    most: int = ALL,
    problems: Problems | None = None,
) -> dict[str, dict[str, Sequence[Any]]]:
    """Return at most ``most`` values of each tag, without those that cannot be decoded.

    ``wanted`` has tags by run; another run's tag of the same name may come along. Values that
    cannot be decoded go to ``problems``, else to the log.
    """
    if not any(wanted.values()):
        return {}
    named = {tag for tags in wanted.values() for tag in tags}
    reason: object
    try:
        found: Mapping[str, Mapping[str, Sequence[Any]]] = _methods(provider, plugin_name)[1](
            _CONTEXT,
            experiment_id=experiment,
            plugin_name=plugin_name,
            downsample=most,
            run_tag_filter=RunTagFilter(runs=list(wanted), tags=named),
        )
        return {run: dict(data) for run, data in found.items()}
    except _UNDECODABLE as error:
        reason = error
    except grpc.RpcError as error:  # such as: too large for a message
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise
        reason = error.details()
    pairs = [(run, tag) for run, tags in wanted.items() for tag in tags]
    if len(pairs) == 1:
        [(run, tag)] = pairs
        if problems is None:
            log.warning("telemetry: run %r: %s", run, reason)
        else:
            problems.add(tag, reason)
        return {}
    joined: dict[str, dict[str, Sequence[Any]]] = defaultdict(dict)
    for half in pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]:
        part = {run: [tag for of, tag in half if of == run] for run, _ in half}
        read = read_tags(provider, experiment, plugin_name, part, most, problems)
        for run, data in read.items():
            joined[run].update(data)
    return joined


def _methods(
    provider: DataProvider, plugin_name: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if plugin_name == "scalars":
        return provider.list_scalars, provider.read_scalars
    if plugin_name == "images":
        return provider.list_blob_sequences, provider.read_blob_sequences
    return provider.list_tensors, provider.read_tensors


class ProviderSource:
    """One run of an experiment, a :class:`~telemetry.reading.sources.RunSource`; logs problems."""

    def __init__(self, provider: DataProvider, experiment: str, run: str) -> None:
        self.problems = Problems(lambda line: log.warning("telemetry: run %r: %s", run, line))
        self._provider = provider
        self._experiment = experiment
        self._run = run

    def tags(self, plugin_name: str) -> Mapping[str, int]:
        listing = list_tags(self._provider, self._experiment, plugin_name, self._run)
        return {tag: series.max_step for tag, series in listing.get(self._run, {}).items()}

    def read(
        self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False
    ) -> Mapping[str, Sequence[tuple[int, Any]]]:
        read: dict[str, list[tuple[int, Any]]] = {}
        for tag, data in self._read(plugin_name, tags, 1 if sampled else ALL).items():
            if plugin_name == "images":
                read[tag] = [(datum.step, None) for datum in data]
            elif plugin_name == "scalars":
                # The slow loader also lists a text as a scalar.
                read[tag] = [(d.step, d.value) for d in data if isinstance(d.value, (int, float))]
                if len(read[tag]) < len(data):
                    self.problems.add(f"some of {tag}", "not a number")
            else:
                read[tag] = [(datum.step, content_of(datum)) for datum in data]
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

    def _read(
        self, plugin_name: str, tags: Sequence[str], most: int = ALL
    ) -> Mapping[str, Sequence[Any]]:
        wanted = {self._run: tags}
        found = read_tags(
            self._provider, self._experiment, plugin_name, wanted, most, self.problems
        )
        return found.get(self._run, {})


def content_of(datum: Any) -> Any:
    """Return the array in a tensor, or the ``bytes`` of its first text."""
    array = np.asarray(datum.numpy)
    if array.dtype.kind not in "OSU" or not array.size:
        return array
    text = array.reshape(-1)[0]
    return text.encode() if isinstance(text, str) else text


def list_runs(provider: DataProvider, experiment: str) -> list[RunEntry]:
    """Return the runs with data for the page, the newest first, those of one start by name."""
    listing = list_tags(provider, experiment, PLUGIN_NAME)
    entries = [run_entry(name, tags) for name, tags in listing.items() if tags]
    return sorted(entries, key=lambda entry: entry.order)


def read_hparams_content(provider: DataProvider, experiment: str, run: str) -> bytes | None:
    """Return the hyperparameters of a run as TensorBoard keeps them; None without any."""
    return _hparams_in(list_tags(provider, experiment, metadata.PLUGIN_NAME, run).get(run, {}))


def _hparams_in(tags: Mapping[str, Any]) -> bytes | None:
    return getattr(tags.get(metadata.SESSION_START_INFO_TAG), "plugin_content", None)


class RunTable:
    """Rows of the page's run table; scalars of runs that have not grown are kept."""

    def __init__(self, provider: DataProvider) -> None:
        self._provider = provider
        self._losses = _ReadScalars(provider, _loss)
        self._metrics = _ReadScalars(
            provider, lambda read: {tag: d[-1].value for tag, d in read.items() if d}, most=1
        )

    def rows(self, experiment: str, now_s: float) -> list[dict[str, Any]]:
        """Return an object per run, newest first; ``now_s`` in seconds since the epoch."""
        entries = list_runs(self._provider, experiment)
        wanted = {entry.name: entry.texts for entry in entries if entry.texts}
        texts = read_tags(self._provider, experiment, PLUGIN_NAME, wanted, 1)
        hparams = list_tags(self._provider, experiment, metadata.PLUGIN_NAME)
        scalars = list_tags(self._provider, experiment, "scalars")
        listed = {e.name: scalars[e.name] for e in entries if e.name in scalars}
        loss_tags = {
            e.name: loss_of(scalars[e.name], e.loss_tag) for e in entries if e.name in listed
        }
        losses = self._losses.read(
            experiment, {run: {tag: listed[run][tag]} for run, tag in loss_tags.items() if tag}
        )
        metrics = self._metrics.read(
            experiment,
            {
                run: {tag: tags[tag] for tag in metrics_among(tags, loss_tags[run])}
                for run, tags in listed.items()
            },
        )
        return [
            entry.row(
                now_s,
                {t: content_of(d[-1]) for t, d in texts.get(entry.name, {}).items() if d},
                _hparams_in(hparams.get(entry.name, {})),
                losses.get(entry.name),
            )
            | {"metrics": metrics.get(entry.name, {})}
            for entry in entries
        ]


class _ReadScalars:
    """Figures of each run's scalars, which are read again only after they have grown."""

    def __init__(
        self,
        provider: DataProvider,
        figures_of: Callable[[Mapping[str, Sequence[Any]]], dict[str, Any]],
        *,
        most: int = ALL,  # points of each tag
    ) -> None:
        self._provider, self._figures_of, self._most = provider, figures_of, most
        # By experiment and run: the listing at the last reading, and the figures.
        self._known: dict[tuple[str, str], tuple[object, dict[str, Any]]] = {}

    def read(
        self, experiment: str, listed: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, dict[str, Any]]:
        """Return the figures by run; ``listed`` has the series of the tags of each run."""
        states = {
            run: [(tag, series.max_step, series.max_wall_time) for tag, series in tags.items()]
            for run, tags in listed.items()
        }
        known = {run: self._known.get((experiment, run), (None,))[0] for run in states}
        stale = {run: [*listed[run]] for run, state in states.items() if known[run] != state}
        found = read_tags(self._provider, experiment, "scalars", stale, self._most)
        for run, tags in stale.items():
            points = {tag: found.get(run, {}).get(tag, ()) for tag in tags}
            self._known[experiment, run] = states[run], self._figures_of(points)
        return {run: self._known[experiment, run][1] for run in states}


def _loss(points: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    ((tag, data),) = points.items()
    return loss_summary(tag, [datum.value for datum in data])

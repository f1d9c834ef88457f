"""Rows of the page's run table, from TensorBoard's server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tensorboard.data.provider import DataProvider
from tensorboard.plugins.hparams import metadata

from telemetry.events.page_format import PLUGIN_NAME
from telemetry.reading.builtin_tags import loss_of, metrics_among
from telemetry.reading.run_entry import RunEntry, loss_summary, run_entry
from telemetry.tensorboard_plugin.provider_source import ALL, content_of, list_tags, read_tags

Figures = TypeVar("Figures")


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
    def __init__(self, provider: DataProvider) -> None:
        self._provider = provider
        self._losses = _ReadScalars(provider, _loss)
        self._metrics = _ReadScalars(provider, _last_values, most=1)

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


class _ReadScalars(Generic[Figures]):
    """Figures of each run's scalars, which are read again only after they have grown.

    ``most`` is the number of points of each tag; by default, all that TensorBoard keeps.
    """

    def __init__(
        self,
        provider: DataProvider,
        figures_of: Callable[[Mapping[str, Sequence[Any]]], Figures],
        *,
        most: int = ALL,
    ) -> None:
        self._provider, self._figures_of, self._most = provider, figures_of, most
        # By experiment and run: the listing at the last reading, and the figures.
        self._known: dict[tuple[str, str], tuple[object, Figures]] = {}
        self._lock = threading.Lock()

    def read(
        self, experiment: str, listed: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, Figures]:
        """Return the figures by run; ``listed`` has the series of the tags of each run."""
        states = {
            run: [(tag, series.max_step, series.max_wall_time) for tag, series in tags.items()]
            for run, tags in listed.items()
        }
        with self._lock:
            known = {run: self._known.get((experiment, run), (None,))[0] for run in states}
        stale = {run: [*listed[run]] for run, state in states.items() if known[run] != state}
        found = read_tags(self._provider, experiment, "scalars", stale, self._most)
        with self._lock:
            for run, tags in stale.items():
                points = {tag: found.get(run, {}).get(tag, ()) for tag in tags}
                self._known[experiment, run] = states[run], self._figures_of(points)
            return {run: self._known[experiment, run][1] for run in states}


def _loss(points: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    ((tag, data),) = points.items()
    return loss_summary(tag, [datum.value for datum in data])


def _last_values(points: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    return {tag: data[-1].value for tag, data in points.items() if data}

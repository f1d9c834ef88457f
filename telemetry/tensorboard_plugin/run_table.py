"""Rows of the page's run table, from TensorBoard's server."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from tensorboard.data.provider import DataProvider
from tensorboard.plugins.hparams import metadata

from telemetry.events.page_format import PLUGIN_NAME
from telemetry.reading.builtin_tags import loss_of, metrics_among
from telemetry.reading.run_entry import RunEntry, loss_summary, run_entry
from telemetry.tensorboard_plugin.provider_source import content_of, list_tags, read_tags


def list_runs(provider: DataProvider, experiment: str) -> list[RunEntry]:
    """Return the runs with data for the page, the newest first, those of one start by name."""
    listing = list_tags(provider, experiment, PLUGIN_NAME)
    entries = [run_entry(name, tags) for name, tags in listing.items() if tags]
    return sorted(entries, key=lambda entry: entry.order)


def read_hparams_content(provider: DataProvider, experiment: str, run: str) -> bytes | None:
    """Return the hyperparameters of a run as TensorBoard keeps them; None without any."""
    listing = list_tags(provider, experiment, metadata.PLUGIN_NAME, run).get(run, {})
    found: bytes | None = getattr(
        listing.get(metadata.SESSION_START_INFO_TAG), "plugin_content", None
    )
    return found


class RunTable:
    """Table of all runs; scalars are read again only after they have grown."""

    def __init__(self, provider: DataProvider) -> None:
        self._provider = provider
        # By experiment and run: the listing at the last reading, and the result.
        self._losses: dict[tuple[str, str], tuple[object, dict[str, Any]]] = {}
        self._metrics: dict[tuple[str, str], tuple[object, dict[str, float]]] = {}
        self._lock = threading.Lock()

    def rows(self, experiment: str, now_s: float) -> list[dict[str, Any]]:
        """Return an object per run, newest first; ``now_s`` in seconds since the epoch."""
        entries = list_runs(self._provider, experiment)
        wanted = {entry.name: entry.texts for entry in entries if entry.texts}
        texts = read_tags(self._provider, experiment, PLUGIN_NAME, wanted, 1)
        hparams = list_tags(self._provider, experiment, metadata.PLUGIN_NAME)
        scalars = list_tags(self._provider, experiment, "scalars")
        chosen = {entry.name: entry.loss_tag for entry in entries}
        losses = self._read_losses(experiment, scalars, chosen)
        metrics = self._read_metrics(experiment, scalars, chosen)
        return [
            entry.row(
                now_s,
                {t: content_of(d[-1]) for t, d in texts.get(entry.name, {}).items() if d},
                getattr(found, "plugin_content", None),
                losses.get(entry.name),
            )
            | {"metrics": metrics.get(entry.name, {})}
            for entry in entries
            for found in [hparams.get(entry.name, {}).get(metadata.SESSION_START_INFO_TAG)]
        ]

    def _read_metrics(
        self,
        experiment: str,
        listing: Mapping[str, Mapping[str, Any]],
        chosen: Mapping[str, str | None],
    ) -> Mapping[str, dict[str, float]]:
        """Return the last value of each metric that the user logged, by run."""
        states: dict[str, tuple[tuple[str, object, object], ...]] = {}
        for run in chosen.keys() & listing.keys():
            tags = metrics_among(listing[run], loss_of(listing[run], chosen[run]))
            of = [(tag, listing[run][tag]) for tag in tags]
            states[run] = tuple([(tag, s.max_step, s.max_wall_time) for tag, s in of])
        with self._lock:
            known = {run: self._metrics.get((experiment, run), (None,))[0] for run in states}
        stale = {run: [tag for tag, *_ in s] for run, s in states.items() if known[run] != s}
        found = read_tags(self._provider, experiment, "scalars", stale, 1)
        with self._lock:
            for run, tags in stale.items():
                data = found.get(run, {})
                last = {tag: data[tag][-1].value for tag in tags if data.get(tag)}
                self._metrics[experiment, run] = states[run], last
            return {run: self._metrics[experiment, run][1] for run in states}

    def _read_losses(
        self,
        experiment: str,
        listing: Mapping[str, Mapping[str, Any]],
        chosen: Mapping[str, str | None],
    ) -> Mapping[str, dict[str, Any]]:
        """Return tag, last and smallest loss of each run that has one.

        ``chosen`` holds the tags that the runs themselves name.
        """
        states = {}
        for run in chosen.keys() & listing.keys():
            if (tag := loss_of(listing[run], chosen[run])) is not None:
                series = listing[run][tag]
                states[run] = tag, series.max_step, series.max_wall_time
        with self._lock:
            known = {run: self._losses.get((experiment, run), (None,))[0] for run in states}
        stale = {run: [state[0]] for run, state in states.items() if known[run] != state}
        found = read_tags(self._provider, experiment, "scalars", stale)
        with self._lock:
            for run, (tag,) in stale.items():
                data = found.get(run, {}).get(tag, ())
                summary = loss_summary(tag, [datum.value for datum in data])
                self._losses[experiment, run] = states[run], summary
            return {run: self._losses[experiment, run][1] for run in states}

"""The run table of the page, from TensorBoard's server."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from tensorboard.data.provider import DataProvider
from tensorboard.plugins.hparams import metadata

from telemetry.events.page_format import PLUGIN_NAME
from telemetry.reading.builtin_tags import loss_of
from telemetry.reading.run_table import RunEntry, loss_summary, run_entry
from telemetry.tensorboard_plugin.provider_source import content_of, list_tags, read_tags


def list_runs(provider: DataProvider, experiment: str) -> list[RunEntry]:
    """The runs with data for the page: the newest first, those of one start in natural order."""
    listing = list_tags(provider, experiment, PLUGIN_NAME)
    entries = [run_entry(name, tags) for name, tags in listing.items() if tags]
    return sorted(entries, key=lambda entry: entry.order)


class RunTable:
    """Makes the table; losses are read again only where they have grown."""

    def __init__(self, provider: DataProvider) -> None:
        self._provider = provider
        # By experiment and run: what was listed when the loss was read, and what was found.
        self._losses: dict[tuple[str, str], tuple[object, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def rows(self, experiment: str, now_s: float) -> list[dict[str, Any]]:
        """One object per run, newest first, for the page; ``now_s`` in seconds since the epoch."""
        entries = list_runs(self._provider, experiment)
        wanted = {entry.name: entry.texts for entry in entries if entry.texts}
        texts = read_tags(self._provider, experiment, PLUGIN_NAME, wanted, 1)
        hparams = list_tags(self._provider, experiment, metadata.PLUGIN_NAME)
        losses = self._read_losses(experiment, {entry.name: entry.loss_tag for entry in entries})
        return [
            entry.row(
                now_s,
                {t: content_of(d[-1]) for t, d in texts.get(entry.name, {}).items() if d},
                getattr(found, "plugin_content", None),
                losses.get(entry.name),
            )
            for entry in entries
            for found in [hparams.get(entry.name, {}).get(metadata.SESSION_START_INFO_TAG)]
        ]

    def _read_losses(
        self, experiment: str, chosen: Mapping[str, str | None]
    ) -> Mapping[str, dict[str, Any]]:
        """Tag, last and smallest loss of each run that has one; ``chosen`` as written into it."""
        listing = list_tags(self._provider, experiment, "scalars")
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

"""All runs with what tells them apart: status, loss, first alert, hyperparameters."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.data.provider import DataProvider
from tensorboard.plugins.hparams import error as hparams_error
from tensorboard.plugins.hparams import metadata

from telemetry.alert import Alert
from telemetry.page_format import PLUGIN_NAME, decode_alert, decode_end
from telemetry.reading.builtin_tags import loss_of
from telemetry.reading.run_list import RunEntry
from telemetry.tensorboard_plugin.provider_source import (
    list_all_runs,
    list_series,
    read_runs,
    text_of,
)

_MAX_ALERTS = 8
"""Alerts of a run that are read to find the first that is more than a note."""
_MAX_HPARAMS = 1000
_MAX_TEXT = 200

_Loss = tuple[object, dict[str, Any]]


class RunTable:
    """Makes the table; losses are read again only where they have grown.

    Args:
        provider: TensorBoard's data provider.
    """

    def __init__(self, provider: DataProvider) -> None:
        self._provider = provider
        self._losses: dict[tuple[str, str], _Loss] = {}
        self._lock = threading.Lock()

    def rows(self, experiment: str, now_s: float) -> list[dict[str, Any]]:
        """One object per run, newest first, for the page.

        Args:
            experiment: The experiment's id; empty for local files.
            now_s: Seconds since the epoch.
        """
        entries = list_all_runs(self._provider, experiment)
        texts = self._texts(experiment, entries)
        hparams = list_series(self._provider.list_tensors, experiment, metadata.PLUGIN_NAME)
        losses = self._read_losses(experiment, {entry.name: entry.loss_tag for entry in entries})
        return [
            {
                "name": entry.name,
                "status": entry.status(now_s, _exception(entry, texts.get(entry.name, {}))),
                "lastStep": entry.last_step,
                "started": entry.started_s,
                "written": entry.written_s,
                "loss": losses.get(entry.name),
                "alertCount": len(entry.alert_tags),
                "alert": _first_alert(entry, texts.get(entry.name, {})),
                "hparams": dict(_hparams(hparams.get(entry.name, {}))),
            }
            for entry in entries
        ]

    def _texts(
        self, experiment: str, entries: Sequence[RunEntry]
    ) -> Mapping[str, Mapping[str, bytes]]:
        """The first alerts and the end of each run, by run and tag."""
        wanted = {
            entry.name: [*entry.alert_tags[:_MAX_ALERTS], *filter(None, [entry.end_tag])]
            for entry in entries
        }
        read = self._provider.read_tensors
        found = read_runs(read, experiment, PLUGIN_NAME, _without_empty(wanted), 1)
        return {
            run: {tag: text_of(data[-1]) for tag, data in tags.items() if data}
            for run, tags in found.items()
        }

    def _read_losses(
        self, experiment: str, chosen: Mapping[str, str | None]
    ) -> Mapping[str, dict[str, Any]]:
        """Tag, last and smallest loss of each run that has one; ``chosen`` as written into it."""
        listing = list_series(self._provider.list_scalars, experiment, "scalars")
        states = {}
        for run in chosen.keys() & listing.keys():
            if (tag := loss_of(listing[run], chosen[run])) is not None:
                series = listing[run][tag]
                states[run] = tag, series.max_step, series.max_wall_time
        with self._lock:
            known = {run: self._losses.get((experiment, run)) for run in states}
        stale = {
            run: [state[0]]
            for run, state in states.items()
            if (old := known[run]) is None or old[0] != state
        }
        read: Callable[..., Any] = self._provider.read_scalars
        found = read_runs(read, experiment, "scalars", stale)
        with self._lock:
            for run, (tag,) in stale.items():
                summary = _loss(tag, found.get(run, {}).get(tag, ()))
                self._losses[experiment, run] = states[run], summary
            return {run: self._losses[experiment, run][1] for run in states}


def _without_empty(wanted: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    return {run: tags for run, tags in wanted.items() if tags}


def _loss(tag: str, data: Sequence[Any]) -> dict[str, Any]:
    values = np.array([d.value for d in data if isinstance(d.value, (int, float))], np.float64)
    finite = values[np.isfinite(values)]
    return {
        "tag": tag,
        "last": float(values[-1]) if values.size else math.nan,
        "best": float(finite.min()) if finite.size else math.nan,
    }


def _exception(entry: RunEntry, texts: Mapping[str, bytes]) -> str | None:
    text = texts.get(entry.end_tag or "", b"")
    try:
        return decode_end(text)
    except ValueError:
        return None


def _first_alert(entry: RunEntry, texts: Mapping[str, bytes]) -> dict[str, Any] | None:
    """The first alert that is more than a note; else the first note."""
    alerts = list(_alerts(entry, texts))
    found = next((alert for alert in alerts if alert.severity != "note"), next(iter(alerts), None))
    if found is None:
        return None
    return {
        "kind": found.kind,
        "severity": found.severity,
        "step": found.step,
        "module_name": found.module_name,
    }


def _alerts(entry: RunEntry, texts: Mapping[str, bytes]) -> Iterator[Alert]:
    for tag in entry.alert_tags[:_MAX_ALERTS]:
        try:
            yield decode_alert(texts.get(tag, b""))
        except ValueError:
            continue  # the run's own page tells it


def _hparams(tags: Mapping[str, Any]) -> Iterator[tuple[str, str | float | bool]]:
    series = tags.get(metadata.SESSION_START_INFO_TAG)
    if series is None:
        return
    try:
        found = metadata.parse_session_start_info_plugin_data(series.plugin_content)
    except (DecodeError, hparams_error.HParamsError):
        return
    for name, value in sorted(found.hparams.items())[:_MAX_HPARAMS]:
        kind = value.WhichOneof("kind")
        if kind in ("number_value", "bool_value"):
            yield name[:_MAX_TEXT], getattr(value, kind)
        elif kind == "string_value":
            yield name[:_MAX_TEXT], value.string_value[:_MAX_TEXT]

"""All runs with what tells them apart: status, loss, first alert, hyperparameters."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.data.provider import DataProvider
from tensorboard.plugins.hparams import error as hparams_error
from tensorboard.plugins.hparams import metadata

from telemetry.alert import Alert
from telemetry.reading.builtin_tags import loss_of
from telemetry.reading.log_dirs import natural_key
from telemetry.reading.sessions import Sessions, session_of
from telemetry.shared.page_format import (
    ALERT_PREFIX,
    LAYOUT_PREFIX,
    PLUGIN_NAME,
    chosen_loss,
    decode_alert,
    decode_end,
    end_tag,
    parse_chunk,
    session_start_s,
)
from telemetry.tensorboard_plugin.provider_source import content_of, list_tags, read_tags

# A run that is still going writes at least every few seconds, but it may pause to validate.
_SILENT_S = 300.0
_SILENT_STEPS = 50

# Alerts of a run that are read to find the first that is more than a note.
_MAX_ALERTS = 8
_MAX_HPARAMS = 1000
_MAX_TEXT = 200


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """What the tags of a run alone tell of it. Times are in seconds since the epoch."""

    name: str
    last_step: int  # with data that counts
    started_s: float  # when its newest session began
    written_s: float
    step_s: float  # seconds per step, of the newest session; 0 if unknown
    alert_tags: tuple[str, ...]  # of the alerts that count, by step
    loss_tag: str | None
    end_tag: str | None  # how the newest session was closed; None if it was not, or went on

    def status(
        self, now_s: float, exception: str | None = None
    ) -> Literal["live", "ended", "died"]:
        """Whether the training goes on; a run that was not closed and is silent has died.

        ``exception`` is what the training ended in, as its end says.
        """
        if self.end_tag is not None:
            return "ended" if exception is None else "died"
        silent_s = now_s - self.written_s
        return "live" if silent_s <= max(_SILENT_S, _SILENT_STEPS * self.step_s) else "died"


def list_runs(provider: DataProvider, experiment: str) -> list[RunEntry]:
    """The runs with data for the page: the newest first, those of one start in natural order."""
    listing = list_tags(provider, experiment, PLUGIN_NAME)
    entries = [run_entry(name, tags) for name, tags in listing.items() if tags]
    return sorted(entries, key=lambda entry: (-entry.started_s, natural_key(entry.name)))


def run_entry(name: str, tags: Mapping[str, Any]) -> RunEntry:
    """The run with these tags of the page's data, at least one, as TensorBoard lists them."""
    layouts = {tag: series for tag, series in tags.items() if tag.startswith(LAYOUT_PREFIX)}
    starts = [(session_of(tag, LAYOUT_PREFIX), series) for tag, series in layouts.items()]
    sessions = Sessions((session, series.max_step) for session, series in starts)
    lasts, alerts = [], []
    for tag, series in tags.items():
        if (chunk := parse_chunk(tag)) is not None:
            lasts.append(min(series.max_step, sessions.end_of(chunk.session) - 1))
        elif tag.startswith(ALERT_PREFIX):
            end = sessions.end_of(session_of(tag, ALERT_PREFIX))
            alerts += [(series.max_step, tag)] if series.max_step < end else []
    newest = max(sessions.begins, default="")
    first_step, last_step = sessions.begins.get(newest, 0), max(lasts, default=0)
    laid_out_s = [_time(series) for session, series in starts if session == newest]
    started_s, written_s = min(laid_out_s, default=0.0), max(map(_time, tags.values()))
    closed = tags.get(end_tag(newest))
    has_ended = closed is not None and closed.max_step >= last_step
    return RunEntry(
        name=name,
        last_step=last_step,
        started_s=session_start_s(newest) or started_s,
        written_s=written_s,
        step_s=max(0.0, written_s - started_s) / max(1, last_step - first_step),
        alert_tags=tuple(tag for _, tag in sorted(alerts)),
        loss_tag=chosen_loss(tags),
        end_tag=end_tag(newest) if has_ended else None,
    )


def _time(series: Any) -> float:
    time_s: float = series.max_wall_time
    return time_s if math.isfinite(time_s) else 0.0


class RunTable:
    """Makes the table; losses are read again only where they have grown.

    Args:
        provider: TensorBoard's data provider.
    """

    def __init__(self, provider: DataProvider) -> None:
        self._provider = provider
        # By experiment and run: what was listed when the loss was read, and what was found.
        self._losses: dict[tuple[str, str], tuple[object, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def rows(self, experiment: str, now_s: float) -> list[dict[str, Any]]:
        """One object per run, newest first, for the page.

        Args:
            experiment: The experiment's id; empty for local files.
            now_s: Seconds since the epoch.
        """
        entries = list_runs(self._provider, experiment)
        texts = self._texts(experiment, entries)
        hparams = list_tags(self._provider, experiment, metadata.PLUGIN_NAME)
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
    ) -> Mapping[str, Mapping[str, Any]]:
        """The first alerts and the end of each run, by run and tag."""
        wanted = {
            entry.name: [*entry.alert_tags[:_MAX_ALERTS], *filter(None, [entry.end_tag])]
            for entry in entries
        }
        wanted = {run: tags for run, tags in wanted.items() if tags}
        found = read_tags(self._provider, experiment, PLUGIN_NAME, wanted, 1)
        return {
            run: {tag: content_of(data[-1]) for tag, data in tags.items() if data}
            for run, tags in found.items()
        }

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
                summary = _loss(tag, found.get(run, {}).get(tag, ()))
                self._losses[experiment, run] = states[run], summary
            return {run: self._losses[experiment, run][1] for run in states}


def _loss(tag: str, data: Sequence[Any]) -> dict[str, Any]:
    values = np.array([d.value for d in data if isinstance(d.value, (int, float))], np.float64)
    finite = values[np.isfinite(values)]
    return {
        "tag": tag,
        "last": float(values[-1]) if values.size else math.nan,
        "best": float(finite.min()) if finite.size else math.nan,
    }


def _exception(entry: RunEntry, texts: Mapping[str, Any]) -> str | None:
    text = texts.get(entry.end_tag or "")
    with suppress(ValueError):
        return decode_end(text) if isinstance(text, bytes) else None
    return None


def _first_alert(entry: RunEntry, texts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first alert that is more than a note; else the first note."""
    alerts: list[Alert] = []
    for tag in entry.alert_tags[:_MAX_ALERTS]:
        with suppress(ValueError):  # the run's own page tells it
            alerts += [decode_alert(texts[tag])] if isinstance(texts.get(tag), bytes) else []
    found = next((alert for alert in alerts if alert.severity != "note"), next(iter(alerts), None))
    if found is None:
        return None
    return {name: getattr(found, name) for name in ("kind", "severity", "step", "module_name")}


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

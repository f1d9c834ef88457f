"""Rows of the run table: status, loss, first alert, hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.plugins.hparams import error as hparams_error
from tensorboard.plugins.hparams import metadata

from telemetry.alert import Alert
from telemetry.events import page_format
from telemetry.plain_text import natural_key
from telemetry.reading.builtin_tags import loss_of
from telemetry.reading.sessions import Sessions
from telemetry.reading.sources import FileSource, RunSource
from telemetry.tag_names import LAYERS
from telemetry.untrusted import MAX_INTEGER

# A live run writes every few seconds, but it may pause to validate.
_SILENT_S = 300.0
_SILENT_STEPS = 50

# Alerts of a run that are read to find the worst one.
MAX_ALERTS = 64
_MAX_HPARAMS = 1000
_MAX_TEXT = 200


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """Facts of a run in its tags alone. Times are in seconds since the epoch."""

    name: str
    last_step: int  # with data that counts
    started_s: float  # when its newest session began
    written_s: float
    step_s: float  # seconds per step, of the newest session; 0 if unknown
    alert_tags: tuple[str, ...]  # of the alerts that count, by step
    loss_tag: str | None
    end_tag: str | None  # end of the newest session; None if it is open or continued

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: the newest run first, runs of the same start in natural order."""
        return -self.started_s, natural_key(self.name)

    @property
    def texts(self) -> list[str]:
        """The tags whose contents :meth:`row` reads."""
        return [*self.alert_tags[:MAX_ALERTS], *filter(None, [self.end_tag])]

    def status(
        self, now_s: float, exception: str | None = None
    ) -> Literal["live", "ended", "died"]:
        """Return whether the training continues; a silent run that was not closed has died."""
        if self.end_tag is not None:
            return "ended" if exception is None else "died"
        silent_s = now_s - self.written_s
        return "live" if silent_s <= max(_SILENT_S, _SILENT_STEPS * self.step_s) else "died"

    def row(
        self, now_s: float, texts: Mapping[str, Any], hparams: bytes | None, loss: Any
    ) -> dict[str, Any]:
        """Return the row of the run table; ``texts`` are the contents of the tags :attr:`texts`."""
        return {
            "name": self.name,
            "status": self.status(now_s, _exception(texts.get(self.end_tag or ""))),
            "lastStep": self.last_step,
            "started": self.started_s,
            "written": self.written_s,
            "loss": loss,
            **_worst_alert(texts.get(tag) for tag in self.alert_tags[:MAX_ALERTS]),
            "hparams": dict(read_hparams(hparams)),
        }


def run_entry(name: str, tags: Mapping[str, Any]) -> RunEntry:
    """Make the entry of a run with these tags of the page's data, at least one."""
    starts = [
        (page_format.session_of(tag), series)
        for tag, series in tags.items()
        if tag.startswith(page_format.LAYOUT_PREFIX)
    ]
    sessions = Sessions((session, series.max_step) for session, series in starts)
    lasts, alerts, alerting = [], [], []
    for tag, series in tags.items():
        session = page_format.session_of(tag)
        if page_format.parse_chunk(tag) is not None:
            lasts.append(min(series.max_step, sessions.end_of(session) - 1))
        elif tag.startswith(page_format.ALERT_PREFIX):
            alerting.append(session)
            alerts += [(series.max_step, tag)] * (series.max_step < sessions.end_of(session))
    # A session that ended before its first step may have alerts and no layout.
    newest = max(sessions.begins or alerting, default="")
    first_step, last_step = sessions.begins.get(newest, 0), max(lasts, default=0)
    laid_out_s = [_time(series) for session, series in starts if session == newest]
    started_s, written_s = min(laid_out_s, default=0.0), max(map(_time, tags.values()))
    closed = tags.get(page_format.end_tag(newest))
    has_ended = closed is not None and closed.max_step >= last_step
    if closed is not None and has_ended:  # norms of the last steps may not have been measured
        last_step = closed.max_step
    return RunEntry(
        name=name,
        last_step=last_step,
        started_s=page_format.session_start_s(newest) or started_s,
        written_s=written_s,
        step_s=max(0.0, written_s - started_s) / max(1, last_step - first_step),
        alert_tags=tuple([tag for _, tag in sorted(alerts)]),
        loss_tag=page_format.chosen_loss(tags),
        end_tag=page_format.end_tag(newest) if has_ended else None,
    )


def _time(series: Any) -> float:
    time_s: float = series.max_wall_time
    return time_s if math.isfinite(time_s) else 0.0


def read_row(log_dir: Path, name: str, now_s: float) -> dict[str, Any] | None:
    """Return the row of a run in event files, with its problems; None without telemetry data."""
    source = FileSource(log_dir, _is_read)
    if not source.series:
        return None
    entry = run_entry(name, source.series)
    tag = loss_of(source.tags("scalars"), entry.loss_tag)
    read = source.read("scalars", [tag] if tag else [])
    losses = [loss_summary(tag, [value for _, value in points]) for tag, points in read.items()]
    texts = {
        t: data[-1][1] for t, data in source.read(page_format.PLUGIN_NAME, entry.texts).items()
    }
    row = entry.row(now_s, texts, hparams_content(source), next(iter(losses), None))
    return {**row, "problems": list(source.problems)}


def _is_read(plugin_name: str, tag: str) -> bool:
    if plugin_name in ("scalars", metadata.PLUGIN_NAME):
        return not tag.startswith(LAYERS)  # most of the scalars; the loss is not among them
    return tag.startswith((page_format.ALERT_PREFIX, page_format.END_PREFIX))


def differing(rows: Collection[Mapping[str, Any]]) -> list[str]:
    """Return the hyperparameters that differ between rows; a missing one counts as a value."""
    names = dict.fromkeys(name for row in rows for name in row["hparams"])
    return [name for name in names if len({str(row["hparams"].get(name)) for row in rows}) > 1]


def loss_summary(tag: str, data: Sequence[object]) -> dict[str, Any]:
    """Return tag, last value, and the smallest mean of successive ones; NaN without one.

    A mean is over a fiftieth of the finite values, at least one: the best batch is luck.
    """
    values = np.array([value for value in data if isinstance(value, (int, float))], np.float64)
    finite = values[np.isfinite(values)]
    count = max(1, len(finite) // 50)
    means = np.convolve(finite, np.full(count, 1 / count), "valid") if finite.size else finite
    return {
        "tag": tag,
        "last": float(values[-1]) if values.size else math.nan,
        "best": float(means.min()) if means.size else math.nan,
    }


def _exception(text: object) -> str | None:
    with suppress(ValueError):
        return page_format.decode_end(text) if isinstance(text, bytes) else None
    return None


def _worst_alert(texts: Iterable[object]) -> dict[str, Any]:
    """Return the number of faults above a note, and the worst fault.

    That is the first of the highest severity that it reached, and preferably one that has not
    resolved; ``resolved`` says whether it has.
    """
    faults: list[dict[str, Any]] = []
    for alert in _decoded(texts):
        active = [
            fault for fault in faults if fault["kind"] == alert.kind and not fault["resolved"]
        ]
        if alert.stage == "started":
            names = ("kind", "severity", "step", "module_name")
            faults.append({name: getattr(alert, name) for name in names} | {"resolved": False})
        elif active:
            change = (
                ("resolved", True) if alert.stage == "resolved" else ("severity", alert.severity)
            )
            active[-1].update([change])
    rank = ("error", "warning", "note").index
    worst = min(
        faults, key=lambda fault: (rank(fault["severity"]), fault["resolved"]), default=None
    )
    return {"alertCount": sum(fault["severity"] != "note" for fault in faults), "alert": worst}


def _decoded(texts: Iterable[object]) -> Iterator[Alert]:
    for text in texts:
        with suppress(ValueError):  # the page of the run reports it
            if isinstance(text, bytes):
                yield page_format.decode_alert(text)


def hparams_content(source: RunSource) -> bytes | None:
    """Return the hyperparameters in event files, in TensorBoard's encoding."""
    read = source.read(metadata.PLUGIN_NAME, [metadata.SESSION_START_INFO_TAG])
    return next((points[-1][1] for points in read.values()), None)


def read_hparams(content: bytes | None) -> Iterator[tuple[str, str | float | bool]]:
    """Yield names and values; nothing if the encoding is invalid."""
    if content is None:
        return
    try:
        found = metadata.parse_session_start_info_plugin_data(content)
    except (DecodeError, hparams_error.HParamsError):
        return
    for name, value in sorted(found.hparams.items())[:_MAX_HPARAMS]:
        kind = value.WhichOneof("kind")
        if kind == "number_value":  # most likely written as integers
            number = value.number_value
            is_integer = number.is_integer() and abs(number) <= MAX_INTEGER
            yield name[:_MAX_TEXT], int(number) if is_integer else number
        elif kind == "bool_value":
            yield name[:_MAX_TEXT], value.bool_value
        elif kind == "string_value":
            yield name[:_MAX_TEXT], value.string_value[:_MAX_TEXT]

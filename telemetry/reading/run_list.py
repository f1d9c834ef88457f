"""What a list of runs says about each, as far as their tags alone tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from telemetry.page_format import (
    ALERT_PREFIX,
    LAYOUT_PREFIX,
    chosen_loss,
    end_tag,
    parse_chunk,
    session_start_s,
)
from telemetry.reading.log_dirs import natural_key
from telemetry.reading.sessions import Sessions

Status = Literal["live", "ended", "died"]

_SILENT_S = 300.0
"""A run that is still going writes at least every few seconds, but it may pause to validate."""
_SILENT_STEPS = 50


class Series(Protocol):
    """What TensorBoard lists of a tag."""

    @property
    def max_step(self) -> int: ...

    @property
    def max_wall_time(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run.

    Attributes:
        name: The run's.
        last_step: The last step with data that counts.
        started_s: When its newest session began, seconds since the epoch.
        written_s: When it was last written to.
        step_s: Seconds per step, of the newest session; 0 if unknown.
        alert_tags: Of the alerts that count, by step.
        loss_tag: Of the loss, if it was written.
        end_tag: How the newest session was closed; None if it was not, or went on.
    """

    name: str
    last_step: int
    started_s: float
    written_s: float
    step_s: float
    alert_tags: tuple[str, ...]
    loss_tag: str | None
    end_tag: str | None

    def status(self, now_s: float, exception: str | None = None) -> Status:
        """Whether the training goes on; a run that was not closed and is silent has died.

        Args:
            now_s: Seconds since the epoch.
            exception: What the training ended in, as its end says.
        """
        if self.end_tag is not None:
            return "ended" if exception is None else "died"
        silent_s = now_s - self.written_s
        return "live" if silent_s <= max(_SILENT_S, _SILENT_STEPS * self.step_s) else "died"


def newest_first(entries: Iterable[RunEntry]) -> list[RunEntry]:
    """By start; runs that started together in natural order."""
    named = sorted(entries, key=lambda entry: natural_key(entry.name))
    return sorted(named, key=lambda entry: entry.started_s, reverse=True)


def run_entry(name: str, tags: Mapping[str, Series]) -> RunEntry:
    """The run with these tags of the page's data; at least one."""
    begins: dict[str, int] = {}
    laid_out_s: dict[str, float] = {}
    for tag, series in tags.items():
        if tag.startswith(LAYOUT_PREFIX):
            session = _session_of(tag, LAYOUT_PREFIX)
            begins[session] = min(series.max_step, begins.get(session, series.max_step))
            laid_out_s[session] = min(_time(series), laid_out_s.get(session, math.inf))
    sessions = Sessions(begins)
    lasts, alerts = [], []
    for tag, series in tags.items():
        if (chunk := parse_chunk(tag)) is not None:
            lasts.append(min(series.max_step, sessions.end_of(chunk.session) - 1))
        elif tag.startswith(ALERT_PREFIX):
            end = sessions.end_of(_session_of(tag, ALERT_PREFIX))
            alerts += [(series.max_step, tag)] if series.max_step < end else []
    newest = max(begins, default="")
    first_step, last_step = begins.get(newest, 0), max(lasts, default=0)
    started_s, written_s = laid_out_s.get(newest, 0.0), max(map(_time, tags.values()))
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


def _session_of(tag: str, prefix: str) -> str:
    return tag.removeprefix(prefix).rpartition("/")[0]


def _time(series: Series) -> float:
    return series.max_wall_time if math.isfinite(series.max_wall_time) else 0.0

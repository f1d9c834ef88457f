"""What happens to a step on the background thread: it is judged by the rules and written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from telemetry.alert import Alert
from telemetry.alerts.judging import Judge
from telemetry.capture import CapturedStep
from telemetry.events import summaries
from telemetry.faults import Faults
from telemetry.first_rank import is_first_rank
from telemetry.host_copy import HostCopy
from telemetry.plain_text import printable_lines
from telemetry.records import StepRecord
from telemetry.rule import Rule
from telemetry.writing.board import Board, needed_in_every_file

log = logging.getLogger("telemetry")

VALUES_AT_ONCE = 500


class Sink(Protocol):
    """Where values go: a file that another thread writes, so that no alert waits for the disk."""

    def write_values(
        self,
        values: Sequence[bytes],
        step: int,
        wall_time: float,
        /,
        *,
        droppable: bool,
        flush: bool,
        repeat: Sequence[bytes],
    ) -> None:
        """Add one event.

        Args:
            values: What it holds, as :mod:`telemetry.events.summaries` builds them.
            step: Of the event.
            wall_time: Likewise.
            droppable: Whether it may be left out when too much waits.
            flush: Have it written at once, without waiting for that.
            repeat: Those of the values that every further file has to hold, too.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedScalars:
    """What the user logged at one step; tensors perhaps still on their way to the host."""

    step: int
    wall_time: float
    values: Mapping[str, float | HostCopy]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadyValues:
    """Values that are written as they are."""

    step: int
    wall_time: float
    values: Sequence[bytes]


class Processor:
    """Turns captured steps into records, shows these to observers and rules, and writes them.

    Args:
        board: Decides what to write.
        sink: Takes the values to write.
        rules: Judge each step of training, after the observers have seen it.
        observers: Called with the record of each step of training.
        on_alert: Called with each alert and the time at which its step ended.
        faults: Where failures are reported.

    Attributes:
        full_wanted: Whether a rule asks for a full measurement of the next step.
    """

    def __init__(
        self,
        *,
        board: Board,
        sink: Sink,
        rules: Iterable[Rule],
        observers: Iterable[Callable[[StepRecord], None]] = (),
        on_alert: Callable[[Alert, float], None],
        faults: Faults,
    ) -> None:
        self._board = board
        self._sink = sink
        self._judge = Judge(rules, faults)
        self._observers = tuple(observers)
        self._on_alert = on_alert
        self._faults = faults
        self._scalars: dict[int, dict[str, float]] = {}
        self.full_wanted = False

    def process(self, item: CapturedStep | LoggedScalars | ReadyValues) -> None:
        """Judge and write what the training thread handed over."""
        if isinstance(item, ReadyValues):
            self._write(item.values, item.step, item.wall_time)
        elif isinstance(item, LoggedScalars):
            self._write_scalars(item)
        else:
            self._write_step(item)

    def pending_s(self) -> float | None:
        """Seconds until :meth:`write_pending` is due; None if nothing is held back."""
        return self._board.pending_s(time.time())

    def write_pending(self) -> None:
        """Write what the board holds back."""
        with self._faults.contained("to write the latest norms"):
            step, pending = self._board.pending_values()
            if pending:
                self._write(pending, step, time.time(), droppable=True)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What the rules remember, and what was logged for ``step``, as plain values."""
        return {
            "rules": self._judge.state_dict(),
            "logged": dict(self._scalars.get(step, {})),
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Continue from there, with ``step`` in progress; returns in words what did not fit."""
        logged = state.get("logged")
        self._scalars = {step: dict(logged)} if isinstance(logged, Mapping) else {}
        misfits = self._judge.load_state_dict(state.get("rules"))
        self.full_wanted = self._judge.wants_full
        return misfits

    def _write(
        self,
        values: Sequence[bytes],
        step: int,
        wall_time: float,
        *,
        droppable: bool = False,
        flush: bool = False,
    ) -> None:
        repeat = () if droppable else needed_in_every_file(values)
        self._sink.write_values(
            values, step, wall_time, droppable=droppable, flush=flush, repeat=repeat
        )

    def _write_scalars(self, item: LoggedScalars) -> None:
        values = {
            name: float(value.wait()) if isinstance(value, HostCopy) else value
            for name, value in item.values.items()
        }
        self._scalars.setdefault(item.step, {}).update(values)
        points = [summaries.scalar(name, value) for name, value in values.items()]
        self._write(points, item.step, item.wall_time)
        if "loss" in values:
            self._report(self._judge.judge_loss(item.step, values["loss"]), item.wall_time)

    def _write_step(self, captured: CapturedStep) -> None:
        scalars = self._scalars.get(captured.step, {})
        record = captured.record(scalars)
        if not record.phase:
            self._scalars = {s: v for s, v in self._scalars.items() if s > record.step}
            self._show_to_observers(record)
            self._report(self._judge.judge(record), record.wall_time)
            self.full_wanted = self._judge.wants_full
        droppable = not self._board.is_needed(record)
        step, wall_time, late = self._board.late_values(record)
        if late:
            self._write(late, step, wall_time, droppable=True)
        # Deep models have tens of thousands of values, of which only a few are in memory at a time.
        values = iter(self._board.values_of(record))
        while some := list(islice(values, VALUES_AT_ONCE)):
            self._write(some, record.step, record.wall_time, droppable=droppable)

    def _show_to_observers(self, record: StepRecord) -> None:
        for observer in self._observers:
            with self._faults.contained("to keep a step"):
                observer(record)

    def _report(self, alerts: Iterable[Alert], wall_time: float) -> None:
        for alert in alerts:
            self._report_one(alert, wall_time)

    def _report_one(self, alert: Alert, wall_time: float) -> None:
        level = logging.ERROR if alert.severity == "error" else logging.WARNING
        if alert.stage == "end":
            level = logging.INFO
        if is_first_rank():
            log.log(level, "%s: %s", alert.title, printable_lines(alert.message))
        self.write_pending()
        with self._faults.contained("to write an alert"):
            self._write(self._board.alert_values(alert), alert.step, wall_time, flush=True)
        with self._faults.contained("to call on_alert"):
            self._on_alert(alert, wall_time)

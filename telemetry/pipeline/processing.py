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
from telemetry.capture import CapturedStep, LightStep
from telemetry.events import summaries
from telemetry.events.sink import Sink
from telemetry.failures import Failures
from telemetry.first_rank import is_first_rank
from telemetry.host_copy import HostCopy
from telemetry.pipeline.schedule import FullSteps
from telemetry.plain_text import printable_lines
from telemetry.records import StepRecord
from telemetry.rule import Rule
from telemetry.writing.board import Board, needed_in_every_file

log = logging.getLogger("telemetry")

VALUES_AT_ONCE = 500

_LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


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


class Observer(Protocol):
    """Who is shown each step of training before the rules judge it."""

    def on_step(self, record: StepRecord) -> None:
        """A step."""


class Processor:
    """Turns captured steps into records, shows these to observers and rules, and writes them.

    Args:
        board: Decides what to write.
        sink: Takes the values to write.
        rules: Judge each step of training, after the observers have seen it.
        observers: Are shown each step of training.
        on_alert: Called with each alert and the time at which its step ended.
        full_steps: Is told of each step whether a rule wants a full measurement.
        failures: Where failures are reported.

    Attributes:
        abandoned: Set when nobody waits for the rest any more, and nothing may be written.
    """

    def __init__(
        self,
        *,
        board: Board,
        sink: Sink,
        rules: Iterable[Rule],
        observers: Iterable[Observer] = (),
        on_alert: Callable[[Alert, float], None],
        full_steps: FullSteps,
        failures: Failures,
    ) -> None:
        self._board = board
        self._sink = sink
        self._judge = Judge(rules, failures)
        self._observers = tuple(observers)
        self._on_alert = on_alert
        self._failures = failures
        self.abandoned = False
        self._full_steps = full_steps
        self._scalars: dict[int, dict[str, float]] = {}

    def process(self, item: CapturedStep | LightStep | LoggedScalars | ReadyValues) -> None:
        """Judge and write what the training thread handed over."""
        if isinstance(item, ReadyValues):
            self._write(item.values, item.step, item.wall_time)
        elif isinstance(item, LoggedScalars):
            self.log(item)
        else:
            self.record(item.record(self._scalars.get(item.step, {})))

    def _forget_scalars(self, step: int) -> None:
        """Keep what was logged for later steps than this."""
        self._scalars = {s: v for s, v in self._scalars.items() if s > step}

    def pending_s(self) -> float | None:
        """Seconds until :meth:`write_pending` is due; None if nothing is held back."""
        return self._board.pending_s(time.time())

    def write_pending(self) -> None:
        """Write what the board holds back."""
        with self._failures.contained("to write the latest norms"):
            step, pending = self._board.pending_values()
            if pending:
                self._write(pending, step, time.time(), droppable=True)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What rules remember and asked for, and what was logged for ``step``, as plain values."""
        return {
            "rules": self._judge.state_dict(),
            "full_steps": self._full_steps.state_dict(),
            "logged": dict(self._scalars.get(step, {})),
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Continue from there, with ``step`` in progress; returns in words what did not fit."""
        logged = state.get("logged")
        self._scalars = {step: dict(logged)} if isinstance(logged, Mapping) else {}
        self._full_steps.load_state_dict(state.get("full_steps"))
        if state.get("full") is True:  # the step in progress is measured as it was
            self._full_steps.ask(step)
        return self._judge.load_state_dict(state.get("rules"))

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

    def log(self, item: LoggedScalars) -> None:
        """Write what the user logged, and judge the loss, if it is among that."""
        values = {
            name: float(value.wait()) if isinstance(value, HostCopy) else value
            for name, value in item.values.items()
        }
        self._scalars.setdefault(item.step, {}).update(values)
        points = [summaries.scalar(name, value) for name, value in values.items()]
        with self._failures.contained("to write what was logged"):
            self._write(points, item.step, item.wall_time)
        if (loss := values.get("loss")) is not None:
            self._report(self._judge.judge_loss(item.step, loss), item.wall_time)

    def record(self, record: StepRecord) -> None:
        """Judge and write a step."""
        if not record.phase:
            self._forget_scalars(record.step)
            for observer in self._observers:
                with self._failures.contained("to keep a step"):
                    observer.on_step(record)
            try:
                self._report(self._judge.judge(record), record.wall_time)
            finally:
                self._full_steps.answer(record.step, wanted=self._judge.wants_full)
        droppable = not self._board.is_needed(record)
        step, wall_time, late = self._board.late_values(record)
        if late:
            self._write(late, step, wall_time, droppable=True)
        # Deep models have tens of thousands of values, of which only a few are in memory at a time.
        values = iter(self._board.values_of(record))
        while some := list(islice(values, VALUES_AT_ONCE)):
            self._write(some, record.step, record.wall_time, droppable=droppable)

    def _report(self, alerts: Iterable[Alert], wall_time: float) -> None:
        for alert in alerts:
            self._report_one(alert, wall_time)

    def _report_one(self, alert: Alert, wall_time: float) -> None:
        level = logging.INFO if alert.stage == "end" else _LEVELS[alert.severity]
        if is_first_rank():
            log.log(level, "%s: %s", alert.title, printable_lines(alert.message))
        self.write_pending()
        with self._failures.contained("to write an alert"):
            self._write(self._board.alert_values(alert), alert.step, wall_time, flush=True)
        with self._failures.contained("to call on_alert"):
            self._on_alert(alert, wall_time)

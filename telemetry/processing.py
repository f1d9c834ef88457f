"""What happens to a step on the background thread: it is judged by the rules and written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any, NamedTuple, Protocol

from telemetry.alert import Alert
from telemetry.alerts.history import leading
from telemetry.alerts.judging import Judge
from telemetry.capture import CapturedStep, LightItem, light_steps
from telemetry.events import summaries
from telemetry.events.sink import Sink
from telemetry.failures import Failures
from telemetry.first_rank import is_first_rank
from telemetry.host_copy import HostCopy
from telemetry.logged import LoggedScalars, ReadyValues
from telemetry.loss import LossChoice
from telemetry.plain_text import printable_lines
from telemetry.records import LightSteps, StepRecord
from telemetry.rule import Rule
from telemetry.schedule import ROWS_AT_ONCE, STEPS_AT_ONCE, FullSteps
from telemetry.waiting import Waiting
from telemetry.writing.board import Board, needed_in_every_file

log = logging.getLogger("telemetry")

VALUES_AT_ONCE = 500

_LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Loss(NamedTuple):
    step: int
    value: float
    wall_time: float


class Observer(Protocol):
    """Who is shown each step of training before the rules judge it."""

    def on_step(self, record: StepRecord) -> None:
        """A step."""

    def on_light_steps(self, steps: LightSteps) -> None:
        """Several steps that were not measured in full."""


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
        loss: Which of what the user logs is the loss.

    Attributes:
        loss: As above.
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
        loss: LossChoice,
    ) -> None:
        self.loss = loss
        self._loss_is_written = False
        self._await_loss: list[Callable[[str], bytes]] = []
        self._board = board
        self._sink = sink
        self._judge = Judge(rules, failures)
        self._observers = tuple(observers)
        self._on_alert = on_alert
        self._failures = failures
        self.abandoned = False
        self._full_steps = full_steps
        self._waiting = Waiting(loss)
        self._scalars: dict[int, dict[str, float]] = {}

    def process(self, item: CapturedStep | ReadyValues) -> None:
        """Judge and write what the training thread handed over."""
        self._process_waiting()
        if isinstance(item, ReadyValues):
            self._write(item.values, item.step, item.wall_time)
            if item.of_loss is not None:
                self._await_loss.append(item.of_loss)
                self._tell_loss(item.step - 1)
        else:
            self.record(item.record(self._logged_for(item.step), self.loss.tag))

    def process_few(self, items: Sequence[LightItem | LoggedScalars]) -> None:
        """Judge and write several steps that were not measured in full, and what was logged.

        Where no rule would note anything, they wait for others.

        Args:
            items: In the order in which they came.
        """
        may_wait = False
        with self._failures.contained("to look at steps"):
            may_wait = self._waiting.add(items)
        if may_wait:
            self._full_steps.answer(self._waiting.last, wanted=False)
        else:
            self._process_waiting()

    def _process_waiting(self) -> None:
        """Judge and write what waits."""
        items = self._waiting.take()
        count, losses = 0, dict[int, list[_Loss]]()  # those after so many of the steps
        for item in items:
            if isinstance(item, LoggedScalars):
                with self._failures.contained("to write what was logged"):
                    losses.setdefault(count, []).extend(self._write_scalars(item))
            else:
                count += 1 if isinstance(item, StepRecord) else len(item)
        light, first = [item for item in items if not isinstance(item, LoggedScalars)], 0
        for steps, record_of in light_steps(light, self._logged_for, self.loss.tag):
            last = first + len(steps)
            before = [losses.get(index, ()) for index in range(first, last)]
            with self._failures.contained("to record steps"):
                self._process_light(steps, record_of, before)
            first = last
        self._judge_losses(losses.get(count, ()))

    def _process_light(
        self,
        steps: LightSteps,
        record_of: Callable[[int], StepRecord],
        losses: Sequence[Iterable[_Loss]],
    ) -> None:
        """Judge and write steps; those of the first that are quiet, all at once.

        Args:
            steps: The steps.
            record_of: Gives the record of one.
            losses: What was logged before each.
        """
        self._waiting.bounds = None
        count = leading([not some or all(isfinite(loss.value) for loss in some) for some in losses])
        passed = self._judge.pass_over(steps[:count]) if self._board.goes_on(steps) else 0
        if passed:
            quiet = steps[:passed]
            self._full_steps.answer(quiet.steps[-1], wanted=False)
            self._forget_scalars(quiet.steps[-1])
            self._show_to_observers(lambda observer: observer.on_light_steps(quiet))
            self._sink.write_curve(*self._board.curve_of_light(quiet))
            for step, wall_time, values in self._board.values_of_light(quiet):
                if values:
                    self._write(values, step, wall_time, droppable=True)
            self._tell_loss(quiet.steps[-1])
        if passed == len(steps):
            self._waiting.bounds = self._judge.bounds(steps, ROWS_AT_ONCE + STEPS_AT_ONCE)
        for index in range(passed, len(steps)):
            if self.abandoned:
                return
            self._judge_losses(losses[index])
            with self._failures.contained("to record a step"):
                self.record(record_of(index))

    def _judge_losses(self, losses: Iterable[_Loss]) -> None:
        for loss in losses:
            self._waiting.bounds = None  # which say nothing of a step whose loss is known already
            self._report(self._judge.judge_loss(loss.step, loss.value), loss.wall_time)

    def _logged_for(self, step: int) -> Mapping[str, float]:
        return self._scalars.get(step, {})

    def _forget_scalars(self, step: int) -> None:
        """Keep what was logged for later steps than this."""
        self._scalars = {s: v for s, v in self._scalars.items() if s > step}

    def pending_s(self) -> float | None:
        """Seconds until :meth:`write_pending` is due; None if nothing is held back."""
        left_s = self._waiting.left_s()  # what the board holds back waits with it
        return self._board.pending_s(time.time()) if left_s is None else left_s

    def write_pending(self) -> None:
        """Process what waits, and write what the board holds back."""
        self._process_waiting()
        with self._failures.contained("to write the latest norms"):
            step, pending = self._board.pending_values()
            if pending:
                self._write(pending, step, time.time(), droppable=True)

    def end(self) -> None:
        """Process what waits: nothing else will come."""
        self.write_pending()
        with self._failures.contained("to write which scalar is the loss"):
            self._tell_loss(None)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What rules remember and asked for, and what was logged for ``step``, as plain values."""
        self._process_waiting()
        return {
            "rules": self._judge.state_dict(),
            "full_steps": self._full_steps.state_dict(),
            "logged": dict(self._scalars.get(step, {})),
            "loss": self.loss.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Continue from there, with ``step`` in progress; returns in words what did not fit."""
        self._process_waiting()
        self._waiting.bounds = None
        logged = state.get("logged")
        self._scalars = {step: dict(logged)} if isinstance(logged, Mapping) else {}
        self.loss.load_state_dict(state.get("loss"))
        self._loss_is_written = False  # the file may have lost it
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

    def _write_scalars(self, item: LoggedScalars) -> Sequence[_Loss]:
        """Write what the user logged; returns the loss, if it is among that."""
        values = {
            name: float(value.wait()) if isinstance(value, HostCopy) else value
            for name, value in item.values.items()
        }
        self._scalars.setdefault(item.step, {}).update(values)
        points = [summaries.scalar(name, value) for name, value in values.items()]
        with self._failures.contained("to write what was logged"):
            self._write(points, item.step, item.wall_time)
        self.loss.see(item.step, values)
        tag = self.loss.tag
        return [_Loss(item.step, values[tag], item.wall_time)] if tag in values else []

    def _tell_loss(self, step: int | None) -> None:
        """After a step, or the last one: write which scalar is the loss, or log that none is."""
        if (lack := self.loss.lack(step)) is not None and is_first_rank():
            self._failures.log_once(lack)
        tag = self.loss.tag
        if tag is None or not self.loss.is_final(step):
            return
        values = [of_loss(tag) for of_loss in self._await_loss]
        self._await_loss = []
        if not self._loss_is_written and (value := self._board.loss_value(tag)) is not None:
            self._loss_is_written = True
            values.append(value)
        if values:
            self._write(values, self._board.last_step, time.time())

    def record(self, record: StepRecord) -> None:
        """Judge and write a step."""
        if not record.phase:
            self._waiting.bounds = None
            self._forget_scalars(record.step)
            self._show_to_observers(lambda observer: observer.on_step(record))
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
        if not record.phase:
            self._tell_loss(record.step)

    def _show_to_observers(self, show: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            with self._failures.contained("to keep a step"):
                show(observer)

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

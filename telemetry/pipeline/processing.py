"""What happens to a step on the background thread: it is judged by the rules and written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

from telemetry.alert import Alert, located
from telemetry.alerts.judging import Judge
from telemetry.capture import Budget, CapturedStep, LightStep
from telemetry.capture.budget import Work
from telemetry.events import summaries
from telemetry.events.sink import Sink
from telemetry.failures import Failures
from telemetry.pipeline.light_steps import LightSteps
from telemetry.pipeline.schedule import FullSteps
from telemetry.plain_text import printable_lines
from telemetry.ranks.exchange import Exchange
from telemetry.ranks.merging import MergedStep
from telemetry.ranks.role import is_rank_0
from telemetry.records import Layout, StepRecord
from telemetry.records.loss import LossChoice
from telemetry.rule import Rule
from telemetry.tag_names import RUN
from telemetry.torch_private.host_copy import HostCopy
from telemetry.writing.board import Board, needed_in_every_file

log = logging.getLogger("telemetry")

VALUES_AT_ONCE = 500

_LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LoggedScalars(NamedTuple):
    """What the user logged at one step; tensors perhaps still on their way to the host."""

    step: int
    wall_time: float
    values: Mapping[str, float | HostCopy]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadyValues:
    """Values that are written as they are, and one that is written when the loss is known.

    Attributes:
        of_loss: Makes that one of the loss's tag.
    """

    step: int
    wall_time: float
    values: Sequence[bytes]
    of_loss: Callable[[str], bytes] | None = None


Item: TypeAlias = CapturedStep | LightStep | ReadyValues | MergedStep
"""Items of the training thread, and on rank 0 merged steps of all ranks."""


class Observer(Protocol):
    """Who is shown each step of training before the rules judge it; it raises nothing."""

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
        loss: Which of what the user logs is the loss.
        budget: Counts the time of this thread.
        light_steps: Selects the steps at which norms are taken.

    Attributes:
        ranks: The exchange with the other ranks, through which each step passes.
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
        budget: Budget | None = None,
        light_steps: LightSteps | None = None,
    ) -> None:
        self.ranks = Exchange()
        self._loss = loss
        self._loss_is_written = False
        self._await_loss: list[Callable[[str], bytes]] = []
        self._board = board
        self._sink = sink
        self._judge = Judge(rules, failures)
        self._observers = tuple(observers)
        self._on_alert = on_alert
        self._failures = failures
        self._full_steps = full_steps
        self._scalars: dict[int, dict[str, float]] = {}
        self._layout: Layout | None = None
        self._light_steps = light_steps or LightSteps()
        self._light_steps.limited &= self._judge.loss_limit is not None
        self._budget = budget

    def process(self, item: Item) -> None:
        """Judge and write what the training thread handed over."""
        began_s = time.thread_time()
        try:
            self._process(item)
        finally:
            if self._budget is not None:
                self._budget.worker_took(_kind_of_work(item), time.thread_time() - began_s)

    def _process(self, item: Item) -> None:
        if isinstance(item, ReadyValues):
            repeat = needed_in_every_file(item.values)
            self._sink.write_values(item.values, item.step, item.wall_time, repeat=repeat)
            if item.of_loss is not None:
                self._await_loss.append(item.of_loss)
                self._tell_loss(item.step - 1)
        elif isinstance(item, MergedStep):
            self._record_merged(item)
        else:
            self._add_step(item)

    def _add_step(self, item: CapturedStep | LightStep) -> None:
        """Record a step here, or send it to the first rank."""
        began_s, tag = time.thread_time(), self._loss.tag
        record = item.record(self._scalars.get(item.step, {}), tag)
        if not record.phase:
            before = {s: v[tag] for s, v in self._scalars.items() if s < record.step and tag in v}
            record = replace(record, losses_between=tuple(before.items())) if before else record
            self._scalars = {s: v for s, v in self._scalars.items() if s > record.step}
        if (due := self.ranks.send(record, item)) is not None:
            self._record(due)
            if not (record.full or record.phase):
                cost_s = time.thread_time() - began_s
                self._light_steps.add(record.step, record.wall_time, cost_s)

    def pending_s(self) -> float | None:
        """Seconds until :meth:`write_pending` is due; None if nothing is held back."""
        return self._board.page.pending_s(time.time())

    def write_pending(self) -> None:
        """Write what the board holds back."""
        with self._failures.contained("to write the latest norms"):
            step, pending = self._board.pending_values()
            if pending:
                self._sink.write_values(pending, step, time.time(), droppable=True)

    def end(self) -> None:
        """Process what waits: nothing else will come."""
        self.write_pending()
        with self._failures.contained("to write which scalar is the loss"):
            self._tell_loss(None)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What rules remember and asked for, and what was logged for ``step``, as plain values."""
        return {
            "rules": self._judge.state_dict(),
            "full_steps": self._full_steps.state_dict(),
            "logged": dict(self._scalars.get(step, {})),
            "loss": self._loss.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Continue from there, with ``step`` in progress; returns in words what did not fit."""
        logged = state.get("logged")
        self._scalars = {step: dict(logged)} if isinstance(logged, Mapping) else {}
        self._loss.load_state_dict(state.get("loss"))
        self._loss_is_written = False  # the file may have lost it
        self._full_steps.load_state_dict(state, step)
        return self._judge.load_state_dict(state.get("rules")) if self.ranks.records else []

    def log(self, items: Iterable[LoggedScalars]) -> None:
        """Write what the user logged, and judge the loss if it is among that."""
        began_s = time.thread_time()
        for step, wall_time, logged in items:
            try:
                values = {
                    name: float(value.wait()) if isinstance(value, HostCopy) else value
                    for name, value in logged.items()
                }
                self._scalars.setdefault(step, {}).update(values)
                self._loss.see(step, values)
                self._light_steps.see_logged(step, values)
                self._record_logged(step, wall_time, self.ranks.logged(values))
            except Exception:
                self._failures.report("to write what was logged")
        if self._budget is not None:
            self._budget.worker_took("logged", time.thread_time() - began_s)

    def _record_logged(self, step: int, wall_time: float, values: dict[str, float]) -> None:
        """Write logged scalars, and judge the loss if it is one of them."""
        if not values:
            return
        points = [summaries.scalar(name, value) for name, value in values.items()]
        try:
            self._sink.write_values(points, step, wall_time)
        finally:
            if (tag := self._loss.tag) in values:
                self._report(self._judge.judge_loss(step, values[tag]), wall_time)

    def send_rest(self) -> None:
        """Send the other ranks what was logged for a step that did not end."""
        self.ranks.send_rest(self._scalars)

    def _record_merged(self, merged: MergedStep) -> None:
        """Judge and write a step of all ranks, and what they logged."""
        try:
            if not merged.phase:
                means, _ = merged.scalars()
                self._loss.see(merged.step, means)
                self._record_logged(merged.step, merged.wall_time, means)
            if (record := self.ranks.merged(merged)) is not None:
                self._record(replace(record, loss_tag=self._loss.tag))
        finally:
            self.ranks.note_recorded(merged)

    def _tell_loss(self, step: int | None) -> None:
        """After a step, or the last one: write which scalar is the loss, or log that none is."""
        if self._loss_is_written and not self._await_loss:
            return
        if (lack := self._loss.lack(step)) is not None and is_rank_0():
            self._failures.log_once(lack)
        tag = self._loss.tag
        if tag is None or not self._loss.is_final(step):
            return
        values = [of_loss(tag) for of_loss in self._await_loss]
        self._await_loss = []
        if not self._loss_is_written and (value := self._board.page.loss_value(tag)) is not None:
            self._loss_is_written = True
            values.append(value)
        if values:
            repeat = needed_in_every_file(values)
            self._sink.write_values(values, self._board.page.last_step, time.time(), repeat=repeat)

    def _record(self, record: StepRecord) -> None:
        """Judge and write a step."""
        if not record.phase:
            self._layout = record.layout
            for observer in self._observers:
                observer.on_step(record)
            try:
                self._report(self._judge.judge(record), record.wall_time)
            finally:
                self._select_later_steps(record.step)
                is_granted = self._full_steps.grants(self._judge, record.step)
                if is_granted and not self.ranks.request_full(record.step):
                    self._full_steps.want()
        record = record.recorded()
        is_needed = self._board.page.begins_layout(record)
        step, wall_time, late = self._board.rates.late_values(record)
        if late:
            self._sink.write_values(late, step, wall_time, droppable=True)
        # Deep models have tens of thousands of values, of which only a few are in memory at a time.
        values = iter(self._board.values_of(record))
        while some := list(islice(values, VALUES_AT_ONCE)):
            repeat = needed_in_every_file(some) if is_needed else ()
            step, wall_time = record.step, record.wall_time
            self._sink.write_values(some, step, wall_time, droppable=not is_needed, repeat=repeat)
        if not record.phase:
            self._tell_loss(record.step)
        if record.full and self._light_steps.every > 1:
            every = summaries.scalar(f"{RUN}telemetry/norms_every_n_steps", self._light_steps.every)
            self._sink.write_values([every], record.step, record.wall_time, droppable=True)

    def _select_later_steps(self, step: int) -> None:
        """Have norms taken at each of the next steps, if a rule needs them."""
        limit, self._light_steps.loss_tag = self._judge.loss_limit, self._loss.tag
        if limit is None:
            self._light_steps.expect_more(step)
        else:
            self._light_steps.loss_limit = limit

    def _report(self, alerts: Iterable[Alert], wall_time: float) -> None:
        for alert in alerts:
            self._report_one(alert, wall_time)

    def _report_one(self, alert: Alert, wall_time: float) -> None:
        alert = located(alert, self._layout)
        level = logging.INFO if alert.stage == "resolved" else _LEVELS[alert.severity]
        if is_rank_0():
            log.log(level, "%s: %s", alert.title, printable_lines(alert.message))
        self.write_pending()
        with self._failures.contained("to write an alert"):
            self._sink.write_values(
                self._board.alert_values(alert), alert.step, wall_time, flush=True
            )
        with self._failures.contained("to call on_alert"):
            self._on_alert(alert, wall_time)


def _kind_of_work(item: Item) -> Work:
    if isinstance(item, CapturedStep) and item.full:
        return "full"
    return "norms" if isinstance(item, CapturedStep | LightStep) else "logged"

"""Judges and writes steps, on the worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeAlias

from telemetry.alert import Alert, located
from telemetry.capture import CapturedStep, LightStep, Schedule
from telemetry.capture.account import Work
from telemetry.events import summaries
from telemetry.failures import Failures
from telemetry.pipeline.judge import Judge
from telemetry.plain_text import printable_lines
from telemetry.ranks.exchange import Exchange
from telemetry.ranks.merging import MergedStep
from telemetry.ranks.role import is_rank_0
from telemetry.records import Layout, StepRecord
from telemetry.records.batches import Batch, RecentBatches
from telemetry.records.loss import LossChoice
from telemetry.records.step import InputRows
from telemetry.rule import Rule
from telemetry.torch_private.host_copy import HostCopy
from telemetry.writing.dashboard import Dashboard, needed_in_every_file

log = logging.getLogger("telemetry")

VALUES_AT_ONCE = 500

_LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LoggedScalars(NamedTuple):
    """Values that the user logged at one step; copies may still be in transit to the host."""

    step: int
    wall_time: float
    values: Mapping[str, float | HostCopy]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadyValues:
    """Serialized values to write, and one to write when the loss is known.

    Attributes:
        of_loss: Makes that value from the tag of the loss.
    """

    step: int
    wall_time: float
    values: Sequence[bytes]
    of_loss: Callable[[str], bytes] | None = None


Item: TypeAlias = Batch | CapturedStep | LightStep | ReadyValues | MergedStep
"""Items of the worker's queue; merged steps of all ranks are on rank 0 only."""


class Observer(Protocol):
    """Receiver of each training step before the rules judge it."""

    def on_step(self, record: StepRecord) -> None:
        """Receive a step; must not raise."""


class Processor:
    """Turns captured steps into records, passes these to observers and rules, and writes them.

    Args:
        dashboard: Makes the values to write.
        write_values: Adds one event to the files of the run, without waiting for the disk.
        rules: Judge each training step, after the observers.
        batches: Receives the ids of batches.
        on_alert: Called with each alert and the time at which its step ended.
        schedule: Receives the requests of the rules, and the time of the worker.

    Attributes:
        ranks: Exchange with the other ranks; each step passes through it.
    """

    def __init__(
        self,
        *,
        dashboard: Dashboard,
        write_values: Callable[..., None],
        rules: Iterable[Rule],
        observers: Iterable[Observer] = (),
        on_alert: Callable[[Alert, float], None],
        schedule: Schedule,
        failures: Failures,
        loss: LossChoice,
        batches: RecentBatches | None = None,
    ) -> None:
        self.ranks = Exchange()
        self._loss = loss
        self._loss_is_written = False
        self._waiting_for_loss: list[Callable[[str], bytes]] = []
        self._dashboard = dashboard
        self._write_values = write_values
        self._judge = Judge(rules, failures)
        self._observers = tuple(observers)
        self._on_alert = on_alert
        self._failures = failures
        self._schedule = schedule
        self._scalars: dict[int, dict[str, float]] = {}
        self._layout: Layout | None = None
        self._input_rows = InputRows()
        self._batches = batches or RecentBatches()

    def process(self, item: Item) -> None:
        """Judge and write an item of the queue."""
        began_s = time.thread_time()
        try:
            self._process(item)
        finally:
            self._schedule.account.worker_took(_kind_of_work(item), time.thread_time() - began_s)

    def _process(self, item: Item) -> None:
        if isinstance(item, ReadyValues):
            repeat = needed_in_every_file(item.values)
            self._write_values(item.values, item.step, item.wall_time, repeat=repeat)
            if item.of_loss is not None:
                self._waiting_for_loss.append(item.of_loss)
                self._write_loss_tag(item.step - 1)
        elif isinstance(item, Batch):
            self._batches.add([self.ranks.noted(item)])
        elif isinstance(item, MergedStep):
            self._record_merged(item)
        else:
            self._add_step(item)

    def _add_step(self, item: CapturedStep | LightStep) -> None:
        """Record a step here, or send it to rank 0."""
        tag = self._loss.tag
        record = item.record(self._scalars.get(item.step, {}), tag)
        if not record.phase:
            self._loss.step_ended(record.step)
            before = {s: v[tag] for s, v in self._scalars.items() if s < record.step and tag in v}
            record = replace(record, losses_between=tuple(before.items())) if before else record
            self._scalars = {s: v for s, v in self._scalars.items() if s > record.step}
        if (due := self.ranks.send(record, item)) is not None:
            self._record(due)

    def pending_s(self) -> float | None:
        """Seconds until :meth:`write_pending` is due; None if nothing is held back."""
        return self._dashboard.page.pending_s(time.time())

    def write_pending(self) -> None:
        """Write the values that the dashboard holds back."""
        with self._failures.contained("to write the latest norms"):
            step, pending = self._dashboard.pending_values()
            if pending:
                self._write_values(pending, step, time.time(), droppable=True)

    def end(self) -> None:
        """Write the rest at the end of the run."""
        self.write_pending()
        with self._failures.contained("to write which scalar is the loss"):
            self._write_loss_tag(None)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the state of rules and requests, and the scalars logged for ``step``."""
        return {
            "rules": self._judge.state_dict(),
            "schedule": self._schedule.state_dict(),
            "logged": dict(self._scalars.get(step, {})),
            "loss": self._loss.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Restore the state, with ``step`` in progress; return what does not fit.

        Readers hide what was logged for ``step`` before the checkpoint, so it is written again.
        """
        logged = state.get("logged")
        self._scalars = {step: dict(logged)} if isinstance(logged, Mapping) else {}
        with self._failures.contained("to write the scalars of a checkpoint"):
            self._write_logged(step, time.time(), self.ranks.logged(self._scalars.get(step, {})))
        self._batches.clear()
        self._loss.load_state_dict(state.get("loss"))
        self._loss_is_written = False  # the file may have lost it
        self._schedule.load_state_dict(state.get("schedule"), step)
        return self._judge.load_state_dict(state.get("rules")) if self.ranks.records else []

    def log(self, items: Iterable[LoggedScalars]) -> None:
        """Write logged scalars, and judge the losses among them."""
        began_s = time.thread_time()
        for step, wall_time, logged in items:
            try:
                values = {
                    name: float(value.wait()) if isinstance(value, HostCopy) else value
                    for name, value in logged.items()
                }
                self._scalars.setdefault(step, {}).update(values)
                self._loss.add(step, values)
                self._schedule.logged(step, values)
                self._record_logged(step, wall_time, self.ranks.logged(values))
            except Exception:
                self._failures.report("to write logged scalars")
        self._schedule.account.worker_took("logged", time.thread_time() - began_s)

    def _record_logged(self, step: int, wall_time: float, values: dict[str, float]) -> None:
        """Write the logged scalars of a step, and judge the loss if it is one of them."""
        try:
            self._write_logged(step, wall_time, values)
        finally:
            if (tag := self._loss.tag) in values:
                self._report(self._judge.judge_loss(step, values[tag]), wall_time)

    def _write_logged(self, step: int, wall_time: float, values: Mapping[str, float]) -> None:
        if values:
            self._write_values([summaries.scalars(values.items())], step, wall_time)

    def send_rest(self) -> None:
        """Send rank 0 the scalars that were logged for a step that did not end."""
        self.ranks.send_rest(self._scalars)

    def _record_merged(self, merged: MergedStep) -> None:
        """Judge and write the merged step of all ranks, and their logged scalars."""
        try:
            if not merged.phase:
                for part in merged.parts:
                    self._batches.add(part.batches)
                means, _ = merged.figures("scalars")
                self._loss.add(merged.step, means)
                self._record_logged(merged.step, merged.wall_time, means)
            if (record := self.ranks.merged(merged)) is not None:
                self._record(replace(record, loss_tag=self._loss.tag))
        finally:
            self.ranks.note_recorded(merged)

    def _write_loss_tag(self, step: int | None) -> None:
        """Write the tag of the loss, or log that no scalar is; None: training has ended."""
        if self._loss_is_written and not self._waiting_for_loss:
            return
        if (message := self._loss.missing(step)) is not None and is_rank_0():
            self._failures.log_once(message)
        tag = self._loss.tag
        if tag is None or not self._loss.is_final(step):
            return
        values = [of_loss(tag) for of_loss in self._waiting_for_loss]
        self._waiting_for_loss = []
        page = self._dashboard.page
        if not self._loss_is_written and (value := page.loss_value(tag)) is not None:
            self._loss_is_written = True
            values.append(value)
        if values:
            repeat = needed_in_every_file(values)
            self._write_values(values, page.last_step, time.time(), repeat=repeat)

    def _record(self, record: StepRecord) -> None:
        """Judge and write a step."""
        if not record.phase:
            if self._loss.delay:
                record = replace(record, loss_delay=self._loss.delay)
            self._layout = record.layout
            for observer in self._observers:
                observer.on_step(record)
            try:
                self._report(self._judge.judge(record), record.wall_time)
            finally:
                self._request_steps(record)
        record = self._input_rows.added(record.recorded())
        is_needed = self._dashboard.page.begins_layout(record)
        step, wall_time, late = self._dashboard.rates.late_values(record)
        if late:
            self._write_values(late, step, wall_time, droppable=True)
        # Deep models have tens of thousands of values, of which only a few are in memory at a time.
        values = chain.from_iterable(self._dashboard.values_of(record))
        while some := list(islice(values, VALUES_AT_ONCE)):
            repeat = needed_in_every_file(some) if is_needed else ()
            step, wall_time = record.step, record.wall_time
            self._write_values(some, step, wall_time, droppable=not is_needed, repeat=repeat)
        if not record.phase:
            self._write_loss_tag(record.step)

    def _request_steps(self, record: StepRecord) -> None:
        """Pass the requests of the rules on to the schedule, or to those of all ranks."""
        self._schedule.loss_tag = self._loss.tag
        count = self._judge.request(self._schedule, record)
        if count and not self.ranks.request_full(record.step):
            self._schedule.request_full(record.step + 2, count)

    def _report(self, alerts: Iterable[Alert], wall_time: float) -> None:
        for alert in alerts:
            self._report_one(alert, wall_time)

    def _report_one(self, alert: Alert, wall_time: float) -> None:
        alert = located(alert, self._layout)
        if alert.batches:
            known = {
                batch.step: self._batches.of(batch.step) or (batch,) for batch in alert.batches
            }
            alert = replace(alert, batches=tuple(chain.from_iterable(known.values())))
        level = logging.INFO if alert.stage == "resolved" else _LEVELS[alert.severity]
        if is_rank_0():
            log.log(level, "%s: %s", alert.title, printable_lines(alert.message))
        self.write_pending()
        with self._failures.contained("to write an alert"):
            self._write_values(
                self._dashboard.alert_values(alert), alert.step, wall_time, flush=True
            )
        with self._failures.contained("to call on_alert", of=BaseException):
            self._on_alert(alert, wall_time)


def _kind_of_work(item: Item) -> Work:
    if isinstance(item, CapturedStep) and item.full:
        return "full"
    return "norms" if isinstance(item, CapturedStep | LightStep) else "logged"

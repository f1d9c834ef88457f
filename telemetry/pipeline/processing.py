"""Judges and writes steps, on the worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

from telemetry.alert import Alert, located
from telemetry.capture import Schedule, Step
from telemetry.capture.schedule import Work
from telemetry.events import summaries
from telemetry.failures import Failures
from telemetry.pipeline.judge import Judge
from telemetry.plain_text import printable_lines
from telemetry.ranks.exchange import Exchange
from telemetry.ranks.merging import MergedStep
from telemetry.ranks.role import is_rank_0
from telemetry.records import Layout, StepRecord
from telemetry.records.batches import Batch
from telemetry.records.loss import LossChoice
from telemetry.records.step import NO_LAYOUT, ClippedFraction, InputRows
from telemetry.rule import Rule
from telemetry.tag_names import RUN
from telemetry.torch_private.host_copy import HostCopy
from telemetry.writing import hparams
from telemetry.writing.dashboard import Dashboard
from telemetry.writing.hparams import Hyperparameter
from telemetry.writing.run_log import RunLog

log = logging.getLogger("telemetry")

VALUES_AT_ONCE = 500

# TensorBoard reads the columns of its table of hyperparameters once, and a metric of an epoch comes
# late: they are written after so many steps, or at the end.
METRICS_AFTER = 1000
MAX_METRICS = 30

_LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LoggedScalars(NamedTuple):
    """Values that the user logged at one step; copies may still be in transit to the host."""

    step: int
    wall_time: float
    values: Mapping[str, float | HostCopy]


Item: TypeAlias = Batch | Step | MergedStep
"""Items of the worker's queue; merged steps of all ranks are on rank 0 only."""


class Processor:
    """Resolves records, passes them to the rules, and writes them.

    Args:
        dashboard: Makes the values to write for TensorBoard.
        write_values: Adds one event to the files of the run, without waiting for the disk.
        run_log: Writes everything else.
        rules: Judge each training step.
        on_step: Called with each training step before the rules judge it; must not raise.
        on_alert: Called with each alert.
        schedule: Receives the requests of the rules, and the time of the worker.

    Attributes:
        ranks: Exchange with the other ranks; each step passes through it.
    """

    def __init__(
        self,
        *,
        dashboard: Dashboard,
        write_values: Callable[..., None],
        run_log: RunLog,
        rules: Iterable[Rule],
        on_step: Callable[[StepRecord], None],
        on_alert: Callable[[Alert], None],
        schedule: Schedule,
        failures: Failures,
        loss: LossChoice,
    ) -> None:
        self.ranks = Exchange()
        self._loss = loss
        self._loss_is_written = False
        # Hyperparameters whose metrics are not written, and the step at which they will be.
        self._waiting: tuple[Mapping[str, Hyperparameter], int] | None = None
        self._tags: dict[str, None] = {}  # of logged scalars
        self._dashboard = dashboard
        self._write_values = write_values
        self._log = run_log
        self._judge = Judge(rules, failures)
        self._on_step, self._on_alert = on_step, on_alert
        self._failures = failures
        self._schedule = schedule
        self._scalars: dict[int, dict[str, float]] = {}
        self._layout: Layout | None = None
        self._last_step = 0
        self._input_rows, self._clipped_fraction = InputRows(), ClippedFraction()
        self._batches = run_log.batches

    def process(self, item: Item) -> None:
        """Judge and write an item of the queue."""
        began_s = time.thread_time()
        work: Work = "logged"
        try:
            if isinstance(item, Batch):
                self._batches.add([self.ranks.noted(item)])
            elif isinstance(item, MergedStep):
                self._record_merged(item)
            else:
                work = "full" if item.full else "norms"
                self._add_step(item)
        finally:
            self._schedule.account.worker_took(work, time.thread_time() - began_s)

    def _add_step(self, pending: Step) -> None:
        """Record a step here, or send it to rank 0."""
        step, tag, record = pending.step, self._loss.tag, pending.resolve()
        record.scalars, record.loss_tag = self._scalars.get(step, {}), tag
        if not record.phase:
            self._loss.step_ended(step)
            record.losses_between = tuple(
                [(s, v[tag]) for s, v in self._scalars.items() if s < step and tag in v]
            )
            self._scalars = {s: v for s, v in self._scalars.items() if s > step}
        if (due := self.ranks.send(record, pending.notes)) is not None:
            self._record(due)

    def end(self) -> None:
        """Write the rest at the end of the run."""
        with self._failures.contained("to write which scalar is the loss"):
            self._write_loss_tag(None)
            self._write_metrics(self._logged_metrics())

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return the state of rules and requests, and the scalars logged for ``step``."""
        return {
            "rules": self._judge.state_dict(),
            "schedule": self._schedule.state_dict(),
            "logged": dict(self._scalars.get(step, {})),
            "loss": self._loss.tag,
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
        self._loss.restore(state.get("loss"))
        self._loss_is_written = False  # the file may have lost it
        self._schedule.load_state_dict(state.get("schedule"), step)
        return self._judge.load_state_dict(state.get("rules")) if self.ranks.records else []

    def log(self, items: Iterable[LoggedScalars]) -> None:
        """Write logged scalars, and judge the losses among them."""
        began_s = time.thread_time()
        for step, wall_time, logged in items:
            with self._failures.contained("to write logged scalars"):
                values = {
                    name: float(value.wait()) if isinstance(value, HostCopy) else value
                    for name, value in logged.items()
                }
                self._scalars.setdefault(step, {}).update(values)
                self._loss.add(step, values)
                self._schedule.logged(step, values)
                self._record_logged(step, wall_time, self.ranks.logged(values))
        self._schedule.account.worker_took("logged", time.thread_time() - began_s)

    def _record_logged(self, step: int, wall_time: float, values: Mapping[str, float]) -> None:
        """Write the logged scalars of a step, and judge the loss if it is one of them."""
        try:
            self._write_logged(step, wall_time, values)
        finally:
            if (tag := self._loss.tag) is not None and tag in values:
                self._report(self._judge.judge_loss(step, values[tag]), wall_time)

    def _write_logged(self, step: int, wall_time: float, values: Mapping[str, float]) -> None:
        if values:
            self._write_values([summaries.scalars(values.items())], step, wall_time)
            self._log.logged(step, wall_time, values)
            self._tags |= dict.fromkeys(tag for tag in values if not tag.startswith(RUN))

    def send_rest(self) -> None:
        """Send rank 0 the scalars that were logged for a step that did not end."""
        self.ranks.send_rest(self._scalars)

    def _record_merged(self, merged: MergedStep) -> None:
        """Judge and write the merged step of all ranks, and their logged scalars."""
        try:
            record = self.ranks.merged(merged)
            if not record.phase:
                for part in merged.parts.values():
                    self._batches.add(part.batches)
                self._loss.add(record.step, record.scalars)
                self._record_logged(record.step, record.wall_time, record.scalars)
            if record.layout is not NO_LAYOUT:
                record.loss_tag = self._loss.tag
                self._record(record)
        finally:
            self.ranks.note_recorded(merged)

    def _write_loss_tag(self, step: int | None) -> None:
        """Write the tag of the loss, or log that no scalar is; None: training has ended."""
        if self._loss_is_written:
            return
        if (message := self._loss.missing(step)) is not None and is_rank_0():
            self._failures.log_once(message)
        if self._loss.tag is not None and self._loss.is_final(step):
            self._loss_is_written = True
            self._log.loss(self._loss.tag, self._loss.delay, self._last_step)

    def write_hyperparameters(
        self, values: Mapping[str, Hyperparameter], metrics: Sequence[str] | None, step: int
    ) -> None:
        """Write hyperparameters, and the tags to show with them; None: those that are logged."""
        self._log.hyperparameters({n: hparams.plain_value(v) for n, v in values.items()}, step)
        session = hparams.session_value(values)
        self._write_values([session], step, time.time(), repeat="hyperparameters")
        self._waiting = values, step + METRICS_AFTER
        if metrics is not None:
            self._write_metrics(metrics)

    def _write_metrics(self, tags: Iterable[str]) -> None:
        """Write the columns of the table of runs, which TensorBoard reads once."""
        if self._waiting is not None:
            value = hparams.experiment_value(self._waiting[0], tags)
            self._write_values([value], self._last_step, time.time(), repeat="metrics")
            self._waiting = None

    def _logged_metrics(self) -> list[str]:
        """Return the tags of the user's scalars, the loss first."""
        return sorted(self._tags, key=lambda tag: (tag != self._loss.tag, tag))[:MAX_METRICS]

    def _record(self, record: StepRecord) -> None:
        """Judge and write a step."""
        record.clipped_fraction = self._clipped_fraction.after(record)
        written = self._input_rows.added(record.recorded())
        with self._failures.contained("to write the run log"):
            self._log.step(written)  # before its alerts, which need the random state
        if not record.phase:
            if record.step == 0:
                self._write_values(self._dashboard.first_values(), 0, record.wall_time)
            record.loss_delay = self._loss.delay
            self._layout, self._last_step = record.layout, record.step
            self._on_step(record)
            self._report(self._judge.judge(record), record.wall_time)
            self._request_steps(record)
        step, wall_time, late = self._dashboard.rates.late_values(written)
        if late:
            self._write_values(late, step, wall_time, droppable=True)
        self._write_logged(record.step, record.wall_time, self._dashboard.costs_of(written))
        # Deep models have tens of thousands of values, of which only a few are in memory at a time.
        values = chain.from_iterable(self._dashboard.values_of(written))
        while some := list(islice(values, VALUES_AT_ONCE)):
            self._write_values(some, record.step, record.wall_time, droppable=True)
        if not record.phase:
            self._write_loss_tag(record.step)
            if self._waiting is not None and record.step >= self._waiting[1]:
                self._write_metrics(self._logged_metrics())

    def _request_steps(self, record: StepRecord) -> None:
        """Pass the requests of the rules on to the schedule, or to those of all ranks."""
        self._schedule.loss_tag = self._loss.tag
        count = self._judge.request(self._schedule, record)
        if count and not self.ranks.request_full(record.step):
            self._schedule.request_full(record.step + 2, count)

    def _report(self, alerts: Iterable[Alert], wall_time: float) -> None:
        for alert in alerts:
            alert = located(alert, self._layout)
            if alert.batches:
                known = {
                    batch.step: self._batches.of(batch.step) or (batch,) for batch in alert.batches
                }
                alert = replace(alert, batches=tuple(chain.from_iterable(known.values())))
            level = logging.INFO if alert.stage == "resolved" else _LEVELS[alert.severity]
            if is_rank_0():
                log.log(level, "%s: %s", alert.title, printable_lines(alert.news))
            with self._failures.contained("to write an alert"):
                self._log.alert(alert, wall_time)
                values = self._dashboard.alert_values(alert)
                self._write_values(values, alert.step, wall_time, flush=True)
            with self._failures.contained("to call on_alert", of=BaseException):
                self._on_alert(alert)

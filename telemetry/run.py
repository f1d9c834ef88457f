"""One run of a logger: what is captured of a model, what the rules find, and all its files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from threading import Thread
from typing import Any

import torch
from torch import nn
from torch.utils import tensorboard

from telemetry.alert import Alert, TelemetryAlert
from telemetry.arguments import Options, log_dir_of
from telemetry.budget import Budget
from telemetry.capture import Capture
from telemetry.directory_claim import DirectoryClaim
from telemetry.events.background import each_within
from telemetry.events.file_writer import FileWriter
from telemetry.events.given_writer import GivenWriter
from telemetry.events.plain_files import PlainFiles
from telemetry.events.summary_writer import SummaryWriter
from telemetry.faults import Faults
from telemetry.first_rank import is_first_rank
from telemetry.flight import FlightRecorder
from telemetry.host_copy import HostCopy
from telemetry.page_format import new_session_id
from telemetry.pipeline import CLOSE_TIMEOUT_S, Pipeline
from telemetry.processing import LoggedScalars, Processor, ReadyValues
from telemetry.resuming import STATE_FORMAT, LaterSteps, checked_state, resolved
from telemetry.writing import links
from telemetry.writing.alert_file import AlertFile
from telemetry.writing.board import Board

log = logging.getLogger("telemetry")

_FLUSH_S = 0.75
"""A step waits in the pipeline, and on the page for as long, before it comes to the writer; two
seconds later it is in the file."""

_HAND_ON_S = 30.0
"""The longest time for which a flush of the writer makes its caller wait for us."""


class Run:
    """The capture, the background thread and the files of one logger.

    Args:
        model: The model in training; held weakly.
        writer: The user's ``SummaryWriter``, which stays open, or a log directory or URL.
        options: What to do.
        close: Closes the logger. Called when another one replaces it, when the model is
            garbage-collected, and when the process exits; until then it keeps the logger.

    Attributes:
        capture: Watches the model.
        faults: Where failures are reported.
    """

    def __init__(
        self, model: nn.Module, writer: object, options: Options, close: Callable[[], None]
    ) -> None:
        options.check(model)
        log_dir = log_dir_of(writer)
        self._claim = DirectoryClaim(model, log_dir, close)
        first_step = resolved(options.first_step, log_dir)
        self.faults = Faults()
        self._writer = _open_writer(writer, first_step)
        self._claim.hold(writer if isinstance(self._writer, GivenWriter) else self._writer)
        self._on_alert = options.on_alert
        self._alerts: list[Alert] = []
        self._to_raise: Alert | None = None
        self._ended = False
        self._later_steps = LaterSteps(self.log_dir, self.faults)
        if first_step > 0:
            self._later_steps.expect_them()
        self._files = PlainFiles(self.log_dir)
        session = new_session_id()
        self._alert_file = AlertFile(self.log_dir, session=session, files=self._files)
        self._flight = FlightRecorder(
            self.log_dir,
            seed=torch.initial_seed(),
            faults=self.faults,
            write=self._files.write_whole,
        )
        self._board = Board(pictures=options.content.images, session_id=session)
        self._pipeline = self._make_pipeline(options)
        self.capture = self._make_capture(model, options, first_step)
        # Unlike atexit, it also runs in a process of multiprocessing, and before the writer's own,
        # which has the priority 0.
        self._finalizer = Finalize(model, close, exitpriority=10)

    def _make_pipeline(self, options: Options) -> Pipeline:
        processor = Processor(
            board=self._board,
            sink=self._writer,
            rules=options.rules,
            observers=(self._flight, self._later_steps),
            on_alert=self._note_alert,
            full_steps=options.full_steps,
            faults=self.faults,
        )
        if isinstance(self._writer, GivenWriter):
            self._writer.call_before_flush(self._hand_on)
        return Pipeline(processor, options.full_steps, self.faults)

    def _make_capture(self, model: nn.Module, options: Options, first_step: int) -> Capture:
        if options.budget is not None:
            options.budget.entered = self._log_costs
        return Capture(
            model,
            selection=options.selection,
            full_steps=options.full_steps,
            content=options.content,
            deliver=self._pipeline.submit,
            safe_point=self.raise_if_asked,
            primary=options.optimizer,
            faults=self.faults,
            first_step=first_step,
            budget=options.budget,
        )

    def start(self) -> None:
        """Put the hooks on the model, and write what a reader needs first."""
        self.capture.attach()
        self.write(self._board.first_values())
        links.log_once(self.log_dir)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._finalizer.still_active()

    @property
    def log_dir(self) -> str:
        """The log directory or URL."""
        return self._writer.get_logdir()

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts so far, oldest first; waits until the rules have seen all steps so far."""
        self._pipeline.flush()
        return tuple(self._alerts)

    def write(self, values: Sequence[bytes]) -> None:
        """Write values as they are, at the current step."""
        step = self.capture.step
        self._pipeline.submit_logged(ReadyValues(step=step, wall_time=time.time(), values=values))

    def log(self, values: Mapping[str, float | HostCopy], step: int) -> None:
        """Write scalars that the user logged; the rules see them, too."""
        self._pipeline.submit_logged(LoggedScalars(step=step, wall_time=time.time(), values=values))

    def raise_if_asked(self) -> None:
        """Raise the first alert, if the user asked for that.

        Raises:
            TelemetryAlert: There is one.
        """
        if self._to_raise is not None and not self._pipeline.on_own_thread():
            alert, self._to_raise = self._to_raise, None
            raise TelemetryAlert(alert)

    # --- resuming ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`telemetry.HookLogger.state_dict`."""
        capture = self.capture.state_dict()
        return {"format": STATE_FORMAT, **capture, **self._pipeline.state_dict(capture["step"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`telemetry.HookLogger.load_state_dict`."""
        usable, misfits = checked_state(state)
        if self.closed:
            raise ValueError("HookLogger.load_state_dict(): the logger is closed; make a new one")
        self._later_steps.expect_them()
        attached = self.capture.attached
        self.capture.detach()
        self._pipeline.flush()
        self.capture.load_state_dict(usable)
        if isinstance(self._writer, FileWriter):
            self._writer.purge(self.capture.step)
        misfits += self._pipeline.load_state_dict(usable, self.capture.step)
        if attached:
            self.capture.attach()
        if misfits:
            log.warning("telemetry: load_state_dict() left out %s", "; ".join(misfits))

    # --- its end -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the rules have seen all steps so far and all is written; at most a minute."""
        each_within(CLOSE_TIMEOUT_S, self._pipeline.flush, self._files.flush, self._writer.flush)

    def note_exception(self, exception: BaseException, timeout_s: float) -> None:
        """The training ends in an exception; its flight file is written."""
        if is_first_rank():
            self._pipeline.flush(timeout_s)
            self._flight.on_exception(exception, self.capture.step)
        self.capture.detach()  # the exception is reason enough for a run without steps

    def close(self, timeout_s: float) -> None:
        """Remove all hooks, write what waits, and log what was lost. Harmless when repeated.

        Args:
            timeout_s: For everything together, in seconds.
        """
        self._finalizer.cancel()
        self.capture.end()
        if self._pipeline.on_own_thread():  # on_alert closes; the rules see the rest afterwards
            Thread(target=self._end, args=(timeout_s,), name="telemetry-close").start()
        else:
            self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        if not self._ended:
            each_within(
                timeout_s,
                self._pipeline.close,
                lambda left_s: self._flight.close(),
                self._files.close,
                self._writer.close,
            )
            self._claim.release()
            self._ended = True

    # --- called by the parts -------------------------------------------------------------------

    def _hand_on(self) -> None:
        """Write what waits before someone else flushes or closes the writer."""
        if not self._pipeline.is_late:
            self._pipeline.flush(_HAND_ON_S)

    def _log_costs(self, budget: Budget, step: int) -> None:
        self.log(budget.scalars(), step)
        news = budget.news()
        if news is not None:
            log.warning("telemetry: %s", news)

    def _note_alert(self, alert: Alert, wall_time: float) -> None:
        self._alerts.append(alert)
        if is_first_rank():
            self._flight.on_alert(alert)
            with self.faults.contained("to append to alerts.jsonl"):
                self._alert_file.write(alert, wall_time)
        if self._on_alert == "raise":
            if alert.stage != "end" and alert.severity != "note":
                self._to_raise = self._to_raise or alert
        elif self._on_alert is not None:
            self._on_alert(alert)


def _open_writer(writer: object, first_step: int) -> FileWriter | GivenWriter:
    if isinstance(writer, tensorboard.SummaryWriter):
        return GivenWriter(writer)
    log_dir = log_dir_of(writer)
    try:
        opened = SummaryWriter(log_dir, purge_step=first_step or None, flush_secs=_FLUSH_S)
    except OSError as error:
        raise type(error)(f"HookLogger(writer={log_dir!r}): cannot be written: {error}") from error
    return opened._get_file_writer()

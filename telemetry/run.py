"""What becomes of a run's steps: rules see them, their values are written, alerts are reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import Any

import torch
from torch.utils import tensorboard

from telemetry.alert import Alert, TelemetryAlert
from telemetry.arguments import OnAlert, log_dir_of
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
from telemetry.resuming import LaterSteps
from telemetry.rule import Rule
from telemetry.writing.alert_file import AlertFile
from telemetry.writing.board import Board

_FLUSH_S = 0.75
"""A step waits in the pipeline, and on the page for as long, before it comes to the writer; two
seconds later it is in the file."""

_HAND_ON_S = 30.0
"""The longest time for which a flush of the writer makes its caller wait for us."""


class Run:
    """The background thread of one logger and all files that it writes.

    Args:
        writer: The user's ``SummaryWriter``, which stays open, or a log directory or URL.
        rules: Look at each step.
        on_alert: As in :class:`telemetry.HookLogger`.
        pictures: Whether pictures are drawn.
        first_step: The number of the first step; TensorBoard hides earlier data from it on.
        faults: Where failures are reported.

    Attributes:
        pipeline: Takes steps and what the user logs.
        writer: Writes the event file.
        later_steps: Warns if the directory holds later steps.
    """

    def __init__(
        self,
        writer: object,
        *,
        rules: Sequence[Rule],
        on_alert: OnAlert,
        pictures: bool,
        first_step: int,
        faults: Faults,
    ) -> None:
        self.writer = _open_writer(writer, first_step)
        self._on_alert = on_alert
        self._faults = faults
        self._alerts: list[Alert] = []
        self._to_raise: Alert | None = None
        self._ended = False
        self.later_steps = LaterSteps(self.log_dir, faults)
        if first_step > 0:
            self.later_steps.expect_them()
        session = new_session_id()
        self._files = PlainFiles(self.log_dir)
        self._alert_file = AlertFile(self.log_dir, session=session, files=self._files)
        self._flight = FlightRecorder(
            self.log_dir, seed=torch.initial_seed(), faults=faults, write=self._files.write_whole
        )
        self._board = Board(pictures=pictures, session_id=session)
        processor = Processor(
            board=self._board,
            sink=self.writer,
            rules=rules,
            observers=(self._flight.on_step, self.later_steps.on_step),
            on_alert=self._note_alert,
            faults=faults,
        )
        self.pipeline = Pipeline(processor, faults)
        if isinstance(self.writer, GivenWriter):
            self.writer.call_before_flush(self._hand_on)

    @property
    def log_dir(self) -> str:
        """The log directory or URL."""
        return self.writer.get_logdir()

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts so far, oldest first; waits until the rules have seen all steps so far."""
        self.pipeline.flush()
        return tuple(self._alerts)

    def begin(self, step: int) -> None:
        """Write what a reader needs first."""
        self.write(self._board.first_values(), step)

    def write(self, values: Sequence[bytes], step: int) -> None:
        """Write values as they are."""
        self.pipeline.submit_logged(ReadyValues(step=step, wall_time=time.time(), values=values))

    def log(self, values: Mapping[str, float | HostCopy], step: int) -> None:
        """Write scalars that the user logged; the rules see them, too."""
        self.pipeline.submit_logged(LoggedScalars(step=step, wall_time=time.time(), values=values))

    def raise_if_asked(self) -> None:
        """Raise the first alert, if the user asked for that.

        Raises:
            TelemetryAlert: There is one.
        """
        if self._to_raise is not None and not self.pipeline.on_own_thread():
            alert, self._to_raise = self._to_raise, None
            raise TelemetryAlert(alert)

    def load_state(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Let the rules continue from there, at ``step``.

        Returns:
            What did not fit, in words.
        """
        if isinstance(self.writer, FileWriter):
            self.writer.purge(step)
        return self.pipeline.load_state_dict(state, step)

    # --- its end -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the rules have seen all steps so far and all is written; at most a minute."""
        each_within(CLOSE_TIMEOUT_S, self.pipeline.flush, self._files.flush, self.writer.flush)

    def note_exception(self, exception: BaseException, step: int) -> None:
        """The training ends in an exception during ``step``; its flight file is written."""
        if is_first_rank():
            self.pipeline.flush()
            self._flight.on_exception(exception, step)

    def close(self, timeout_s: float, then: Callable[[], None]) -> None:
        """Write what waits and log what was lost, within one time limit. Harmless when repeated.

        Args:
            timeout_s: For everything together, in seconds.
            then: Called at the end.
        """
        if self.pipeline.on_own_thread():  # on_alert closes; the rules see the rest afterwards
            Thread(target=self._end, args=(timeout_s, then), name="telemetry-close").start()
        else:
            self._end(timeout_s, then)

    def _end(self, timeout_s: float, then: Callable[[], None]) -> None:
        if not self._ended:
            each_within(
                timeout_s,
                self.pipeline.close,
                lambda left_s: self._flight.close(),
                self._files.close,
                self.writer.close,
            )
            then()
            self._ended = True

    def _hand_on(self) -> None:
        """Write what waits before someone else flushes or closes the writer."""
        if not self.pipeline.is_late:
            self.pipeline.flush(_HAND_ON_S)

    def _note_alert(self, alert: Alert, wall_time: float) -> None:
        self._alerts.append(alert)
        if is_first_rank():
            self._flight.on_alert(alert)
            with self._faults.contained("to append to alerts.jsonl"):
                self._alert_file.write(alert, wall_time)
        if self._on_alert == "raise":
            if alert.stage != "end":
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

"""The files of one run: its event file, its alerts, the steps around a fault."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils import tensorboard

from telemetry.alert import Alert
from telemetry.events.background import each_within
from telemetry.events.file_writer import FileWriter
from telemetry.events.given_writer import GivenWriter
from telemetry.events.late_writer import LateWriter, NoWriter
from telemetry.events.plain_files import PlainFiles
from telemetry.events.summary_writer import SummaryWriter
from telemetry.failures import Failures
from telemetry.first_rank import Role, may_be_any_rank
from telemetry.flight import FlightRecorder
from telemetry.page_format import new_session_id
from telemetry.run.arguments import FirstStep, log_dir_of
from telemetry.run.claim import DirectoryClaim
from telemetry.run.resuming import resolved
from telemetry.writing.alert_file import AlertFile

_FLUSH_S = 0.75
"""A step waits in the pipeline, and on the page for as long, before it comes to the writer; two
seconds later it is in the file."""


class RunFiles:
    """Opens the files of one logger, and claims their directory.

    Args:
        role: What this process does; if it may be another one, values wait until
            :meth:`open_for`.
        close: Closes the logger, when another one takes its place.
        before_flush: Called before somebody else flushes or closes the user's writer.

    Attributes:
        session_id: Of this part of the run, another one for each logger.
        first_step: Its number, as the files of a resumed run say.

    Raises:
        OSError: The directory cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        writer: object,
        first_step: FirstStep,
        *,
        role: Role,
        close: Callable[[], None],
        before_flush: Callable[[], None],
        failures: Failures,
    ) -> None:
        self._given = writer if isinstance(writer, tensorboard.SummaryWriter) else None
        log_dir = log_dir_of(writer, written=role.writes)
        self._log_dir = log_dir if self._given is not None else role.directory(log_dir)
        self.session_id = new_session_id()
        self._process_id = os.getpid()
        self._before_flush = before_flush
        self._failures = failures
        self._claim = DirectoryClaim(model, self._log_dir, close)
        self.first_step = resolved(first_step, self._log_dir)
        self._late = LateWriter(self._log_dir) if may_be_any_rank() else None
        self.writer: FileWriter | GivenWriter | NoWriter = self._late or self._open(role)
        self._plain = PlainFiles(self.log_dir)
        self._alerts = AlertFile(self.log_dir, session=self.session_id, files=self._plain)
        self.flight = FlightRecorder(
            self.log_dir,
            seed=torch.initial_seed(),
            failures=failures,
            write=self._plain.write_whole,
        )

    def _open(self, role: Role) -> FileWriter | GivenWriter | NoWriter:
        if not role.writes:
            return NoWriter(self._log_dir)
        if self._given is not None:
            self._claim.hold(self._given)
            given = GivenWriter(self._given)
            given.call_before_flush(self._before_flush)
            return given
        first = self.first_step or None
        try:
            opened = SummaryWriter(self._log_dir, purge_step=first, flush_secs=_FLUSH_S)
        except OSError as error:
            raise type(error)(
                f"HookLogger(writer={self._log_dir!r}): the log directory cannot be "
                f"written: {error}"
            ) from error
        file_writer = opened._get_file_writer()
        self._claim.hold(file_writer)
        return file_writer

    @property
    def log_dir(self) -> str:
        return self.writer.get_logdir()

    @property
    def is_undecided(self) -> bool:
        """Whether nobody has told so far if this process writes."""
        return self._late is not None

    def open_for(self, role: Role) -> None:
        """What this process does is known now: open the event file, or leave it to another."""
        if self._late is not None:
            self.writer = self._open(role)
            self._late.use(self.writer)
            self._late = None
        elif not (role.writes or isinstance(self.writer, NoWriter)):
            former, self.writer = self.writer, self._open(role)
            former.close()

    def purge(self, step: int) -> None:
        """Hide what was logged for this step and later ones, in a directory of our own."""
        if isinstance(self.writer, FileWriter):
            self.writer.purge(step)

    def write_alert(self, alert: Alert, wall_time: float) -> None:
        """Append to ``alerts.jsonl``, and have the steps before it written."""
        self.flight.on_alert(alert)
        with self._failures.contained("to append to alerts.jsonl"):
            self._alerts.write(alert, wall_time)

    @property
    def is_about_to_close(self) -> bool:
        """Whether the user's writer is being closed."""
        return isinstance(self.writer, GivenWriter) and self.writer.is_about_to_close

    def write_end(self, step: int, values: Sequence[bytes]) -> None:
        """Write that the run is closed, so that nobody waits for more or takes it for killed.

        What is recorded afterwards makes it void. A writer that its user has closed stays closed,
        and a fork of the process that trained has nothing to say.
        """
        is_open = not isinstance(self.writer, GivenWriter) or self.writer.is_open
        if values and is_open and os.getpid() == self._process_id:
            with self._failures.contained("to write that the run has ended"):
                self.writer.write_values(
                    values, step, time.time(), droppable=False, flush=False, repeat=()
                )

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, or has failed; False if that takes longer."""
        return False not in each_within(timeout_s, self._plain.flush, self.writer.flush)

    def close(self, timeout_s: float) -> None:
        """Write what waits, and give the directory up."""
        self.flight.close()
        each_within(timeout_s, self._plain.close, self.writer.close)
        self._claim.release()

"""The files of one run: its event file, its alerts, the steps around a fault."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import tensorboard

from telemetry.alert import Alert
from telemetry.events.background import each_within
from telemetry.events.file_writer import FileWriter
from telemetry.events.given_writer import GivenWriter
from telemetry.events.page_format import encode_alert, new_session_id
from telemetry.events.plain_files import PlainFiles
from telemetry.events.summary_writer import SummaryWriter
from telemetry.failures import Failures
from telemetry.flight import FlightRecorder
from telemetry.ranks.role import Role, may_be_any_rank
from telemetry.run.arguments import FirstStep, log_dir_of
from telemetry.run.claim import DirectoryClaim
from telemetry.run.resuming import resolved

# A step waits in the pipeline, and on the page for as long, before it comes to the writer; two
# seconds later it is in the file.
_FLUSH_S = 0.75


class RunFiles:
    """Opens the files of one logger, and claims their directory.

    Args:
        role: What this process does; if it may be another one, values wait until
            :meth:`open_for`.
        close: Closes the logger, when another one takes its place.
        before_flush: Called before somebody else flushes or, if True, closes the user's writer.

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
        before_flush: Callable[[bool], None],
        failures: Failures,
    ) -> None:
        self._given = writer if isinstance(writer, tensorboard.SummaryWriter) else None
        log_dir = log_dir_of(writer, written=role.writes)
        self.log_dir = log_dir if self._given is not None else role.directory(log_dir)
        self.session_id = new_session_id()  # of this part of the run, other for each logger
        self._process_id = os.getpid()
        self._before_flush = before_flush
        self._failures = failures
        self._claim = DirectoryClaim(model, self.log_dir, close)
        self.first_step = resolved(first_step, self.log_dir)
        self.is_undecided = may_be_any_rank()  # nobody has told so far if this process writes
        self._waiting: list[tuple[Sequence[bytes], int, float, dict[str, Any]]] = []
        self._writer = None if self.is_undecided else self._open(role)
        self._has_ended = False
        self._plain = PlainFiles(self.log_dir)
        self.flight = FlightRecorder(
            self.log_dir,
            seed=torch.initial_seed(),
            failures=failures,
            write=self._plain.write_whole,
        )

    def _open(self, role: Role) -> FileWriter | GivenWriter | None:
        if not role.writes:
            return None
        if self._given is not None:
            self._claim.hold(self._given)
            return GivenWriter(self._given, self._before_flush)
        first = self.first_step or None
        try:
            opened = SummaryWriter(self.log_dir, purge_step=first, flush_secs=_FLUSH_S)
        except OSError as error:
            raise type(error)(
                f"HookLogger(writer={self.log_dir!r}): the log directory cannot be written: {error}"
            ) from error
        file_writer = opened._get_file_writer()
        self._claim.hold(file_writer)
        return file_writer

    def open_for(self, role: Role) -> None:
        """What this process does is known now: open the event file, or leave it to another."""
        if self.is_undecided:
            writer = self._open(role)
            if writer is not None:
                for values, step, wall_time, how in self._waiting:
                    writer.write_values(values, step, wall_time, **how)
            self._writer, self._waiting, self.is_undecided = writer, [], False
        elif self._writer is not None and not role.writes:
            former, self._writer = self._writer, None
            former.close()

    def write_values(
        self, values: Sequence[bytes], step: int, wall_time: float, /, **how: Any
    ) -> None:
        """As :class:`~telemetry.events.sink.Sink` says, if this process writes."""
        self._has_ended = False
        if self.is_undecided:
            self._waiting.append((values, step, wall_time, how))
        elif self._writer is not None:
            self._writer.write_values(values, step, wall_time, **how)

    def purge(self, step: int) -> None:
        """Hide what was logged for this step and later ones, in a directory of our own."""
        if isinstance(self._writer, FileWriter):
            self._writer.purge(step)

    def write_alert(self, alert: Alert, wall_time: float) -> None:
        """Append to ``alerts.jsonl``, and have the steps before it written.

        A line has the alert's fields, the session of the page, and when the step ended in seconds
        since the epoch. Remote directories have no such file.
        """
        self.flight.on_alert(alert)
        if "://" not in self.log_dir:
            with self._failures.contained("to append to alerts.jsonl"):
                line = encode_alert(alert, {"session": self.session_id, "wall_time": wall_time})
                self._plain.append_line(Path(self.log_dir, "alerts.jsonl"), line)

    def write_end(self, step: int, values: Sequence[bytes]) -> None:
        """Write that the run is closed, so that nobody waits for more or takes it for killed.

        What is recorded afterwards makes it void; if nothing was, it is not written again. A fork
        of the process that trained has nothing to say.
        """
        if values and not self._has_ended and os.getpid() == self._process_id:
            with self._failures.contained("to write that the run has ended"):
                self.write_values(
                    values, step, time.time(), droppable=False, flush=False, repeat=()
                )
            self._has_ended = True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, or has failed; False if that takes longer."""
        writers = [self._plain] if self._writer is None else [self._plain, self._writer]
        return False not in each_within(timeout_s, *(writer.flush for writer in writers))

    def close(self, timeout_s: float) -> None:
        """Write what waits, and give the directory up."""
        if os.getpid() == self._process_id:  # in a fork, a lock may never be released
            self.flight.close()
            writers = [self._plain] if self._writer is None else [self._plain, self._writer]
            each_within(timeout_s, *(writer.close for writer in writers))
        self._claim.release()

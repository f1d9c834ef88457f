"""One run of a logger: what is captured of a model, what the rules find, and all its files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from telemetry.events.late_writer import LateWriter, NoWriter
from telemetry.events.plain_files import PlainFiles
from telemetry.events.summary_writer import SummaryWriter
from telemetry.failures import Failures
from telemetry.first_rank import may_be_any_rank, rank_and_world_size, role_of
from telemetry.flight import FlightRecorder
from telemetry.host_copy import HostCopy
from telemetry.page_format import new_session_id
from telemetry.pipeline import CLOSE_TIMEOUT_S, Pipeline
from telemetry.processing import LoggedScalars, Processor, ReadyValues
from telemetry.rank_processing import RankProcessor
from telemetry.ranks.observer import RankObserver
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
        failures: Where failures are reported.
        should_stop: As :attr:`telemetry.HookLogger.should_stop`.
    """

    def __init__(
        self, model: nn.Module, writer: object, options: Options, close: Callable[[], None]
    ) -> None:
        options.check(model)
        known = rank_and_world_size()
        self._role = role_of(options.ranks)
        log_dir = log_dir_of(writer, written=self._role.writes)
        if not isinstance(writer, tensorboard.SummaryWriter):
            log_dir = self._role.directory(log_dir)
        self._claim = DirectoryClaim(model, log_dir, close)
        first_step = resolved(options.first_step, log_dir)
        self.failures = Failures()
        self._late = None if known or not may_be_any_rank() else LateWriter(log_dir)
        self._open = partial(self._open_writer, writer, log_dir, first_step)
        self._writer: FileWriter | GivenWriter | NoWriter = self._late or self._open()
        self._on_alert = options.on_alert
        self._alerts: list[Alert] = []
        self._to_raise: Alert | None = None
        self.should_stop = False
        self._ended = False
        self._later_steps = LaterSteps(self.log_dir, self.failures)
        if first_step > 0:
            self._later_steps.expect_them()
        self._files = PlainFiles(self.log_dir)
        session = new_session_id()
        self._alert_file = AlertFile(self.log_dir, session=session, files=self._files)
        self._flight = FlightRecorder(
            self.log_dir,
            seed=torch.initial_seed(),
            failures=self.failures,
            write=self._files.write_whole,
        )
        self._board = Board(pictures=options.content.images, session_id=session, bulk=options.bulk)
        self._options = options
        self._ranks: RankProcessor | None = None
        self._pipeline = self._make_pipeline(options)
        self.capture = self._make_capture(model, options, first_step)
        if known:
            self._join_ranks()
        # Unlike atexit, it also runs in a process of multiprocessing, and before the writer's own,
        # which has the priority 0.
        self._finalizer = Finalize(model, close, exitpriority=10)

    def _open_writer(
        self, writer: object, log_dir: str, first_step: int
    ) -> FileWriter | GivenWriter | NoWriter:
        if not self._role.writes:
            return NoWriter(log_dir)
        if isinstance(writer, tensorboard.SummaryWriter):
            self._claim.hold(writer)
            given = GivenWriter(writer)
            given.call_before_flush(self._hand_on)
            return given
        try:
            opened = SummaryWriter(log_dir, purge_step=first_step or None, flush_secs=_FLUSH_S)
        except OSError as error:
            raise type(error)(
                f"HookLogger(writer={log_dir!r}): cannot be written: {error}"
            ) from error
        file_writer = opened._get_file_writer()
        self._claim.hold(file_writer)
        return file_writer

    def _make_pipeline(self, options: Options) -> Pipeline:
        self._processor = Processor(
            board=self._board,
            sink=self._writer,
            rules=options.rules,
            observers=(self._flight, self._later_steps),
            on_alert=self._note_alert,
            full_steps=options.full_steps,
            failures=self.failures,
        )
        return Pipeline(self._processor, options.full_steps, self.failures)

    def _make_capture(self, model: nn.Module, options: Options, first_step: int) -> Capture:
        if options.budget is not None:
            options.budget.entered = self._log_costs
        return Capture(
            model,
            selection=options.selection,
            full_steps=options.full_steps,
            content=options.content,
            deliver=self._pipeline.submit,
            safe_point=self.step_ended,
            primary=options.optimizer,
            failures=self.failures,
            first_step=first_step,
            budget=options.budget,
            find_ranks=self._find_ranks,
        )

    def start(self) -> None:
        """Put the hooks on the model, and write what a reader needs first."""
        self.attach()
        self.write(self._board.first_values())
        if self._role.writes:
            links.log_once(self.log_dir)

    def attach(self) -> None:
        """Put the hooks on the model, unless others measure for this process."""
        if self._role.measures:
            self.capture.attach()

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
        self._await_steps(CLOSE_TIMEOUT_S)
        return tuple(self._alerts)

    def write(self, values: Sequence[bytes]) -> None:
        """Write values as they are, at the current step."""
        step = self.capture.step
        self._pipeline.submit_logged(ReadyValues(step=step, wall_time=time.time(), values=values))

    def log(self, values: Mapping[str, float | HostCopy], step: int) -> None:
        """Write scalars that the user logged; the rules see them, too."""
        self._pipeline.submit_logged(LoggedScalars(step=step, wall_time=time.time(), values=values))

    def raise_if_asked(self) -> None:
        """Raise the first alert, or note that training should stop, if the user asked for that.

        Raises:
            TelemetryAlert: There is one.
        """
        if (
            self._ranks is None
            and self._to_raise is not None
            and not self._pipeline.on_own_thread()
        ):
            alert, self._to_raise = self._to_raise, None
            self._stop_for(alert)

    def _stop_for(self, alert: Alert) -> None:
        if self._on_alert == "raise":
            raise TelemetryAlert(alert)
        self.should_stop = True

    def step_ended(self, step: int | None = -1) -> None:
        """Likewise at the end of a step, where ranks that train together all do so.

        Args:
            step: Its number; -1: of the one before the step in progress; None: no other will end.
        """
        if self._ranks is not None:
            alert = self._ranks.to_raise(self.capture.step - 1 if step == -1 else step)
            if alert is not None:
                self._stop_for(alert)
        self.raise_if_asked()

    # --- resuming ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`telemetry.HookLogger.state_dict`."""
        capture = self.capture.state_dict()
        self._await_steps(CLOSE_TIMEOUT_S)
        return {"format": STATE_FORMAT, **capture, **self._pipeline.state_dict(capture["step"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`telemetry.HookLogger.load_state_dict`."""
        usable, misfits = checked_state(state)
        if self.closed:
            raise ValueError("HookLogger.load_state_dict(): the logger is closed; make a new one")
        self._later_steps.expect_them()
        attached = self.capture.attached
        self.capture.detach()
        self._await_steps(CLOSE_TIMEOUT_S)
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
        self._decide()
        each_within(CLOSE_TIMEOUT_S, self._await_steps, self._files.flush, self._writer.flush)

    def note_exception(self, exception: BaseException, timeout_s: float) -> None:
        """The training ends in an exception; its flight file is written."""
        if self._role.writes:
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
            self._decide()
            each_within(
                timeout_s,
                self._end_exchange,
                self._pipeline.close,
                lambda left_s: self._flight.close(),
                self._files.close,
                self._writer.close,
            )
            self._claim.release()
            self._ended = True

    def _await_steps(self, timeout_s: float) -> None:
        """Wait until the rules have seen all steps so far, those of all ranks included."""
        waits: list[Callable[[float], None]] = [self._pipeline.flush]
        if self._ranks is not None and not self._pipeline.on_own_thread():
            waits += [self._ranks.wait, self._pipeline.flush]
        each_within(timeout_s, *waits)

    def _end_exchange(self, timeout_s: float) -> None:
        """Send what other ranks lack, and have what they sent."""
        if self._ranks is not None and self._role.measures:
            self._pipeline.in_turn(self._ranks.send_rest)
            self._ranks.close(timeout_s / 2)

    # --- ranks that train together -------------------------------------------------------------

    def _find_ranks(self) -> RankObserver | None:
        """Join the others, if that was not possible before; nothing has been measured so far."""
        if self._ranks is None and self._role.size == 1:
            self._role = role_of(self._options.ranks)
            self._join_ranks()
        return None if self._ranks is None else self._ranks.observer

    def _decide(self) -> None:
        """Nobody has told so far who writes, so this process does."""
        if self._late is not None:
            with self.failures.contained("to open its files"):
                self._find_ranks()

    def _join_ranks(self) -> None:
        role = self._role
        if self._late is not None or not (role.writes or isinstance(self._writer, NoWriter)):
            former, self._writer = self._writer, self._open()
            if self._late is not None:
                self._late.use(self._writer)
                self._late = None
            else:
                former.close()
        if role.merges:
            self._ranks = RankProcessor(
                rank=role.rank,
                size=role.size,
                recorder=self._processor if role.writes else None,
                hand_over=self._pipeline.submit_logged,
                full_steps=self._options.full_steps,
                current_step=lambda: self.capture.step,
                failures=self.failures,
            )
            self._pipeline.use(self._ranks)
        elif not role.measures:
            self._pipeline.ignore_all()

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
        if self._role.writes:
            self._flight.on_alert(alert)
            with self.failures.contained("to append to alerts.jsonl"):
                self._alert_file.write(alert, wall_time)
        if isinstance(self._on_alert, str):
            if alert.stage != "end" and alert.severity != "note" and self._to_raise is None:
                self._to_raise = alert
                if self._ranks is not None:
                    self._ranks.raise_together(alert)
        elif self._on_alert is not None:
            self._on_alert(alert)

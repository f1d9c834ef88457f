"""One run of a logger: puts capture, background thread, ranks and files together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.util import Finalize
from threading import RLock, Thread
from typing import Any

from torch import nn

from telemetry.alert import Alert
from telemetry.arguments import Options, scalars_of
from telemetry.capture import Capture
from telemetry.events.background import each_within
from telemetry.failures import Failures
from telemetry.first_rank import Role, rank_and_world_size, role_of
from telemetry.host_copy import HostCopy
from telemetry.loss import LossChoice
from telemetry.membership import AlertResponse, Membership
from telemetry.pipeline import (
    CLOSE_TIMEOUT_S,
    LoggedScalars,
    Pipeline,
    Processor,
    ReadyValues,
)
from telemetry.resuming import STATE_FORMAT, LaterSteps, checked_state
from telemetry.run_files import RunFiles
from telemetry.tag_names import RUN
from telemetry.writing import hparams, links
from telemetry.writing.board import Board
from telemetry.writing.hparams import Hyperparameter

log = logging.getLogger("telemetry")

_HAND_ON_S = 30.0
"""The longest time for which a flush of the writer makes its caller wait for us."""
_CHECKPOINT_S = 10.0
"""The longest time for which a checkpoint waits for the disk."""


class Run:
    """What one logger does from its begin to its end.

    Args:
        model: The model in training; held weakly.
        writer: The user's ``SummaryWriter``, which stays open, or a log directory or URL.
        options: What to do.
        close: Closes the logger. Called when another one replaces it, when the model is
            garbage-collected, and when the process exits; until then it keeps the logger.

    Attributes:
        capture: Watches the model.
        failures: Where failures are reported.
    """

    def __init__(
        self, model: nn.Module, writer: object, options: Options, close: Callable[[], None]
    ) -> None:
        options.check(model)
        role_is_final = rank_and_world_size() is not None
        self._options = options
        role = role_of(options.ranks)
        self.failures = Failures()
        self._files = RunFiles(
            model,
            writer,
            options,
            role=role,
            role_is_final=role_is_final,
            close=close,
            before_flush=self._hand_on,
            failures=self.failures,
        )
        self._alerts: list[Alert] = []
        self._ending = RLock()  # a signal handler may close on the thread that closes
        self._ended = False
        self._exception: BaseException | None = None
        resumed = self._files.first_step > 0
        self._later_steps = LaterSteps(self.log_dir, self.failures, expected=resumed)
        self._board = Board(
            pictures=options.content.images,
            session_id=self._files.session_id,
            bulk=options.bulk,
            loss=options.loss,
        )
        self._pipeline = self._make_pipeline(options)
        self._membership = self._make_membership(role)
        self._response = AlertResponse(options.on_alert, self._pipeline, self._membership)
        self.capture = self._make_capture(model, options)
        if role_is_final:
            self._membership.join()
            if (ranks := self._membership.ranks) is not None:
                ranks.observer.standing.look_at(model)
        # Unlike atexit, also in a process of multiprocessing; before the writer's, of priority 0.
        self._finalizer = Finalize(model, close, exitpriority=10)

    def _make_pipeline(self, options: Options) -> Pipeline:
        self._processor = Processor(
            board=self._board,
            sink=self._files,
            rules=options.rules,
            observers=(self._files.flight, self._later_steps),
            on_alert=self._note_alert,
            full_steps=options.full_steps,
            failures=self.failures,
            loss=LossChoice(options.loss),
        )
        return Pipeline(self._processor, self.failures)

    def _make_membership(self, role: Role) -> Membership:
        return Membership(
            role,
            options=self._options,
            files=self._files,
            pipeline=self._pipeline,
            processor=self._processor,
            current_step=lambda: self.capture.step,
            failures=self.failures,
        )

    def _make_capture(self, model: nn.Module, options: Options) -> Capture:
        if options.budget is not None:
            options.budget.entered = self._log_costs
        return Capture(
            model,
            selection=options.selection,
            is_full=options.full_steps,
            content=options.content,
            deliver=self._pipeline.submit,
            safe_point=self._step_ended,
            primary=options.optimizer,
            failures=self.failures,
            first_step=self._files.first_step,
            budget=options.budget,
            find_ranks=self._membership.find,
        )

    def start(self) -> None:
        """Put the hooks on the model, and write what a reader needs first."""
        self.attach()
        self.write(self._board.first_values())
        if self._membership.role.writes:
            links.log_once(self.log_dir)

    def attach(self) -> None:
        """Put the hooks on the model, unless others measure for this process."""
        if self.closed:
            gone = "the model is gone; keep it in a variable of yours"
            why = gone if self.capture.model_is_gone else "the logger is closed; make a new one"
            raise ValueError(f"HookLogger.attach(): {why}")
        if self._membership.role.measures:
            self.capture.attach()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._finalizer.still_active()

    @property
    def log_dir(self) -> str:
        """The log directory or URL."""
        return self._files.log_dir

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts so far, oldest first; waits until the rules have seen all steps so far."""
        self._membership.await_steps(CLOSE_TIMEOUT_S)
        return tuple(self._alerts)

    def write(self, values: Sequence[bytes], of_loss: Callable[[str], bytes] | None = None) -> None:
        """Write values as they are, at the current step, and one when the loss's tag is known."""
        self._pipeline.submit_logged(
            ReadyValues(
                step=self.capture.step, wall_time=time.time(), values=values, of_loss=of_loss
            )
        )

    def hparams(self, values: Mapping[str, Hyperparameter], metrics: Iterable[str] | None) -> None:
        """As :meth:`telemetry.HookLogger.hparams`."""
        if metrics is not None:
            self.write(hparams.values_of(values, metrics))
            return
        session, known = hparams.session_value(values), dict(values)
        self.write([session], lambda loss: hparams.experiment_value(known, [loss]))

    def log(self, scalars: object, more: Sequence[object], named: Mapping[str, object]) -> None:
        """As :meth:`telemetry.HookLogger.log`; the rules see what is logged, too."""
        if self.closed:
            self.failures.log_once("HookLogger.log() after close() writes nothing; call it earlier")
            return
        values, refused = scalars_of(scalars, more, named)
        self._log(values, self.capture.step)
        if refused:
            raise refused[0]
        self._response.act()

    def _log(self, values: Mapping[str, float | HostCopy], step: int) -> None:
        self._pipeline.submit_logged(LoggedScalars(step=step, wall_time=time.time(), values=values))

    @property
    def should_stop(self) -> bool:
        """As :attr:`telemetry.HookLogger.should_stop`."""
        return self._response.should_stop

    def _step_ended(self) -> None:
        """The step before the one in progress has ended: stop training if an alert asks for it."""
        self._response.step_ended(self.capture.step - 1)

    def step(self) -> None:
        """As :meth:`telemetry.HookLogger.step`."""
        if self.capture.attached:
            self.capture.manual_step()
        self._step_ended()

    def training_ended(self) -> None:
        """No other step will end; otherwise like the end of a step."""
        self._response.step_ended(None)

    # --- resuming ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`telemetry.HookLogger.state_dict`."""
        capture = self.capture.state_dict()
        self._membership.await_steps(CLOSE_TIMEOUT_S)
        rules = self._pipeline.state_dict(capture["step"])
        if not self._files.flush(_CHECKPOINT_S):  # a kill must not take what the state counts
            log.warning(
                "telemetry: what was recorded up to the checkpoint at step %d is not written "
                "within %.0f s; if the process is killed now, a run resumed from it lacks that",
                capture["step"],
                _CHECKPOINT_S,
            )
        return {"format": STATE_FORMAT, **capture, **rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`telemetry.HookLogger.load_state_dict`."""
        usable, misfits = checked_state(state)
        if self.closed:
            raise ValueError("HookLogger.load_state_dict(): the logger is closed; make a new one")
        self._later_steps.expect_them()
        attached = self.capture.attached
        self.capture.detach()
        self._membership.await_steps(CLOSE_TIMEOUT_S)
        self.capture.load_state_dict(usable)
        self._files.purge(self.capture.step)
        misfits += self._pipeline.load_state_dict(usable, self.capture.step)
        if attached:
            self.capture.attach()
        if misfits:
            log.warning("telemetry: load_state_dict() left out %s", "; ".join(misfits))

    # --- its end -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the rules have seen all steps so far and all is written; at most a minute."""
        self._membership.decide()
        each_within(CLOSE_TIMEOUT_S, self._membership.await_steps, self._files.flush)

    def note_exception(self, exception: BaseException, timeout_s: float) -> None:
        """The training ends in an exception; its flight file is written."""
        self._exception = exception
        if self._membership.role.writes:
            self._pipeline.flush(timeout_s)
            self._files.flight.on_exception(exception, self.capture.step)
        self.capture.detach()  # the exception is reason enough for a run without steps

    def close(self, timeout_s: float) -> None:
        """Remove all hooks, write what waits, and log what was lost. Harmless when repeated.

        Args:
            timeout_s: For everything together, in seconds.
        """
        self._finalizer.cancel()
        if self._pipeline.on_own_thread():  # on_alert closes; the rules see the rest afterwards
            Thread(target=self._end_once, args=(timeout_s,), name="telemetry-close").start()
        else:
            self._end_once(timeout_s)

    def _end_once(self, timeout_s: float) -> None:
        """End the run, or wait until another thread has done so."""
        if self._ending.acquire(timeout=timeout_s):
            try:
                self._end(timeout_s)
            finally:
                self._ending.release()

    def _end(self, timeout_s: float) -> None:
        if not self._ended:
            self.capture.end()
            self._membership.decide()
            each_within(
                timeout_s,
                self._membership.end_exchange,
                self._pipeline.close,
                lambda left_s: self._write_end(),
                self._files.close,
            )
            self._exception = None  # its frames hold the model
            self._ended = True

    def _write_end(self) -> None:
        self._files.write_end(*self._board.end_values(self._exception))

    # --- called by the parts -------------------------------------------------------------------

    def _hand_on(self, closing: bool) -> None:
        """Write what waits before someone else flushes or closes the writer."""
        if not self._pipeline.is_late:
            self._pipeline.flush(_HAND_ON_S)
        if closing:
            self._write_end()

    def _log_costs(self, curves: Mapping[str, float], step: int) -> None:
        self._log({RUN + name: value for name, value in curves.items()}, step)

    def _note_alert(self, alert: Alert, wall_time: float) -> None:
        self._alerts.append(alert)
        if self._membership.role.writes:
            self._files.write_alert(alert, wall_time)
        self._response.note(alert)

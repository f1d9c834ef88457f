"""One run of a logger: puts capture, background thread, ranks and files together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.util import Finalize
from threading import RLock, Thread
from typing import Any

from torch import nn
from torch.optim import Optimizer

from telemetry.alert import Alert, TelemetryAlert
from telemetry.capture import Budget, Capture, Content
from telemetry.events.background import each_within
from telemetry.failures import Failures
from telemetry.first_rank import Ranks, rank_and_world_size, role_of
from telemetry.loss import LossChoice
from telemetry.pipeline import (
    CLOSE_TIMEOUT_S,
    FullSteps,
    LoggedScalars,
    Pipeline,
    Processor,
    ReadyValues,
)
from telemetry.rank_processing import RankProcessor
from telemetry.ranks.observer import RankObserver
from telemetry.rule import Rule
from telemetry.run.arguments import FirstStep, OnAlert, scalars_of
from telemetry.run.files import RunFiles
from telemetry.run.resuming import STATE_FORMAT, LaterSteps, checked_state
from telemetry.selection import Selection
from telemetry.tag_names import RUN
from telemetry.torch_private.host_copy import HostCopy
from telemetry.writing import hparams, links
from telemetry.writing.board import Board
from telemetry.writing.bulk import Bulk
from telemetry.writing.hparams import Hyperparameter

log = logging.getLogger("telemetry")

_HAND_ON_S = 30.0
"""The longest time for which a flush of the writer makes its caller wait for us."""
_CHECKPOINT_S = 10.0
"""The longest time for which a checkpoint waits for the disk."""


class Run:
    """What a :class:`telemetry.HookLogger` that is not off does from its begin to its end.

    Args:
        model: The model in training; held weakly.
        writer: The user's ``SummaryWriter``, which stays open, or a log directory or URL.
        close: Closes the logger. Called when another one replaces it, when the model is
            garbage-collected, and when the process exits; until then it keeps the logger.

    Attributes:
        capture: Watches the model.
        should_stop: Whether an alert asks for the end of training.
    """

    def __init__(
        self,
        model: nn.Module,
        writer: object,
        close: Callable[[], None],
        *,
        full_steps: FullSteps,
        budget: Budget | None,
        optimizer: Optimizer | None,
        selection: Selection,
        content: Content,
        bulk: Bulk,
        rules: Sequence[Rule],
        on_alert: OnAlert,
        first_step: FirstStep,
        ranks: Ranks,
        loss: str | None,
    ) -> None:
        role_is_final = rank_and_world_size() is not None
        self._role = role_of(ranks)
        self._ranks: RankProcessor | None = None  # None: nothing is exchanged with other ranks
        self._full_steps = full_steps
        self._on_alert = on_alert
        self._alerts: list[Alert] = []
        self._pending: Alert | None = None  # the first that is to stop training
        self.should_stop = False
        self._ending = RLock()  # a signal handler may close on the thread that closes
        self._ended = False
        self._exception: BaseException | None = None
        self._failures = Failures()
        self._files = RunFiles(
            model,
            writer,
            first_step,
            role=self._role,
            role_is_final=role_is_final,
            close=close,
            before_flush=self._hand_on,
            failures=self._failures,
        )
        resumed = self._files.first_step > 0
        self._later_steps = LaterSteps(self.log_dir, self._failures, expected=resumed)
        self._board = Board(
            pictures=content.images, session_id=self._files.session_id, bulk=bulk, loss=loss
        )
        self._processor = Processor(
            board=self._board,
            sink=self._files.writer,
            rules=rules,
            observers=(self._files.flight, self._later_steps),
            on_alert=self._note_alert,
            full_steps=full_steps,
            failures=self._failures,
            loss=LossChoice(loss),
        )
        self._pipeline = Pipeline(self._processor, self._failures)
        if budget is not None:
            budget.entered = self._log_costs
        self.capture = Capture(
            model,
            selection=selection,
            is_full=full_steps,
            content=content,
            deliver=self._pipeline.submit,
            safe_point=self._step_ended,
            primary=optimizer,
            failures=self._failures,
            first_step=self._files.first_step,
            budget=budget,
            find_ranks=self._find_ranks,
        )
        if role_is_final:
            self._join_ranks()
            if self._ranks is not None:
                self._ranks.observer.standing.look_at(model)
        # Unlike atexit, also in a process of multiprocessing; before the writer's, of priority 0.
        self._finalizer = Finalize(model, close, exitpriority=10)

    def start(self) -> None:
        """Put the hooks on the model, and write what a reader needs first."""
        self.attach()
        self._write(self._board.first_values())
        if self._role.writes:
            links.log_once(self.log_dir)

    def attach(self) -> None:
        """Put the hooks on the model, unless others measure for this process."""
        if self._closed:
            gone = "the model is gone; keep it in a variable of yours"
            why = gone if self.capture.model_is_gone else "the logger is closed; make a new one"
            raise ValueError(f"HookLogger.attach(): {why}")
        if self._role.measures:
            self.capture.attach()

    @property
    def _closed(self) -> bool:
        return not self._finalizer.still_active()

    @property
    def log_dir(self) -> str:
        return self._files.log_dir

    # --- what is logged ------------------------------------------------------------------------

    def log(self, scalars: object, more: Sequence[object], named: Mapping[str, object]) -> None:
        if self._closed:
            message = "HookLogger.log() after close() writes nothing; call it earlier"
            self._failures.log_once(message)
            return
        values, refused = scalars_of(scalars, more, named)
        self._log(values, self.capture.step)
        if refused:
            raise refused[0]
        if self._ranks is None:
            self.stop_if_asked(self.capture.step)

    def _log(self, values: Mapping[str, float | HostCopy], step: int) -> None:
        self._pipeline.submit_logged(LoggedScalars(step=step, wall_time=time.time(), values=values))

    def _log_costs(self, curves: Mapping[str, float], step: int) -> None:
        self._log({RUN + name: value for name, value in curves.items()}, step)

    def hparams(self, values: Mapping[str, Hyperparameter], metrics: Iterable[str] | None) -> None:
        if metrics is not None:
            self._write(hparams.values_of(values, metrics))
            return
        session, known = hparams.session_value(values), dict(values)
        self._write([session], lambda loss: hparams.experiment_value(known, [loss]))

    def _write(
        self, values: Sequence[bytes], of_loss: Callable[[str], bytes] | None = None
    ) -> None:
        """Write values as they are, at the current step, and one when the loss's tag is known."""
        self._pipeline.submit_logged(
            ReadyValues(
                step=self.capture.step, wall_time=time.time(), values=values, of_loss=of_loss
            )
        )

    def _hand_on(self) -> None:
        """Write what waits before someone else flushes or closes the writer."""
        if not self._pipeline.is_late:
            self._pipeline.flush(_HAND_ON_S)
        if self._files.is_about_to_close:
            self._write_end()

    # --- ranks that train together -------------------------------------------------------------

    def _find_ranks(self) -> RankObserver | None:
        """Join the others, if that was not possible before; nothing has been measured so far."""
        if self._ranks is None and self._role.size == 1:
            self._role = role_of(self._role.ranks)
            self._join_ranks()
        return None if self._ranks is None else self._ranks.observer

    def _join_ranks(self) -> None:
        """Do what the role says, which is final."""
        self._files.open_for(self._role)
        if self._role.merges:
            self._ranks = self._pipeline.processor = RankProcessor(
                rank=self._role.rank,
                size=self._role.size,
                recorder=self._processor if self._role.writes else None,
                full_steps=self._full_steps,
                current_step=lambda: self.capture.step,
                failures=self._failures,
                loss=self._processor.loss,
            )
        elif not self._role.measures:
            self._pipeline.ignore_all()

    def _decide(self) -> None:
        """If nobody has told so far who writes, this process does."""
        if self._files.is_undecided:
            with self._failures.contained("to open its files"):
                self._find_ranks()

    def _await_steps(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until the rules have seen all steps so far, those of all ranks included."""
        waits: list[Callable[[float], None]] = [self._pipeline.flush]
        if self._ranks is not None and not self._pipeline.on_own_thread():
            waits += [self._ranks.wait, self._pipeline.flush]
        each_within(timeout_s, *waits)

    # --- alerts --------------------------------------------------------------------------------

    @property
    def alerts(self) -> tuple[Alert, ...]:
        self._await_steps()
        return tuple(self._alerts)

    def _note_alert(self, alert: Alert, wall_time: float) -> None:
        """On the background thread."""
        self._alerts.append(alert)
        if self._role.writes:
            self._files.write_alert(alert, wall_time)
        if callable(self._on_alert):
            self._on_alert(alert)
            return
        stops = self._on_alert is not None and alert.stage != "end" and alert.severity != "note"
        if stops and self._pending is None:
            self._pending = alert
            if self._ranks is not None:
                self._ranks.raise_together(alert)

    def step(self) -> None:
        if self.capture.attached:
            self.capture.manual_step()
        self._step_ended()

    def _step_ended(self) -> None:
        """The step before the one in progress has ended."""
        self.stop_if_asked(self.capture.step - 1)

    def stop_if_asked(self, step: int | None) -> None:
        """Stop training if an alert asks for it; ranks all do so at the end of the same step.

        Args:
            step: The one that has ended; None: no other will.
        """
        alert = self._pending
        if self._ranks is not None:
            alert = self._ranks.to_raise(step)
        elif alert is not None and self._pipeline.on_own_thread():
            return
        if alert is not None:
            self._pending = None
            if self._on_alert == "raise":
                raise TelemetryAlert(alert)
            self.should_stop = True

    # --- resuming ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        capture = self.capture.state_dict()
        self._await_steps()
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
        usable, misfits = checked_state(state)
        if self._closed:
            raise ValueError("HookLogger.load_state_dict(): the logger is closed; make a new one")
        self._later_steps.expect_them()
        attached = self.capture.attached
        self.capture.detach()
        self._await_steps()
        self.capture.load_state_dict(usable)
        self._files.purge(self.capture.step)
        misfits += self._pipeline.load_state_dict(usable, self.capture.step)
        if attached:
            self.capture.attach()
        if misfits:
            log.warning("telemetry: load_state_dict() left out %s", "; ".join(misfits))

    # --- its end -------------------------------------------------------------------------------

    def flush(self) -> None:
        self._decide()
        each_within(CLOSE_TIMEOUT_S, self._await_steps, self._files.flush)

    def note_exception(self, exception: BaseException, timeout_s: float) -> None:
        """The training ends in an exception; its flight file is written."""
        self._exception = exception
        if self._role.writes:
            self._pipeline.flush(timeout_s)
            self._files.flight.on_exception(exception, self.capture.step)
        self.capture.detach()  # the exception is reason enough for a run without steps

    def close(self, timeout_s: float) -> None:
        self._finalizer.cancel()
        if self._pipeline.on_own_thread():  # on_alert closes; the rules see the rest afterwards
            Thread(target=self._end, args=(timeout_s,), name="telemetry-close").start()
        else:
            self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        """End the run, or wait until another thread has done so."""
        if not self._ending.acquire(timeout=timeout_s):
            return
        try:
            if not self._ended:
                self.capture.end()
                self._decide()
                each_within(
                    timeout_s,
                    self._end_exchange,
                    self._pipeline.close,
                    lambda left_s: self._write_end(),
                    self._files.close,
                )
                self._exception = None  # its frames hold the model
                self._ended = True
        finally:
            self._ending.release()

    def _end_exchange(self, timeout_s: float) -> None:
        """Send what other ranks lack, and have what they sent."""
        if self._ranks is not None and self._role.measures:
            self._pipeline.in_turn(self._ranks.send_rest)
            self._ranks.close(timeout_s / 2)

    def _write_end(self) -> None:
        self._files.write_end(*self._board.end_values(self._exception))

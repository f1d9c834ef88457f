"""Parts of one run, put together in one place; where ``on_alert`` stops or raises."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.util import Finalize
from shlex import quote
from threading import RLock, Thread
from typing import Any

from torch import nn
from torch.optim import Optimizer

from telemetry.alert import Alert, TelemetryAlert
from telemetry.capture import Content, Loop, Schedule
from telemetry.failures import Failures, show_at_end
from telemetry.pipeline import (
    CLOSE_TIMEOUT_S,
    LoggedScalars,
    Pipeline,
    Processor,
)
from telemetry.plain_text import printable_lines
from telemetry.ranks.exchange import Exchange, RankExchange
from telemetry.ranks.role import Ranks, rank_and_world_size, role_of
from telemetry.ranks.topology import RankObserver
from telemetry.records.batches import Batch
from telemetry.records.loss import LossChoice
from telemetry.rule import Rule
from telemetry.run.arguments import OnAlert, batch_ids_of, check_phase, scalars_of
from telemetry.run.files import RunFiles, show_log_dir
from telemetry.run.resuming import STATE_FORMAT, LaterSteps, checked_state
from telemetry.selection import Selection
from telemetry.tag_names import RUN
from telemetry.threads import NoThreadError, each_within
from telemetry.torch_private.host_copy import HostCopy
from telemetry.writing import hparams
from telemetry.writing.dashboard import Dashboard
from telemetry.writing.hparams import Hyperparameter

log = logging.getLogger("telemetry")

# Time limit in seconds for the disk when a checkpoint is taken.
_CHECKPOINT_S = 10.0

_MAX_NOTES = 5  # that are shown at the end
_FEW = 20  # steps for each requested full step, with which their cost is not worth a warning
_GOES_ON = 'training goes on; HookLogger(on_alert="stop") or "raise" ends it at such an alert'


def is_fault(exception: BaseException) -> bool:
    """Return whether an exception that ends training is unexpected.

    Ctrl-C, :class:`SystemExit`, :class:`StopIteration` and :class:`TelemetryAlert` are requested.
    """
    requested = StopIteration, TelemetryAlert
    return isinstance(exception, Exception) and not isinstance(exception, requested)


class ActiveRun:
    """Run of an enabled logger: creates its parts and passes calls on to them.

    Downstream parts are created first: files, dashboard, processor, queue, hooks. The exchange with
    other ranks is joined last, at the first forward pass if no rank is known before.

    The run closes when the model is garbage-collected and when the process exits. Unlike
    ``atexit``, this includes processes of ``multiprocessing``.
    """

    def __init__(
        self,
        model: nn.Module,
        writer: object,
        *,
        first_step: int,
        resume: bool,
        ranks: Ranks,
        on_alert: OnAlert,
        every_n_steps: int,
        max_overhead: float | None,
        content: Content,
        selection: Selection,
        optimizer: Optimizer | None,
        rules: Sequence[Rule],
        loss_tag: str | None,
    ) -> None:
        self._schedule = Schedule(every_n_steps, max_overhead, self._log_curves)
        self.alerts: list[Alert] = []
        self._on_alert = on_alert
        self._may_stop = on_alert is not None  # a function may return "raise" or "stop"
        self._may_stop_at_steps = self._may_stop  # on several ranks, an alert of another one may
        self.should_stop = False
        self._ending = RLock()  # a signal handler may close on the thread that closes
        self._closed = self._ended = False
        self._exception: BaseException | None = None
        self._failures = Failures()
        role_is_final = rank_and_world_size() is not None
        self._role = role_of(ranks)
        self._files = RunFiles(
            model,
            writer,
            first_step,
            resume=resume,
            role=self._role,
            close=self.close,
            failures=self._failures,
        )
        self.log_dir = self._files.log_dir
        resumed = self._files.first_step > 0
        self._later_steps = LaterSteps(self.log_dir, self._failures, expected=resumed)
        self._dashboard = Dashboard()
        self._processor = Processor(
            dashboard=self._dashboard,
            write_values=self._files.write_values,
            run_log=self._files.log,
            rules=rules,
            on_step=self._later_steps.on_step,
            on_alert=self._note_alert,
            schedule=self._schedule,
            failures=self._failures,
            loss=LossChoice(loss_tag),
        )
        try:
            self._pipeline = Pipeline(self._processor, self._failures)
        except NoThreadError:
            self._files.close(CLOSE_TIMEOUT_S)
            raise
        self._loop = Loop(
            model,
            selection=selection,
            schedule=self._schedule,
            content=content,
            deliver=self._pipeline.submit,
            safe_point=self._step_ended,
            primary=optimizer,
            failures=self._failures,
            first_step=self._files.first_step,
            find_ranks=self._find_ranks,
        )
        if role_is_final:
            self._join_ranks()
            if self._ranks.observer is not None:
                self._ranks.observer.read_model(model)
        # Priority 10: before the finalizer of the writer, which has priority 0.
        self._finalizer = Finalize(model, self.close, exitpriority=10)
        self.attach("HookLogger")
        show_log_dir(self.log_dir)

    @property
    def attached(self) -> bool:
        return self._loop.attached

    @property
    def current_step(self) -> int:
        return self._loop.step

    # --- hooks -----------------------------------------------------------------------------------

    def attach(self, caller: str) -> None:
        if self._closed:
            why = "the logger is closed; make a new one"
            if self._loop.model() is None:
                why = "the model is deleted; keep a reference to it"
            raise ValueError(f"{caller}: {why}")
        if self._role.measures:
            self._loop.attach()

    def detach(self) -> None:
        self._loop.detach()

    def phase(self, name: str) -> AbstractContextManager[None]:
        check_phase(name)
        return nullcontext() if self._closed_before("phase") else self._loop.phase(name)

    def step(self) -> None:
        if self._loop.attached:
            self._loop.manual_step()
        self._step_ended()

    # --- logged values ---------------------------------------------------------------------------

    def log(self, scalars: object, more: Sequence[object], named: Mapping[str, object]) -> None:
        if self._closed_before("log"):
            return
        values, errors = scalars_of(scalars, more, named)
        self._log(values, self._loop.step)
        if errors:
            raise errors[0]
        if self._may_stop and not self._role.merges:
            self._stop_if_requested(None)

    def hparams(self, values: Mapping[str, Hyperparameter], metrics: Iterable[str] | None) -> None:
        if self._closed_before("hparams"):
            return
        hparams.check(values, metrics)
        tags = None if metrics is None else [*metrics]
        write = self._processor.write_hyperparameters
        self._pipeline.put(partial(write, dict(values), tags, self._loop.step))

    def batch(self, ids: object) -> None:
        values = batch_ids_of(ids)
        if not self._closed_before("batch") and self._loop.attached:
            self._loop.end_open_step()
            self._pipeline.put(Batch(step=self._loop.step, ids=values), now=False)

    def _closed_before(self, method: str) -> bool:
        """Return whether the logger is closed; log once that the method writes nothing then."""
        if self._closed:
            message = f"HookLogger.{method}() after close() writes nothing; call it before"
            self._failures.log_once(message)
        return self._closed

    def _log(self, values: Mapping[str, float | HostCopy], step: int) -> None:
        item = LoggedScalars(step=step, wall_time=time.time(), values=values)
        self._pipeline.put(item, now=self._schedule.logged(step, values))

    def _log_curves(self, curves: Mapping[str, float], step: int) -> None:
        self._log({RUN + name: value for name, value in curves.items()}, step)

    # --- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        position = self._loop.state_dict()
        with self._loop.clock.paused():
            self._await_steps()
            state_dict = partial(self._processor.state_dict, position["step"])
            rules = self._pipeline.run_on_worker(state_dict) or {}
            # A resumed run counts on these files even if the process is killed next.
            if not self._files.flush(_CHECKPOINT_S):
                log.warning(
                    "telemetry: the records up to the checkpoint at step %d are not written within "
                    "%.0f s; if the process is killed now, a resumed run lacks them",
                    position["step"],
                    _CHECKPOINT_S,
                )
        return {"format": STATE_FORMAT, "run": self._files.log.run, **position, **rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        usable, incompatible = checked_state(state)
        if self._closed:
            raise ValueError("HookLogger.load_state_dict(): the logger is closed; make a new one")
        self._later_steps.expect_them()
        attached = self._loop.attached
        self._loop.detach()
        self._await_steps()
        self._loop.load_state_dict(usable)
        self._files.restore(self._loop.step, usable.get("run"))
        load_state_dict = partial(self._processor.load_state_dict, usable, self._loop.step)
        misfits = self._pipeline.run_on_worker(load_state_dict)
        incompatible += ["the rules"] if misfits is None else misfits
        if attached:
            self._loop.attach()
        if incompatible:
            log.warning("telemetry: load_state_dict() ignored %s", "; ".join(incompatible))

    # --- ranks -----------------------------------------------------------------------------------

    @property
    def _ranks(self) -> Exchange:
        return self._processor.ranks

    def _find_ranks(self) -> RankObserver | None:
        """Join the other ranks at the first forward pass, if none was known before."""
        if self._role.size == 1:
            self._role = role_of(self._role.ranks)
            self._join_ranks()
        return self._ranks.observer

    def _join_ranks(self) -> None:
        """Open the files and the exchange of the role, which is final."""
        with self._failures.contained("to open its files"):
            self._files.open_for(self._role)
        self._may_stop_at_steps |= self._role.merges
        if self._role.merges:
            self._schedule.takes_all_norms = True  # rank 0 merges the steps that all have
            try:
                self._processor.ranks = RankExchange(
                    rank=self._role.rank,
                    size=self._role.size,
                    put=self._pipeline.put,
                    ask=self._schedule.request_full,
                    current_step=lambda: self._loop.step,
                    failures=self._failures,
                )
            except OSError as error:  # no file descriptor is left
                self._failures.log_once(
                    f"rank {self._role.rank} exchanges no records with the others: {error}"
                )
                if self._role.rank:
                    self._pipeline.ignore_all()
        elif not self._role.measures:
            self._pipeline.ignore_all()

    def _settle_role(self) -> None:
        """Write in this process if the rank is still unknown."""
        if self._files.is_undecided:
            with self._failures.contained("to open its files"):
                self._find_ranks()

    # --- waiting ---------------------------------------------------------------------------------

    def flush(self) -> None:
        self._settle_role()
        with self._loop.clock.paused():
            each_within(CLOSE_TIMEOUT_S, self._await_steps, self._files.flush)

    def _await_steps(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until the rules have checked all steps up to now, on all ranks."""
        waits: list[Callable[[float], None]] = [self._pipeline.flush]
        if self._role.merges and not self._pipeline.on_own_thread():
            waits += [self._ranks.wait, self._pipeline.flush]
        each_within(timeout_s, *waits)

    # --- alerts ----------------------------------------------------------------------------------

    def _note_alert(self, alert: Alert) -> None:
        """Store an alert and respond to it; on the background thread."""
        self.alerts.append(alert)
        if alert.severity == "error" and self._role.writes:
            self._failures.log_once(
                f"the steps around it: telemetry explain {quote(self.log_dir)}", level=logging.INFO
            )
        response: object = self._on_alert
        if callable(self._on_alert):
            response = self._on_alert(alert)
        elif alert.stage == "resolved" or alert.severity == "note":
            return
        if response in ("raise", "stop"):
            self._ranks.raise_on_all(alert, raises=response == "raise")
        elif alert.kind == "nonfinite" and alert.severity == "error" and not self._closed:
            self._failures.log_once(_GOES_ON)

    def _step_ended(self) -> None:
        if self._may_stop_at_steps:
            self._stop_if_requested(self._loop.step - 1)

    def _stop_if_requested(self, step: int | None) -> None:
        """Stop training if an alert requests it after this step; None: no other step will end."""
        if self._pipeline.on_own_thread():
            return
        if (alert := self._ranks.to_raise(step)) is not None:
            if self._ranks.raises:
                raise TelemetryAlert(alert)
            self.should_stop = True

    # --- end -------------------------------------------------------------------------------------

    def end_block(self, exception: BaseException | None) -> None:
        if exception is not None:
            each_within(CLOSE_TIMEOUT_S, partial(self._note_exception, exception), self.close)
            return
        self.close()
        self._stop_if_requested(None)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._closed = True
        if self._pipeline.on_own_thread():  # on_alert closes; the rules check the rest afterwards
            Thread(target=self._end, args=(timeout_s,), name="telemetry-close").start()
        else:
            self._end(timeout_s)

    def _note_exception(self, exception: BaseException, timeout_s: float) -> None:
        """Keep the exception that ends the training, if it is a fault."""
        self._exception = exception if is_fault(exception) else None
        self._loop.detach()  # without a message about a run without steps
        self._pipeline.flush(timeout_s)

    def _end(self, timeout_s: float) -> None:
        """End the run, or wait until another thread has done so."""
        if not self._ending.acquire(timeout=timeout_s):
            return
        try:
            if not self._ended:
                self._loop.end()
                self._settle_role()
                each_within(
                    timeout_s,
                    self._end_exchange,
                    self._pipeline.close,
                    lambda left_s: self._write_end(),
                    self._files.close,
                )
                self._log_full_steps()
                self._show_notes()
                self._exception = None  # its frames hold the model
                self._ended = True
                self._finalizer.cancel()  # last: it finishes an end that a Ctrl-C interrupts
        finally:
            self._ending.release()
            self._loop.detach()  # if a Ctrl-C came before

    def _end_exchange(self, timeout_s: float) -> None:
        """Send the rest to the other ranks, and receive theirs."""
        if self._role.merges:
            self._pipeline.run_on_worker(self._processor.send_rest)
            self._ranks.close(timeout_s / 2)

    def _write_end(self) -> None:
        full_steps = self._schedule.scheduled, self._schedule.requested
        values = self._dashboard.end_values(full_steps)
        self._files.write_end(self._loop.step - 1, values, self._exception, full_steps)

    def _log_full_steps(self) -> None:
        """Log the number of full steps and their reasons; a warning if rules added many."""
        scheduled, requested = self._schedule.scheduled, self._schedule.requested
        if not (self._role.writes and scheduled):
            return
        level, hint = logging.INFO, ""
        # Not for a run that is shorter than the interval.
        if scheduled > 1 and requested > max(scheduled, self._loop.step / _FEW):
            level, hint = logging.WARNING, "; max_overhead limits their cost"
        message = "telemetry: full steps: %d scheduled, %d more requested by rules%s"
        log.log(level, message, scheduled, requested, hint)

    def _show_notes(self) -> None:
        """Show the notes of the run, since Python shows no messages at INFO by default."""
        notes = [a for a in self.alerts if a.severity == "note" and a.stage == "started"]
        if notes and self._role.writes:
            count = "one note, which" if len(notes) == 1 else f"{len(notes)} notes, which"
            lines = [f"telemetry: {count} may be intended:"]
            lines += [
                f"  {alert.title}: {printable_lines(alert.message)}" for alert in notes[:_MAX_NOTES]
            ]
            if len(notes) > _MAX_NOTES:
                lines.append(f"  and more: telemetry alerts {quote(self.log_dir)}")
            show_at_end("\n".join(lines))

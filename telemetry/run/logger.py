"""``HookLogger``: watches a model in training and writes what it sees to TensorBoard."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.util import Finalize
from threading import RLock, Thread
from typing import Any, NoReturn, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import tensorboard

from telemetry.alert import Alert, TelemetryAlert
from telemetry.capture import Budget, Capture, Content
from telemetry.events.background import each_within
from telemetry.failures import Failures
from telemetry.pipeline import (
    CLOSE_TIMEOUT_S,
    FullSteps,
    LightSteps,
    LoggedScalars,
    Pipeline,
    Processor,
    ReadyValues,
    every,
)
from telemetry.ranks.exchange import Exchange, RankExchange
from telemetry.ranks.observer import RankObserver
from telemetry.ranks.role import Ranks, rank_and_world_size, role_of
from telemetry.records.loss import LossChoice
from telemetry.run.arguments import (
    Alerts,
    FirstStep,
    HistogramForm,
    OnAlert,
    bulk_of,
    check_choice,
    check_first_step,
    check_loss,
    check_on_alert,
    check_parts,
    check_phase,
    is_off,
    log_dir_of,
    rules_of,
    sample_of,
    scalars_of,
)
from telemetry.run.files import RunFiles
from telemetry.run.resuming import STATE_FORMAT, LaterSteps, checked_state
from telemetry.selection import Selection, Selectors
from telemetry.tag_names import RUN
from telemetry.torch_private.host_copy import HostCopy
from telemetry.writing import hparams, links
from telemetry.writing.board import Board
from telemetry.writing.hparams import Hyperparameter

log = logging.getLogger("telemetry")

# The longest time for which a flush of the writer makes its caller wait for us.
_HAND_ON_S = 30.0

# The longest time for which a checkpoint waits for the disk.
_CHECKPOINT_S = 10.0


class HookLogger:
    """Logs activations, gradients, weights and alerts of a model while it trains.

    ::

        with HookLogger(model, "runs/mnist", every_n_steps=100):
            train()  # an unchanged loop

    A step is one step of the optimizer. At steps 0, N, 2N, ... everything is measured; at all
    others only the norms of the gradients, which most alerts need. Losses, gradients, parameters
    and random numbers stay the same. Errors of the logger itself are logged and never raised.
    Without ``with``, it works until :meth:`close`, until the model is garbage-collected, or until
    the interpreter exits; you need not keep a reference.

    Args:
        model: The model in training, on any device. It may be wrapped or moved afterwards.
        writer: A :class:`telemetry.SummaryWriter` or ``torch.utils.tensorboard.SummaryWriter``,
            which stays open, or a log directory or URL. When others flush or close a given writer,
            what waits here is written first; what comes after a close is in a new file.
        every_n_steps: Measure in full at steps 0, N, 2N, ...
        max_overhead: Share of the training time that the logger may take, such as 0.01: CPU time of
            the training and the background thread, or on a CUDA device the time by which measured
            steps take longer. Full measurements become less frequent; gradient norms, too, where
            they alone take about that. The curves ``telemetry/overhead``,
            ``telemetry/every_n_steps`` and ``telemetry/norms_every_n_steps`` show the result. Each
            rank decides for itself. None: full measurements are made as scheduled, and gradient
            norms at every step, or where that takes more than 3 % of the time, at one usual step in
            up to 16. ``math.inf``: at every step, whatever it costs.
        optimizer: The optimizer whose steps count; default: the first torch optimizer that steps
            parameters of this model.
        modules: Watched modules: a glob over ``named_modules()``, a class, a
            ``predicate(name, module)``, or several of these; default: every leaf module.
        exclude: Modules that are not watched, likewise.
        activations: Measure what modules return.
        activation_gradients: Measure the gradients with respect to what modules return.
        gradients: Measure the gradients of parameters.
        weights: Measure parameters and how far each step moves them.
        images: Draw feature maps and filters of convolutions, and the input.
        sample: What the model is given: a tensor, a tuple of arguments, or a mapping of keyword
            arguments. Feature maps are then those of this sample, at full steps, from a forward
            pass of its own in evaluation mode. None: those of the batch.
        alerts: Rules that judge each step; None: the default rules; ``()``: none. A dict sets
            parameters of the default rules, leaves some out, or adds detectors of your own:
            ``{"dead_units": {"fraction": 0.8}, "saturated_units": None, "my_kind": MyDetector()}``.
        on_alert: Called with each :class:`Alert` on a background thread, or ``"raise"`` to raise
            :class:`TelemetryAlert` from the end of an optimizer step, :meth:`log`, :meth:`step` or
            the end of the ``with`` block; or ``"stop"`` to set :attr:`should_stop` there. Notes do
            neither.
        first_step: Number of the first step of a resumed run; ``"auto"``: the step after the last
            one in the local directory, or 0. TensorBoard then hides what was logged there for this
            step and later ones. :meth:`load_state_dict` also restores the state of the alerts.
        ranks: Of several processes that train together: ``"merged"``: the first one writes what all
            have measured, as one run; ``"each"``: each writes its own, into ``rank-0003/``;
            ``"rank0"``: rank 0 measures and writes, the others do nothing.
        max_bytes_per_step: The most that histograms and pictures of a measured step take in the
            event file. What would take more is written with wider buckets, fewer pictures at a time
            and, at last, some histograms in turn. Curves and the page's numbers are not limited.
            None: no limit.
        histograms: ``"tensor"``: exact edges and counts, which TensorBoard reads; ``"classic"``:
            histograms and pictures as torch writes them, for readers that know no others.
        loss: Tag of the logged scalar that is the loss, for rules, page and tables. None: ``loss``,
            or a name like ``train_loss``, ``loss/total`` or ``training/batch_loss``: no other words
            than these. Of several, what is logged first; of these, one of each step before a mean.
        enabled: False, or the environment variable ``TELEMETRY_DISABLED=1``: nothing is watched,
            written or checked. A state that is loaded is given back by :meth:`state_dict`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has an invalid value, such as a glob that matches no module, or a
            model without parameters, or a ``sample`` for one that is sharded or compiled.
        OSError: The log directory cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        writer: tensorboard.SummaryWriter | str | os.PathLike[str],
        *,
        every_n_steps: int = 100,
        max_overhead: float | None = None,
        optimizer: Optimizer | None = None,
        modules: Selectors | None = None,
        exclude: Selectors | None = None,
        activations: bool = True,
        activation_gradients: bool = True,
        gradients: bool = True,
        weights: bool = True,
        images: bool = True,
        sample: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
        alerts: Alerts = None,
        on_alert: OnAlert = None,
        first_step: FirstStep = 0,
        ranks: Ranks = "merged",
        max_bytes_per_step: int | None = 800_000,
        histograms: HistogramForm = "tensor",
        loss: str | None = None,
        enabled: bool = True,
    ) -> None:
        self._off = is_off(enabled)
        self._state: dict[str, Any] = {}  # of a logger that is off
        if self._off:
            self._log_dir = log_dir_of(writer, written=False)
            self._first_step = first_step if isinstance(first_step, int) else 0
            return
        self._budget: Budget | None = None
        if max_overhead not in (None, math.inf):
            self._budget = Budget(max_overhead=max_overhead, every_n_steps=every_n_steps)
            self._budget.entered = self._log_costs
        selection = Selection.parse(modules, exclude)
        optimizer = check_parts(model, selection, optimizer)
        content = Content(
            activations=activations,
            activation_gradients=activation_gradients,
            gradients=gradients,
            weights=weights,
            images=images,
        )
        fixed = sample_of(model, sample, images)
        check_on_alert(on_alert)
        check_first_step(first_step)
        check_choice("ranks", ranks, *get_args(Ranks))
        check_loss(loss)
        bulk, rules = bulk_of(max_bytes_per_step, histograms), rules_of(alerts)
        self._full_steps = FullSteps(every(every_n_steps))
        role_is_final = rank_and_world_size() is not None
        self._role = role_of(ranks)
        self._on_alert = on_alert
        self._alerts: list[Alert] = []
        self._should_stop = False
        self._ending = RLock()  # a signal handler may close on the thread that closes
        self._ended = False
        self._exception: BaseException | None = None
        self._failures = Failures()
        self._files = RunFiles(
            model,
            writer,
            first_step,
            role=self._role,
            close=self.close,
            before_flush=self._hand_on,
            failures=self._failures,
        )
        resumed = self._files.first_step > 0
        self._later_steps = LaterSteps(self.log_dir, self._failures, expected=resumed)
        session_id = self._files.session_id
        self._light_steps = LightSteps(limited=max_overhead is None)
        self._board = Board(pictures=images, session_id=session_id, bulk=bulk, loss=loss)
        self._processor = Processor(
            board=self._board,
            sink=self._files,
            rules=rules,
            observers=(self._files.flight, self._later_steps),
            on_alert=self._note_alert,
            full_steps=self._full_steps,
            failures=self._failures,
            loss=LossChoice(loss),
            budget=self._budget,
            light_steps=self._light_steps,
        )
        self._pipeline = Pipeline(self._processor, self._failures)
        self._capture = Capture(
            model,
            selection=selection,
            is_full=self._full_steps,
            have_norms=self._light_steps.have_norms,
            content=content,
            deliver=self._pipeline.submit,
            safe_point=self._step_ended,
            primary=optimizer,
            failures=self._failures,
            first_step=self._files.first_step,
            budget=self._budget,
            sample=fixed,
            find_ranks=self._find_ranks,
        )
        if role_is_final:
            self._join_ranks()
            if self._ranks.observer is not None:
                self._ranks.observer.topology.read_model(model)
        # Closes when the model is garbage-collected and when the process exits; until then it keeps
        # the logger. Unlike atexit, also in a process of multiprocessing; before the writer's, of
        # priority 0.
        self._finalizer = Finalize(model, self.close, exitpriority=10)
        self.attach()
        self._write(self._board.first_values())
        if self._role.writes:
            links.log_once(self.log_dir)

    def __repr__(self) -> str:
        state = "removed" if self._off or not self._capture.attached else "attached"
        return f"<HookLogger {state} step={self.current_step} log_dir={self.log_dir!r}>"

    def __getstate__(self) -> dict[str, Any]:
        """Make copies and pickles loggers that are off: a copied model is another model."""
        state = self._state if self._off else {}
        first_step = self.current_step
        return {"_off": True, "_state": state, "_log_dir": self.log_dir, "_first_step": first_step}

    def __enter__(self) -> HookLogger:
        self.attach()
        return self

    def __exit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        if self._off:
            return
        if exception is not None:
            each_within(CLOSE_TIMEOUT_S, partial(self._note_exception, exception), self.close)
            return
        self.close()
        self._stop_if_asked(None)

    @property
    def log_dir(self) -> str:
        """The log directory or URL."""
        return self._log_dir if self._off else self._files.log_dir

    @property
    def current_step(self) -> int:
        """Number of the step in progress: ``first_step`` and the optimizer steps since."""
        if self._off:
            return self._state.get("step", self._first_step)  # type: ignore[no-any-return]
        return self._capture.step

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts so far, oldest first; waits until the rules have seen all steps so far."""
        if self._off:
            return ()
        self._await_steps()
        return tuple(self._alerts)

    @property
    def should_stop(self) -> bool:
        """Whether an alert asks for the end of training; False without ``on_alert="stop"``.

        Ranks that train together all see it at the end of the same optimizer step.
        """
        return not self._off and self._should_stop

    def log(
        self,
        scalars: Mapping[str, float | Tensor] | None = None,
        /,
        *more: NoReturn,
        **named: float | Tensor,
    ) -> None:
        """Write scalars at the current step: ``logger.log(loss=loss, accuracy=0.97)``.

        Args:
            scalars: Numbers or one-element tensors by tag: ``logger.log({"loss/train": loss})``. A
                tensor on an accelerator is copied without waiting for it. Which of them is the
                loss, at which alerts look, is told at the argument ``loss`` of the logger.
            more: None: there are no positional arguments like those of ``SummaryWriter``.
            named: Likewise; not ``step``, ``global_step``, ``commit`` or ``walltime``, which other
                loggers take: the step is the one in progress.

        Raises:
            TypeError: A value is not a number, a tag is not a string, or an argument is that of
                another logger. All others are written.
            ValueError: A tensor has more than one element, or a tag cannot be encoded in UTF-8. All
                others are written.
        """
        if self._off:
            return
        if self._closed:
            message = "HookLogger.log() after close() writes nothing; call it earlier"
            self._failures.log_once(message)
            return
        began_s = time.thread_time() if self._budget is not None else 0.0
        values, refused = scalars_of(scalars, more, named)
        self._log(values, self.current_step)
        if self._budget is not None:
            self._budget.logged(time.thread_time() - began_s)
        if refused:
            raise refused[0]
        if not self._role.merges:
            self._stop_if_asked(None)

    def hparams(
        self, values: Mapping[str, Hyperparameter], *, metrics: Iterable[str] | None = None
    ) -> None:
        """Write hyperparameters for TensorBoard's HParams dashboard, into this run.

        Args:
            values: Numbers, bools or strings by name.
            metrics: Tags of scalars to show beside them; None: the loss, as soon as one is logged.

        Raises:
            TypeError: A value has another type.
        """
        if self._off:
            return
        if metrics is not None:
            self._write(hparams.values_of(values, metrics))
            return
        session, known = hparams.session_value(values), dict(values)
        self._write([session], lambda loss: hparams.experiment_value(known, [loss]))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure the activations of a phase that is not training, under separate tags.

        ::

            with logger.phase("validation"), torch.no_grad():
                validate(model)

        Every forward pass inside is measured at any step, and none counts as training. Outside of a
        phase, passes without gradients are not measured, nor are those in evaluation mode unless
        steps are taken in it.

        Args:
            name: The beginning of the tags: ``validation/activation/...``.

        Raises:
            TypeError: ``name`` is no string.
            ValueError: ``name`` is empty or cannot be encoded in UTF-8.
        """
        return nullcontext() if self._off else self._capture.phase(check_phase(name))

    def step(self) -> None:
        """End a step in a loop that has no ``torch.optim.Optimizer``.

        Call it after the update and before gradients are cleared.
        """
        if self._off:
            return
        if self._capture.attached:
            self._capture.manual_step()
        self._step_ended()

    def flush(self) -> None:
        """Wait until the rules have seen all steps so far and all is written; at most a minute."""
        if not self._off:
            self._decide()
            each_within(CLOSE_TIMEOUT_S, self._await_steps, self._files.flush)

    def state_dict(self) -> dict[str, Any]:
        """The current step and the state of the alerts, for a checkpoint; call it between steps.

        Waits until the rules have seen all steps so far and these are written, so that a run that
        is killed and resumed lacks none; at most ten seconds for the disk. Your own rules are
        included if they have ``state_dict()`` and ``load_state_dict(state)``.

        Returns:
            Numbers, strings, lists and dicts, for ``torch.save``, ``json`` and any checkpoint.
        """
        if self._off:
            return self._state
        capture = self._capture.state_dict()
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
        """Resume from what :meth:`state_dict` returned, in this process or another one.

        In a log directory, TensorBoard hides what was logged earlier for this step and later ones.

        Args:
            state: The state. Parts that do not fit this logger are left out with a warning.

        Raises:
            TypeError: ``state`` is not a dict.
            ValueError: The logger is closed.
        """
        if self._off:
            self._state = dict(state)
            return
        usable, misfits = checked_state(state)
        if self._closed:
            raise ValueError("HookLogger.load_state_dict(): the logger is closed; make a new one")
        self._later_steps.expect_them()
        attached = self._capture.attached
        self._capture.detach()
        self._await_steps()
        self._capture.load_state_dict(usable)
        self._files.purge(self._capture.step)
        misfits += self._pipeline.load_state_dict(usable, self._capture.step)
        if attached:
            self._capture.attach()
        if misfits:
            log.warning("telemetry: load_state_dict() left out %s", "; ".join(misfits))

    def remove(self) -> None:
        """Remove all hooks; :meth:`attach` puts them back and continues the count."""
        if not self._off:
            self._capture.detach()

    def attach(self) -> None:
        """Put the hooks back after :meth:`remove`. Harmless when repeated.

        Raises:
            ValueError: The logger is closed.
        """
        if self._off:
            return
        if self._closed:
            gone = "the model is gone; keep it in a variable of yours"
            why = gone if self._capture.model() is None else "the logger is closed; make a new one"
            raise ValueError(f"HookLogger.attach(): {why}")
        if self._role.measures:  # else others do for this process
            self._capture.attach()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Remove all hooks, write what is waiting, log what was lost. Harmless when repeated.

        The writer is flushed; it is closed if this logger opened it.

        Args:
            timeout_s: Limit in seconds. What is not written by then is counted and logged.
        """
        if self._off:
            return
        self._finalizer.cancel()
        if self._pipeline.on_own_thread():  # on_alert closes; the rules see the rest afterwards
            Thread(target=self._end, args=(timeout_s,), name="telemetry-close").start()
        else:
            self._end(timeout_s)

    @property
    def _closed(self) -> bool:
        return not self._finalizer.still_active()

    # --- what is logged ------------------------------------------------------------------------

    def _log(self, values: Mapping[str, float | HostCopy], step: int) -> None:
        item = LoggedScalars(step=step, wall_time=time.time(), values=values)
        self._pipeline.submit_logged(item, at_once=self._light_steps.see_logged(step, values))

    def _log_costs(self, curves: Mapping[str, float], step: int) -> None:
        self._log({RUN + name: value for name, value in curves.items()}, step)

    def _write(
        self, values: Sequence[bytes], of_loss: Callable[[str], bytes] | None = None
    ) -> None:
        """Write values as they are, at the current step, and one when the loss's tag is known."""
        self._pipeline.submit_logged(
            ReadyValues(
                step=self._capture.step, wall_time=time.time(), values=values, of_loss=of_loss
            )
        )

    def _hand_on(self, closing: bool) -> None:
        """Write what waits before someone else flushes or closes the writer."""
        if not self._pipeline.is_late:
            self._pipeline.flush(_HAND_ON_S)
        if closing:
            self._write_end()

    # --- ranks that train together -------------------------------------------------------------

    def _find_ranks(self) -> RankObserver | None:
        """Join the others, if that was not possible before; nothing has been measured so far."""
        if self._role.size == 1:
            self._role = role_of(self._role.ranks)
            self._join_ranks()
        return self._ranks.observer

    @property
    def _ranks(self) -> Exchange:
        return self._processor.ranks

    def _join_ranks(self) -> None:
        """Do what the role says, which is final."""
        self._files.open_for(self._role)
        if self._role.merges:
            self._processor.ranks = RankExchange(
                rank=self._role.rank,
                size=self._role.size,
                put=self._pipeline.put_now,
                ask=self._full_steps.ask,
                current_step=lambda: self._capture.step,
                failures=self._failures,
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
        if self._role.merges and not self._pipeline.on_own_thread():
            waits += [self._ranks.wait, self._pipeline.flush]
        each_within(timeout_s, *waits)

    # --- alerts --------------------------------------------------------------------------------

    def _note_alert(self, alert: Alert, wall_time: float) -> None:
        """On the background thread."""
        self._alerts.append(alert)
        if self._role.writes:
            self._files.write_alert(alert, wall_time)
        if callable(self._on_alert):
            self._on_alert(alert)
            return
        stops = (
            self._on_alert is not None and alert.stage != "resolved" and alert.severity != "note"
        )
        if stops:
            self._ranks.raise_on_all(alert)

    def _step_ended(self) -> None:
        """The step before the one in progress has ended."""
        self._stop_if_asked(self._capture.step - 1)

    def _stop_if_asked(self, step: int | None) -> None:
        """Stop training if an alert asks for it; ranks all do so at the end of the same step.

        Args:
            step: The one that has ended; None: no other will.
        """
        if self._pipeline.on_own_thread():
            return
        if (alert := self._ranks.to_raise(step)) is not None:
            if self._on_alert == "raise":
                raise TelemetryAlert(alert)
            self._should_stop = True

    # --- its end -------------------------------------------------------------------------------

    def _note_exception(self, exception: BaseException, timeout_s: float) -> None:
        """The training ends in an exception; its flight file is written."""
        self._exception = exception
        if self._role.writes:
            self._pipeline.flush(timeout_s)
            self._files.flight.on_exception(exception, self._capture.step)
        self._capture.detach()  # the exception is reason enough for a run without steps

    def _end(self, timeout_s: float) -> None:
        """End the run, or wait until another thread has done so."""
        if not self._ending.acquire(timeout=timeout_s):
            return
        try:
            if not self._ended:
                self._capture.end()
                self._decide()
                each_within(
                    timeout_s,
                    self._end_exchange,
                    self._pipeline.close,
                    lambda left_s: self._write_end(),
                    self._files.close,
                )
                self._log_full_steps()
                self._exception = None  # its frames hold the model
                self._ended = True
        finally:
            self._ending.release()

    def _log_full_steps(self) -> None:
        """Log how many full steps there were, and why; a warning if rules doubled them."""
        scheduled, requested = self._full_steps.scheduled, self._full_steps.requested
        if not (self._role.writes and scheduled):
            return
        level, cost = logging.INFO, ""
        if requested > scheduled:
            level, cost = logging.WARNING, "; max_overhead limits what these cost"
        message = "telemetry: full steps: %d scheduled, %d more requested by rules%s"
        log.log(level, message, scheduled, requested, cost)

    def _end_exchange(self, timeout_s: float) -> None:
        """Send what other ranks lack, and have what they sent."""
        if self._role.merges:
            self._pipeline.in_turn(self._processor.send_rest)
            self._ranks.close(timeout_s / 2)

    def _write_end(self) -> None:
        steps = self._full_steps
        counts = {"scheduled": steps.scheduled, "requested": steps.requested}
        self._files.write_end(*self._board.end_values(self._exception, **counts))

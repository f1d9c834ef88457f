"""``HookLogger``: records a model in training into TensorBoard's files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, get_args

from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import tensorboard

from telemetry.alert import Alert, listed_alerts
from telemetry.pipeline import CLOSE_TIMEOUT_S
from telemetry.plain_text import html_table
from telemetry.ranks.role import Ranks
from telemetry.run.arguments import (
    MEASURED,
    Alerts,
    OnAlert,
    check_choice,
    check_flag,
    check_loss_tag,
    check_on_alert,
    check_parts,
    content_of,
    first_step_of,
    integer,
    log_dir_of,
    rules_of,
    setting,
    writer_of,
)
from telemetry.run.assembly import ActiveRun
from telemetry.selection import Selection, Selectors
from telemetry.threads import NoThreadError
from telemetry.writing.hparams import Hyperparameter

log = logging.getLogger("telemetry")


class DisabledRun:
    """Run of a disabled logger: records nothing and returns the state that it was given."""

    attached = should_stop = False
    alerts: Sequence[Alert] = ()

    def __init__(self, log_dir: str, first_step: int) -> None:
        self.log_dir = log_dir
        self._first_step = first_step
        self._state: dict[str, Any] = {}

    @property
    def current_step(self) -> int:
        return self._state.get("step", self._first_step)  # type: ignore[no-any-return]

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)

    def _nothing(self, *arguments: object) -> None: ...

    log = batch = hparams = step = flush = attach = detach = close = end_block = _nothing


class HookLogger:
    """Records activations, gradients, weights and alerts of a model while it trains.

    ::

        with HookLogger(model, "runs/mnist", every_n_steps=100):
            train()  # an unchanged loop

    A step is one step of the optimizer. Steps 0, N, 2N, ... are full steps: every tensor is
    measured. At all others only the gradient norms are. Losses, gradients, parameters and random
    numbers stay the same. Errors of the logger itself are logged and never raised. Without
    ``with``, it records until :meth:`close`, until the model is garbage-collected, or until the
    interpreter exits; you need not keep a reference.

    Args:
        model: The model in training, on any device. It may be wrapped or moved afterwards.
        log_dir: The directory of the run, or a ``torch.utils.tensorboard.SummaryWriter``, which
            stays open and may write to a URL. Records after the writer was closed are in a new file
            of its directory. None: a new directory in ``runs/``, as ``SummaryWriter`` makes it.
        every_n_steps: Distance N of the full steps; None: 100.
        max_overhead: Limit of the logger's share of the training time, such as 0.01: CPU time of
            the training and the background thread, or on a CUDA device the additional time of full
            steps. Full steps become less frequent, then gradient norms; the curves
            ``telemetry/overhead``, ``telemetry/every_n_steps``, ``telemetry/norms_every_n_steps``
            show it. Each rank decides for itself. None: only gradient norms become less frequent,
            one in up to 64 steps, where they exceed 3 % of the time. ``math.inf``: no limit.
        optimizer: The optimizer whose steps count; default: the first torch optimizer that steps
            parameters of this model.
        modules: Watched modules: a glob of names in ``named_modules()``, a class, a
            ``predicate(name, module)``, or several of these; default: every leaf module. A glob
            that begins with ``!`` excludes modules: ``"!head.*"``.
        measure: Tensors of full steps: outputs of modules, gradients of the loss with respect to
            them, gradients of parameters, parameters and their updates; and pictures of feature
            maps and filters of convolutions and of the input. ``"!images"``: all but one; ``()``:
            gradient norms alone.
        alerts: Rules that check each step; None: the default rules; ``()``: none. A dict sets
            parameters of the default rules, omits some, or adds detectors of your own:
            ``{"dead_units": {"fraction": 0.8}, "saturated_units": None, "my_kind": MyDetector()}``.
        on_alert: ``"raise"`` to raise :class:`TelemetryAlert` from the end of an optimizer step,
            :meth:`log`, :meth:`step` or the end of the ``with`` block; or ``"stop"`` to set
            :attr:`should_stop` there. Notes neither raise nor stop. Or a function that is called
            with each :class:`Alert` on a background thread; it may return ``"raise"`` or ``"stop"``
            to respond in that way, whatever the severity.
        first_step: Step at which the newest run in the local directory is continued; 0: a new run.
            Earlier records of this step and later ones are then hidden. :meth:`load_state_dict`
            also restores the state of the alerts.
        resume: Whether to continue that run after its last step; without a run, a new one begins.
        ranks: With several processes that train together: ``"merged"``: rank 0 writes the
            measurements of all ranks as one run; ``"each"``: each rank writes its own, into
            ``rank-0003/``; ``"rank0"``: rank 0 measures and writes, the others do nothing.
        loss_tag: Tag of the logged scalar that is the loss, for rules, page and tables. None:
            ``loss``, or a name like ``train_loss``, ``loss/total`` or ``training/batch_loss``, with
            no other words than these. Of several, the first logged one counts; of these, the loss
            of a step is preferred to a mean.
        enabled: False, or the environment variable ``TELEMETRY_DISABLED=1``: nothing is watched,
            written or checked. :meth:`state_dict` returns a loaded state unchanged.

    If ``log_dir``, ``every_n_steps``, ``max_overhead``, ``on_alert`` or ``loss_tag`` is None, the
    environment variable ``TELEMETRY_LOG_DIR``, ``TELEMETRY_EVERY_N_STEPS`` and so on sets it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument or an environment variable has an invalid value, such as a glob that
            matches no module, or a model without parameters.
        OSError: The log directory cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        log_dir: str | os.PathLike[str] | tensorboard.SummaryWriter | None = None,
        *,
        every_n_steps: int | None = None,
        max_overhead: float | None = None,
        optimizer: Optimizer | None = None,
        modules: Selectors | None = None,
        measure: str | Iterable[str] = MEASURED,
        alerts: Alerts = None,
        on_alert: OnAlert = None,
        first_step: int = 0,
        resume: bool = False,
        ranks: Ranks = "merged",
        loss_tag: str | None = None,
        enabled: bool = True,
    ) -> None:
        self._run: ActiveRun | DisabledRun
        writer = writer_of(log_dir)
        first_step = first_step_of(first_step)
        disabled = DisabledRun(log_dir_of(writer, written=False), first_step)
        check_flag("resume", resume)
        check_flag("enabled", enabled)
        if not enabled or setting("disabled", default=False):
            self._run = disabled
            return
        selection = Selection.parse(modules)
        optimizer = check_parts(model, selection, optimizer)
        check_on_alert(on_alert := setting("on_alert", on_alert))
        check_choice("ranks", ranks, *get_args(Ranks))
        check_loss_tag(loss_tag := setting("loss_tag", loss_tag))
        try:
            self._run = ActiveRun(
                model,
                writer,
                first_step=first_step,
                resume=resume,
                ranks=ranks,
                on_alert=on_alert,
                every_n_steps=integer(
                    "every_n_steps", setting("every_n_steps", every_n_steps, 100)
                ),
                max_overhead=setting("max_overhead", max_overhead),
                content=content_of(measure),
                selection=selection,
                optimizer=optimizer,
                rules=rules_of(alerts),
                loss_tag=loss_tag,
            )
        except NoThreadError as error:
            log.warning("telemetry: %s; this logger is disabled", error)
            self._run = disabled

    def __repr__(self) -> str:
        return f"<HookLogger {self._state} step={self.current_step} log_dir={self.log_dir!r}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: state, step, directory and alerts up to now."""
        alerts = listed_alerts(self.alerts)
        rows = {"state": self._state, "step": self.current_step, "log_dir": self.log_dir}
        return html_table("HookLogger", {**rows, "alerts": alerts})

    def __getstate__(self) -> dict[str, Any]:
        """Make copies and pickles inert: a copied model is another model."""
        run = self._run
        inert = run if isinstance(run, DisabledRun) else DisabledRun(run.log_dir, run.current_step)
        return {"_run": inert}

    def __enter__(self) -> HookLogger:
        self._run.attach("with HookLogger")
        return self

    def __exit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        self._run.end_block(exception)

    @property
    def _state(self) -> str:
        return "attached" if self._run.attached else "removed"

    @property
    def log_dir(self) -> str:
        """The log directory or URL."""
        return self._run.log_dir

    @property
    def current_step(self) -> int:
        """Number of the step in progress: ``first_step`` and the optimizer steps since."""
        return self._run.current_step

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts up to now, oldest first; after :meth:`flush`, those of all steps."""
        return tuple(self._run.alerts)

    @property
    def should_stop(self) -> bool:
        """Whether ``on_alert``, or the function given for it, requests the end of training.

        It changes on all ranks at the end of the same optimizer step.
        """
        return self._run.should_stop

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
                tensor on an accelerator is copied without waiting for it. The argument
                ``loss_tag`` of the logger says which of them is the loss.
            more: None: there are no positional arguments like those of ``SummaryWriter``.
            named: Numbers or tensors by tag; not ``step``, ``global_step``, ``commit`` or
                ``walltime`` of other loggers: the step is the one in progress.

        Raises:
            TypeError: A value is not a number, a tag is not a string, or an argument is that of
                another logger. All others are written.
            ValueError: A tensor has more than one element, or a tag is empty, begins with a group
                of the logger such as ``~run/`` or cannot be encoded in UTF-8. All others are
                written.
        """
        self._run.log(scalars, more, named)

    def batch(self, ids: Sequence[int | str] | NDArray[Any] | Tensor) -> None:
        """Name the samples of the next step, so that an alert that blames its batch says which.

        ::

            for indices, inputs, targets in loader:
                logger.batch(indices)

        Call it before the forward pass; ids of several micro-batches add up. Alerts
        have those of the batches that they blame.

        Args:
            ids: Strings or whole numbers, at most 4,096; a tensor must be on the CPU.

        Raises:
            TypeError: An id has another type, or ``ids`` is a tensor on an accelerator.
            ValueError: There are too many.
        """
        self._run.batch(ids)

    def hparams(
        self, values: Mapping[str, Hyperparameter], *, metrics: Iterable[str] | None = None
    ) -> None:
        """Write hyperparameters of this run for TensorBoard's HParams dashboard.

        Args:
            values: Numbers, bools or strings by name; None, lists and tuples become strings.
            metrics: Tags of scalars to show next to them; None: all that are logged in the next
                1,000 steps, or up to the end.

        Raises:
            TypeError: A value has another type.
            ValueError: A name or a string cannot be encoded in UTF-8.
        """
        self._run.hparams(values, metrics)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure the activations of a phase that is not training, under separate tags.

        ::

            with logger.phase("validation"), torch.no_grad():
                validate(model)

        Every forward pass inside is measured at any step, and none counts as training. Outside of a
        phase, passes without gradients are not measured, and passes in evaluation mode only if the
        optimizer steps in that mode.

        Args:
            name: First part of the tags: ``validation/activation/...``.

        Raises:
            TypeError: ``name`` is no string.
            ValueError: ``name`` is empty or cannot be encoded in UTF-8.
        """
        return self._run.phase(name)

    def step(self) -> None:
        """End a step in a loop that has no ``torch.optim.Optimizer``.

        Call it after the update and before gradients are cleared.
        """
        self._run.step()

    def flush(self) -> None:
        """Wait until all steps up to now are checked and written; at most a minute."""
        self._run.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the run, its current step and the state of the alerts; call it between steps.

        All steps up to now are checked by the rules and written first, so that a run that is killed
        and resumed lacks none; it waits for the disk ten seconds at most. Your own rules are
        included if they have ``state_dict()`` and ``load_state_dict(state)``.

        Returns:
            Numbers, strings, lists and dicts, for ``torch.save``, ``json`` and any checkpoint.
        """
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state_dict`, in this process or another one.

        Earlier records of this step and later ones of the run are then hidden.

        Args:
            state: The state. Incompatible parts are ignored with a warning.

        Raises:
            TypeError: ``state`` is not a dict.
            ValueError: The logger is closed.
        """
        self._run.load_state_dict(state)

    def remove(self) -> None:
        """Remove all hooks; :meth:`attach` restores them and continues the count."""
        self._run.detach()

    def attach(self) -> None:
        """Restore the hooks after :meth:`remove`. Idempotent.

        Raises:
            ValueError: The logger is closed.
        """
        self._run.attach("HookLogger.attach()")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Remove all hooks, write queued records, log losses. Idempotent.

        The writer is flushed; it is closed if this logger opened it.

        Args:
            timeout_s: Limit in seconds. Records not written by then are counted and logged.
        """
        self._run.close(timeout_s)

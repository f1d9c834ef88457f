"""``HookLogger``: watches a model in training and writes what it sees to TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import tensorboard

from telemetry.alert import Alert
from telemetry.arguments import (
    Alerts,
    HistogramForm,
    OnAlert,
    Options,
    bulk_of,
    check_loss,
    check_optimizer,
    check_phase,
    check_rules,
    log_dir_of,
)
from telemetry.capture import Budget, Content
from telemetry.events.background import each_within
from telemetry.first_rank import Ranks
from telemetry.no_run import NoRun, is_disabled
from telemetry.pipeline import CLOSE_TIMEOUT_S, FullSteps, every
from telemetry.resuming import FirstStep
from telemetry.run import Run
from telemetry.selection import Selection, Selectors
from telemetry.writing.hparams import Hyperparameter


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
            the training thread, or on a CUDA device the time by which measured steps take longer.
            Full measurements become less frequent; gradient norms, too, where they alone take
            about that. The curves ``telemetry/overhead``, ``telemetry/every_n_steps`` and
            ``telemetry/norms_every_n_steps`` show the result. Each rank decides for itself. None:
            no limit.
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
        alerts: Rules that judge each step; None: the default rules; ``()``: none. A dict sets
            parameters of the default rules, or leaves some out:
            ``{"dead_units": {"fraction": 0.8}, "saturated_units": None}``.
        on_alert: Called with each :class:`Alert` on a background thread, or ``"raise"`` to raise
            :class:`TelemetryAlert` from the end of an optimizer step, :meth:`log`, :meth:`step` or
            the end of the ``with`` block; or ``"stop"`` to set :attr:`should_stop` there. Notes do
            neither.
        first_step: Number of the first step of a resumed run; ``"auto"``: the step after the last
            one in the local directory, or 0. TensorBoard then hides what was logged there for this
            step and later ones. :meth:`load_state_dict` also restores the state of the alerts.
        ranks: Of several processes that train together: ``"merged"``: the first one writes what all
            have measured, as one run; ``"each"``: each writes its own, into ``rank-0003/``;
            ``"first"``: the first one measures and writes, the others do nothing.
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
            model without parameters.
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
        alerts: Alerts = None,
        on_alert: OnAlert = None,
        first_step: FirstStep = 0,
        ranks: Ranks = "merged",
        max_bytes_per_step: int | None = 800_000,
        histograms: HistogramForm = "tensor",
        loss: str | None = None,
        enabled: bool = True,
    ) -> None:
        self._run: Run | NoRun
        if is_disabled(enabled):
            self._run = NoRun(log_dir_of(writer, written=False), first_step)
            return
        budget: Budget | None = None
        if max_overhead is not None:
            budget = Budget(max_overhead=max_overhead, every_n_steps=every_n_steps)
        options = Options(
            full_steps=FullSteps(every(every_n_steps)),
            budget=budget,
            optimizer=check_optimizer(optimizer),
            selection=Selection.parse(modules, exclude),
            content=Content(
                activations=activations,
                activation_gradients=activation_gradients,
                gradients=gradients,
                weights=weights,
                images=images,
            ),
            bulk=bulk_of(max_bytes_per_step, histograms),
            rules=check_rules(alerts),
            on_alert=on_alert,
            first_step=first_step,
            ranks=ranks,
            loss=check_loss(loss),
        )
        self._run = Run(model, writer, options, self.close)
        self._run.start()

    def __repr__(self) -> str:
        state = "attached" if self._run.capture.attached else "removed"
        return f"<HookLogger {state} step={self.current_step} log_dir={self.log_dir!r}>"

    def __enter__(self) -> HookLogger:
        self.attach()
        return self

    def __exit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        if exception is not None:
            each_within(CLOSE_TIMEOUT_S, partial(self._run.note_exception, exception), self.close)
            return
        self.close()
        self._run.training_ended()

    @property
    def log_dir(self) -> str:
        """The log directory or URL."""
        return self._run.log_dir

    @property
    def current_step(self) -> int:
        """Number of the step in progress: ``first_step`` and the optimizer steps since."""
        return self._run.capture.step

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """The alerts so far, oldest first; waits until the rules have seen all steps so far."""
        return self._run.alerts

    @property
    def should_stop(self) -> bool:
        """Whether an alert asks for the end of training; False without ``on_alert="stop"``.

        Ranks that train together all see it at the end of the same optimizer step.
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
        self._run.log(scalars, more, named)

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
        self._run.hparams(values, metrics)

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
        return self._run.capture.phase(check_phase(name))

    def step(self) -> None:
        """End a step in a loop that has no ``torch.optim.Optimizer``.

        Call it after the update and before gradients are cleared.
        """
        self._run.step()

    def flush(self) -> None:
        """Wait until the rules have seen all steps so far and all is written; at most a minute."""
        self._run.flush()

    def state_dict(self) -> dict[str, Any]:
        """The current step and the state of the alerts, for a checkpoint; call it between steps.

        Waits until the rules have seen all steps so far and these are written, so that a run that
        is killed and resumed lacks none; at most ten seconds for the disk. Your own rules are
        included if they have ``state_dict()`` and ``load_state_dict(state)``.

        Returns:
            Numbers, strings, lists and dicts, for ``torch.save``, ``json`` and any checkpoint.
        """
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, in this process or another one.

        In a log directory, TensorBoard hides what was logged earlier for this step and later ones.

        Args:
            state: The state. Parts that do not fit this logger are left out with a warning.

        Raises:
            TypeError: ``state`` is not a dict.
            ValueError: The logger is closed.
        """
        self._run.load_state_dict(state)

    def remove(self) -> None:
        """Remove all hooks; :meth:`attach` puts them back and continues the count."""
        self._run.capture.detach()

    def attach(self) -> None:
        """Put the hooks back after :meth:`remove`. Harmless when repeated.

        Raises:
            ValueError: The logger is closed.
        """
        self._run.attach()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Remove all hooks, write what is waiting, log what was lost. Harmless when repeated.

        The writer is flushed; it is closed if this logger opened it.

        Args:
            timeout_s: Limit in seconds. What is not written by then is counted and logged.
        """
        self._run.close(timeout_s)

"""Watches one model: arms hooks for the steps that are due, hands over what each step gave."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from telemetry import images
from telemetry.capture.captured import CapturedStep, RunTotals
from telemetry.capture.layout import LayoutKeeper
from telemetry.capture.module_hooks import ModuleHooks
from telemetry.capture.optimizer_hooks import OptimizerHooks
from telemetry.capture.parameters import ParameterTable, UpdateProbe, local, read_norms
from telemetry.capture.scaler import read_scaler
from telemetry.capture.window import Window
from telemetry.faults import Faults
from telemetry.host_copy import HostCopy
from telemetry.measure import Measurer
from telemetry.schedule import Schedule
from telemetry.selection import Selection, cleaned, spread
from telemetry.torch_private import calling_scaler, undisturbed

log = logging.getLogger("telemetry")

PICTURED_MODULES = 12
"""Convolutions whose feature maps are drawn; more are thinned evenly over the depth."""

_NAMED_AT_MOST = 8


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a full measurement holds."""

    activations: bool = True
    activation_gradients: bool = True
    gradients: bool = True
    weights: bool = True
    images: bool = True


class Capture:
    """Turns the training of one model into :class:`CapturedStep` values, one per optimizer step.

    The model is held weakly. Hooks are on its modules only during steps that ``is_due`` names; on
    all other steps the norms of the gradients are taken and nothing else is done.

    Args:
        model: The model in training.
        selection: Which of its modules are watched.
        is_due: Which steps are measured in full.
        content: What that holds.
        deliver: Called on the training thread with each finished step; must not wait.
        safe_point: Called between steps; may raise into the training loop.
        primary: Whose steps count; None: the first optimizer that steps the model's parameters.
        faults: Where hooks tell what failed.
        first_step: Number of the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        selection: Selection,
        is_due: Schedule,
        content: Content,
        deliver: Callable[[CapturedStep], None],
        safe_point: Callable[[], None],
        primary: Optimizer | None,
        faults: Faults,
        first_step: int = 0,
    ) -> None:
        self._model = weakref.ref(model)
        self._selection = selection
        self._is_due = is_due
        self._content = content
        self._deliver = deliver
        self._safe_point = safe_point
        self._primary = weakref.ref(primary) if primary is not None else None
        self._faults = faults
        self._table = ParameterTable(model)
        self._foreign: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._layout = LayoutKeeper(model, selection, self._table)
        self._totals = RunTotals()
        self._measurer = Measurer()
        self._window = Window(step=0, measurer=None)
        self._hooks = ModuleHooks(
            model,
            faults,
            activations=content.activations,
            activation_grads=content.activation_gradients,
            backward_ended=self._backward_ended,
        )
        self._clock: OptimizerHooks | None = None
        self._probes: dict[int, UpdateProbe] = {}
        self._by_hand = False
        self._told_silent = False
        self.step = first_step

    # --- attaching ---------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether hooks are in place."""
        return self._clock is not None

    def attach(self) -> None:
        """Begin to watch, from the current step on."""
        if self._clock is None:
            primary = self._primary() if self._primary is not None else None
            self._clock = OptimizerHooks(self, primary)
            self._open_window()

    def detach(self) -> None:
        """Take every hook off; harmless when done twice."""
        if self._clock is not None:
            self._clock.remove()
            self._clock = None
        self._hooks.remove()

    # --- the listener of the optimizers' hooks ----------------------------------------------

    def steps_parameters(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` holds parameters of the model."""
        if optimizer in self._foreign:
            return False
        if self._table.holds(optimizer):
            return True
        model = self._model()  # perhaps its parameters were replaced since
        if model is not None and self._table.refresh(model) and self._table.holds(optimizer):
            return True
        self._foreign.add(optimizer)
        return False

    def before_step(self, optimizer: Optimizer) -> None:
        """Read the gradients, which are final, and what the step is about to change."""
        try:
            with undisturbed():
                self._read_gradients(optimizer)
        except Exception:
            self._faults.report("to read the gradients")

    def passes_over(self) -> None:
        """Observe no more passes in this step: a closure's further evaluations."""
        self._hooks.stop()

    def after_step(self, optimizer: Optimizer) -> None:
        """See how far the parameters have moved."""
        probe = self._probes.pop(id(optimizer), None)
        if probe is None:
            return
        try:
            with undisturbed():
                self._window.updates += probe.read()
        except Exception:
            self._faults.report("to measure the update of the parameters")

    def step_completed(self) -> None:
        """Hand the step over and prepare for the next."""
        try:
            if self._window.full:
                self._tell_silent_modules(self._window)
            self._hooks.disarm()
            self._hand_over(self._window)
        except Exception:
            self._faults.report("to hand over a step")
        self.step += 1
        self._open_window()

    def safe_point(self) -> None:
        """Let the logger raise between steps, if it was asked to."""
        self._safe_point()

    # --- without an optimizer, and apart from training ----------------------------------------

    def manual_step(self) -> None:
        """A step of a loop that has no ``torch.optim.Optimizer``: gradients are still there."""
        model = self._model()
        if model is None:
            return
        self._by_hand = True
        try:
            with undisturbed():
                self._table.refresh(model)
                self._measure(list(enumerate(model.parameters())))
                for probe in self._probes.values():
                    self._window.updates += probe.read()
        except Exception:
            self._faults.report("to read the gradients")
        self.step_completed()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure every forward pass inside, as a phase of its own; none of them is training."""
        model = self._model()
        if model is None or not self.attached:
            yield
            return
        hooks = ModuleHooks(model, self._faults, activations=True, activation_grads=False)
        window = Window(step=self.step, measurer=Measurer(), phase=name)
        with self._hooks.paused():
            try:
                self._arm(model, hooks, window)
                yield
            finally:
                hooks.remove()
                self._hand_over(window)

    # --- one step ------------------------------------------------------------------------------

    def _open_window(self) -> None:
        model = self._model()
        full = self._is_due(self.step)
        self._probes.clear()
        self._window = Window(step=self.step, measurer=self._measurer if full else None)
        if not full or model is None:
            return
        try:
            if self._table.refresh(model):
                self._foreign.clear()
            self._arm(model, self._hooks, self._window)
            if self._by_hand and self._content.weights:
                # Nothing tells when such a loop is about to change the parameters.
                with undisturbed():
                    self._probes[0] = UpdateProbe(list(enumerate(model.parameters())))
        except Exception:
            self._faults.report("to attach its hooks")
            self._hooks.disarm()

    def _arm(self, model: nn.Module, hooks: ModuleHooks, window: Window) -> None:
        watched = cleaned(self._selection.apply(model).items())
        convolutions = [n for n, m in watched.items() if isinstance(m, nn.modules.conv._ConvNd)]
        drawn = spread(convolutions, PICTURED_MODULES) if self._content.images else []
        hooks.arm(watched, window, pictured=frozenset(drawn), input_picture=self._content.images)

    def _hand_over(self, window: Window) -> None:
        model = self._model()
        layout = self._layout.current(model, window.order)
        self._deliver(window.close(layout=layout, totals=self._totals, wall_time=time.time()))

    def _read_gradients(self, optimizer: Optimizer) -> None:
        window = self._window
        scaler = calling_scaler()
        if scaler is not None:
            window.scaler = read_scaler(scaler, optimizer, self.step)
        parameters = self._table.of(optimizer)
        self._measure(parameters)
        window.learning_rates += [
            HostCopy(rate) if isinstance(rate, Tensor) else float(rate)
            for rate in (group.get("lr", math.nan) for group in optimizer.param_groups)
        ]
        if window.full and self._content.weights:
            self._probes[id(optimizer)] = UpdateProbe(parameters)

    def _measure(self, parameters: Sequence[tuple[int, Tensor]]) -> None:
        """Norms of all gradients; on full steps the gradients and parameters themselves."""
        window = self._window
        grads = [(i, p.grad) for i, p in parameters if p.grad is not None]
        norms = read_norms(grads)
        window.norms += norms
        # After the step all is NaN; only now can a broken parameter be told from a bad batch.
        if window.full or any(reading.known_nonfinite for reading in norms):
            window.parameter_norms += read_norms(parameters)
        if not window.full:
            return
        names = [p.name for p in self._table.parameters]
        if self._content.gradients:
            for index, grad in grads:
                window.observe("grads", names[index], local(grad))
        if self._content.weights:
            for index, parameter in parameters:
                window.observe("weights", names[index], local(parameter.detach()))
        self._read_buffers(window)
        if self._content.images:
            self._take_filters(window)

    def _read_buffers(self, window: Window) -> None:
        model = self._model()
        if model is not None and not window.buffer_names:
            named = cleaned(model.named_buffers())
            floats = {name: b for name, b in named.items() if b.is_floating_point()}
            window.buffer_names = list(floats)
            window.buffer_norms = read_norms(list(enumerate(floats.values())))

    def _take_filters(self, window: Window) -> None:
        """The weights of the convolution that ran first."""
        if window.filters:
            return
        for name in window.order:
            module = self._hooks.watched[name]
            if isinstance(module, nn.modules.conv._ConvNd):
                sample = images.sample_filters(local(module.weight.detach()))
                if sample is not None:
                    window.filters[name] = HostCopy(sample)
                return

    def _backward_ended(self, window: Window) -> None:
        """A backward pass is over: gradients are reduced over ranks and not yet clipped."""
        model = self._model()
        if model is None:
            return
        try:
            with undisturbed():
                window.norms_before_clipping = read_norms(
                    [(i, p.grad) for i, p in enumerate(model.parameters()) if p.grad is not None]
                )
        except Exception:
            self._faults.report("to read the gradients before clipping")

    def _tell_silent_modules(self, window: Window) -> None:
        """Name, once, the watched modules that did not run in the first full step."""
        silent = [name for name in self._hooks.watched if name not in window.order]
        if self._told_silent or not silent:
            return
        self._told_silent = True
        if len(silent) == len(self._hooks.watched):
            log.warning(
                "telemetry: no module was seen running at step %d, so activations are missing. "
                "Either the model was not in training mode, or its forward pass was compiled "
                "before HookLogger was made: make it earlier, or call "
                "torch._dynamo.reset_code_caches() once after making it, or train the logged steps "
                'under torch.compiler.set_stance("force_eager").',
                window.step,
            )
            return
        names = ", ".join(silent[:_NAMED_AT_MOST])
        more = f" and {len(silent) - _NAMED_AT_MOST} more" if len(silent) > _NAMED_AT_MOST else ""
        log.warning(
            "telemetry: %d of %d watched modules did not run at step %d, nothing is logged for "
            "their outputs: %s%s",
            len(silent), len(self._hooks.watched), window.step, names, more,
        )  # fmt: skip

"""Watches one model: arms hooks for the steps that are due, hands over what each step gave."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from telemetry import images
from telemetry.capture.module_hooks import ModuleHooks
from telemetry.capture.optimizer_hooks import OptimizerHooks
from telemetry.capture.parameters import ParameterTable, UpdateProbe, local, read_norms
from telemetry.capture.window import CapturedStep, Window
from telemetry.faults import Faults
from telemetry.host_copy import HostCopy
from telemetry.measure import Measurer
from telemetry.records import Layout, Module
from telemetry.schedule import Schedule
from telemetry.selection import Selection, cleaned, spread
from telemetry.torch_private import undisturbed

PICTURED_MODULES = 12
"""Convolutions whose feature maps are drawn; more are thinned evenly over the depth."""


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
        self._forward_order: dict[str, None] = {}
        self._layout = _layout(model, selection, self._table, ())
        self._measurer = Measurer()
        self._window = Window(step=0, measurer=None)
        self._hooks: ModuleHooks | None = None
        self._clock: OptimizerHooks | None = None
        self._probes: dict[int, UpdateProbe] = {}
        self._thread: int | None = None
        self.step = 0

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
        self._disarm()

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
        if self._hooks is not None:
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
            self._disarm()
            self._deliver(self._window.close(layout=self._current_layout(), wall_time=time.time()))
        except Exception:
            self._faults.report("to hand over a step")
        self.step += 1
        self._open_window()

    def safe_point(self) -> None:
        """Let the logger raise between steps, if it was asked to."""
        self._safe_point()

    def manual_step(self) -> None:
        """A step of a loop that has no ``torch.optim.Optimizer``: gradients are still there."""
        model = self._model()
        if model is None:
            return
        try:
            with undisturbed():
                self._table.refresh(model)
                self._measure(list(enumerate(model.parameters())))
        except Exception:
            self._faults.report("to read the gradients")
        self.step_completed()

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
            self._arm(model)
        except Exception:
            self._faults.report("to attach its hooks")
            self._disarm()

    def _arm(self, model: nn.Module) -> None:
        watched = cleaned(self._selection.apply(model).items())
        pictured = spread(
            [name for name, m in watched.items() if isinstance(m, nn.modules.conv._ConvNd)],
            PICTURED_MODULES,
        )
        content = self._content
        self._hooks = ModuleHooks(
            model,
            watched,
            self._window,
            self._faults,
            activations=content.activations,
            activation_grads=content.activation_gradients,
            image_modules=frozenset(pictured if content.images else ()),
            input_image=content.images,
            thread=self._thread,
        )

    def _disarm(self) -> None:
        if self._hooks is not None:
            self._thread = self._hooks.thread or self._thread
            self._hooks.remove()
            self._hooks = None

    def _read_gradients(self, optimizer: Optimizer) -> None:
        parameters = self._table.of(optimizer)
        self._measure(parameters)
        self._window.learning_rates += [
            HostCopy(rate) if isinstance(rate, Tensor) else float(rate)
            for rate in (group.get("lr", math.nan) for group in optimizer.param_groups)
        ]
        if self._window.measurer is not None and self._content.weights:
            self._probes[id(optimizer)] = UpdateProbe(parameters)

    def _measure(self, parameters: Sequence[tuple[int, Tensor]]) -> None:
        """Norms of all gradients; on full steps the gradients and parameters themselves."""
        window, names = self._window, [p.name for p in self._table.parameters]
        grads = [(i, p.grad) for i, p in parameters if p.grad is not None]
        window.norms += read_norms(grads)
        if window.measurer is None:
            return
        if self._content.gradients:
            for index, grad in grads:
                window.observe("grads", names[index], local(grad))
        if self._content.weights:
            for index, parameter in parameters:
                window.observe("weights", names[index], local(parameter.detach()))
        if self._content.images:
            self._take_filters(window)

    def _take_filters(self, window: Window) -> None:
        """The weights of the convolution that ran first."""
        if self._hooks is None or window.filters:
            return
        for name in window.order:
            module = self._hooks.watched[name]
            if isinstance(module, nn.modules.conv._ConvNd):
                sample = images.sample_filters(local(module.weight.detach()))
                if sample is not None:
                    window.filters[name] = HostCopy(sample)
                return

    # --- the model's layout ------------------------------------------------------------------

    def _current_layout(self) -> Layout:
        """The layout, made anew when parameters were replaced or a module ran for the first time.

        The forward order is that of first calls; a module that never ran follows the module before
        it in ``named_modules()``.
        """
        model = self._model()
        new = [name for name in self._window.order if name not in self._forward_order]
        if model is not None and (new or self._layout.parameters is not self._table.parameters):
            self._forward_order.update(dict.fromkeys(new))
            self._layout = _layout(model, self._selection, self._table, self._forward_order)
        return self._layout


def _layout(
    model: nn.Module, selection: Selection, table: ParameterTable, forward_order: Iterable[str]
) -> Layout:
    types = {name: type(module).__name__ for name, module in cleaned(model.named_modules()).items()}
    shown = set(cleaned(selection.apply(model).items())) | {p.module_name for p in table.parameters}
    rank = {name: index for index, name in enumerate(forward_order)}
    ranked: list[tuple[int, str]] = []
    last = -1
    for name in types:
        last = rank.get(name, last)
        if name in shown:
            ranked.append((last, name))
    ranked.sort(key=lambda pair: pair[0])
    return Layout(
        modules=tuple(Module(name=name, type_name=types[name]) for _, name in ranked),
        parameters=table.parameters,
    )

"""Observes the watched modules' outputs and their gradients, in the passes that count.

A module's backward hook would replace its outputs and fail where they are changed in place
afterwards. A hook on the output tensor itself does neither, and sees the gradient of the value
that the module returned.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from telemetry import images
from telemetry.capture.backward import BackwardPass, BackwardPasses
from telemetry.capture.hooks import ForwardHook, InputHook
from telemetry.capture.outputs import tensors_in
from telemetry.capture.parameters import described, local
from telemetry.capture.tally import Tally
from telemetry.capture.window import Window
from telemetry.faults import Faults
from telemetry.host_copy import HostCopy
from telemetry.records import Output
from telemetry.torch_private import (
    NO_TASK,
    backward_is_compiled,
    backward_task,
    graphs_compiled,
    is_being_traced,
    undisturbed,
)


class ModuleHooks:
    """Puts hooks on modules, and keeps what they see of training apart from everything else.

    Training is what runs with gradients enabled while the model or the module itself is in training
    mode, on one thread. In a :meth:`phase` every forward pass of its thread is observed.

    The model is held weakly.

    Args:
        model: The model that the modules belong to.
        faults: Where hooks tell what failed.
        own_time: Entered while anything is done here.
        activations: Whether outputs are measured.
        activation_grads: Whether gradients with respect to them are.
        pass_begins: Called when a forward pass begins though an optimizer has stepped since the
            window was opened; may begin another one.
        pass_ended: Called when a backward pass that reached parameters has ended, with the
            window, what was observed in the pass, and those parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        faults: Faults,
        *,
        own_time: AbstractContextManager[None],
        activations: bool,
        activation_grads: bool,
        pass_begins: Callable[[], None],
        pass_ended: Callable[[Window, Tally, Iterable[Tensor]], None],
    ) -> None:
        self.faults = faults
        self.own_time = own_time
        self.armed = False
        self.in_phase = False
        self.gradients_wanted = activation_grads
        self._activations = activations
        self._activation_grads = activation_grads
        self._model = weakref.ref(model)
        self._pass_begins = pass_begins
        self._pass_ended = pass_ended
        self._window: Window | None = None
        self._window_number = 0
        self._phase: Window | None = None
        self._paused = False
        self._passes: BackwardPasses | None = None
        self._probes = Tally()
        self._pictured: frozenset[str] = frozenset()
        self._input_picture = False
        self._unit_axes: dict[tuple[int, ...], int] = {}
        self._input_hook = InputHook(self, model)
        self._hooks: dict[str, ForwardHook] = {}
        self._installed = False
        self._parameter_handles: list[RemovableHandle] = []
        self._graphs_before = graphs_compiled()

    # --- on and off ----------------------------------------------------------------------------

    @property
    def watched(self) -> Mapping[str, ForwardHook]:
        """The hooks that are on a module, by its name."""
        return {name: hook for name, hook in self._hooks.items() if hook.installed}

    def install(
        self, watched: Mapping[str, nn.Module], *, pictured: frozenset[str], input_picture: bool
    ) -> None:
        """Put hooks on modules, and take them off all others; they do nothing yet.

        Args:
            watched: Modules by name.
            pictured: Modules whose feature maps are wanted.
            input_picture: Whether the input of the first module that runs is wanted.
        """
        self._input_hook.install()
        before, self._hooks = self._hooks, {}
        for name, module in watched.items():
            if isinstance(module, torch.jit.ScriptModule):
                self.faults.tell(
                    "modules that torch.jit has compiled take no hooks, nothing is "
                    "logged for their outputs"
                )
                continue
            hook = before.get(name)
            if hook is None or hook.module() is not module:
                hook = ForwardHook(self, name, module)
            else:
                del before[name]
            hook.install()
            self._hooks[name] = hook
        for hook in before.values():
            hook.remove()
        self._installed = True
        self._pictured = pictured
        self._input_picture = input_picture

    def begin(self, window: Window) -> None:
        """Observe training; what is seen goes to ``window``."""
        self._window = window
        self._window_number += 1
        self._passes = BackwardPasses(lambda ended: self._end_pass(window, ended))
        self._probes = Tally()
        self._unit_axes = {}
        self._paused = False
        self.gradients_wanted = self._activation_grads
        model = self._model()
        if backward_is_compiled():
            self.gradients_wanted = False
            self.faults.tell(
                "activation gradients are not measured: compiled autograd is on, which does not "
                "work with hooks on them"
            )
        elif model is not None:
            self._parameter_handles = [
                parameter.register_post_accumulate_grad_hook(self._accumulated)
                for parameter in model.parameters()
                if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf
            ]
        self._update_flags()

    def pause(self) -> None:
        """Observe no forward pass of training until :meth:`resume` or the next window."""
        self._paused = True
        self._update_flags()

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._paused = False
        self._update_flags()

    def end(self) -> None:
        """Observe no more training, also where a graph still holds a hook of ours.

        If no backward pass accumulated a gradient, they were all training: loops that take
        gradients by ``autograd.grad`` have no others.
        """
        if self._window is not None and self._window.passes == 0:
            self._window.tally.absorb(self._probes)
        self._window = self._passes = None
        self._update_flags()
        while self._parameter_handles:
            self._parameter_handles.pop().remove()

    def uninstall(self) -> None:
        """Take hooks off again, but for modules in compiled graphs, which test ``armed``.

        A graph that is compiled while no hook is there would never show anything. So once
        something has been compiled, hooks stay on modules that have not run outside of a graph.
        """
        if not self._installed:
            return
        self._installed = False
        self._input_hook.remove()
        compiling = graphs_compiled() != self._graphs_before
        for hook in self._hooks.values():
            if not hook.traced and (hook.ran_eagerly or not compiling):
                hook.remove()

    def remove(self) -> None:
        """Take all hooks off; harmless when done twice."""
        self.end()
        self._input_hook.remove()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    @contextmanager
    def phase(self, window: Window) -> Iterator[None]:
        """Observe every forward pass of this thread meanwhile, whether it is training or not."""
        window.thread = threading.get_ident()
        outer, self._phase = self._phase, window
        self._update_flags()
        try:
            yield
        finally:
            self._phase = outer
            self._update_flags()

    def _update_flags(self) -> None:
        self.in_phase = self._phase is not None
        self.armed = self.in_phase or (self._window is not None and not self._paused)

    # --- what the hooks see --------------------------------------------------------------------

    def on_input(self, hook: InputHook, given: Any) -> None:
        """See :class:`telemetry.capture.hooks.Watcher`."""
        window = self._window_of_call(hook, grad_enabled=torch.is_grad_enabled())
        if window is None:
            return
        with undisturbed() as alone:
            if alone:
                window.awaits_input = True
                window.given.clear()
                self._observe_inputs(window, "", given)

    def on_forward(self, hook: ForwardHook, args: Any, output: Any) -> None:
        """See :class:`telemetry.capture.hooks.Watcher`."""
        window = self._window_of_call(hook, grad_enabled=torch.is_grad_enabled())
        if window is None:
            return
        with undisturbed() as alone:
            if not alone:
                return
            inputs = args if window.awaits_input else ()
            window.awaits_input = False
            self._observe_inputs(window, hook.name, inputs)
            window.order.setdefault(hook.name)
            if hook.name in window.left_out:
                return
            for index, tensor in enumerate(tensors_in(output)):
                if is_being_traced(tensor):
                    self.faults.tell(_WITHOUT_VALUES)
                    return
                self._observe_output(window, hook, tensor, index)
                # Without a grad_fn it is a leaf: a parameter would keep the hook beyond this step.
                if window is self._window and self.gradients_wanted and tensor.grad_fn is not None:
                    tensor.register_hook(hook.for_gradient(index, self._window_number))
            self._take_images(window, hook.name, inputs, output)

    def on_graph(self, hook: ForwardHook, tensor: Tensor, index: int, backward: bool) -> None:
        """See :class:`telemetry.capture.hooks.Watcher`."""
        if backward:
            self.on_gradient(hook, index, self._window_number, tensor)
            return
        # Without gradients only the graphs of a phase show anything.
        window = self._window_of_call(hook, grad_enabled=True)
        if window is None:
            return
        with undisturbed() as alone:
            if alone:
                window.awaits_input = False
                window.order.setdefault(hook.name)
                if hook.name in window.left_out:
                    return
                self._observe_output(window, hook, tensor, index)
                self._take_images(window, hook.name, (), tensor if index == 0 else ())

    def on_gradient(
        self, hook: ForwardHook, index: int, window_number: int, grad: Tensor | None
    ) -> None:
        """See :class:`telemetry.capture.hooks.Watcher`."""
        window = self._window
        if window is None or window_number != self._window_number or grad is None:
            return  # a graph kept from an earlier step; an output that got no gradient
        if hook.name in window.left_out:
            return
        current = self._passes.current() if self._passes is not None else None
        tally = window.tally if current is None else current.tally
        output = Output(hook.name, index)
        with undisturbed() as alone:
            if alone:
                window.observe(tally, "output_grads", output, local(grad), scaled=True)

    def _window_of_call(
        self, hook: ForwardHook | InputHook, *, grad_enabled: bool
    ) -> Window | None:
        """Where a module's call belongs; None if it is neither training nor in a phase."""
        thread = threading.get_ident()
        if self._phase is not None and self._phase.thread == thread:
            return self._phase
        window, model, module = self._window, self._model(), hook.module()
        if window is None or self._paused or not grad_enabled or model is None or module is None:
            return None
        if not (model.training or module.training):
            return None
        if backward_task() != NO_TASK:  # checkpointing runs the forward pass again
            return None if hook in window.ran_forward else window
        if window.thread is None:
            window.thread = thread
        if window.thread != thread:
            return None
        if window.optimizers:
            self._pass_begins()
            window = self._window
        if window is not None:
            window.ran_forward.add(hook)
        return window

    def _observe_inputs(self, window: Window, name: str, given: Any) -> None:
        """Measure what comes from outside, each tensor once though it is handed on."""
        if window is not self._window or not self._activations:
            return
        for tensor in tensors_in(given):
            can_be_nonfinite = tensor.is_floating_point() or tensor.is_complex()
            if can_be_nonfinite and id(tensor) not in window.given:
                window.given.add(id(tensor))
                if not is_being_traced(tensor):
                    window.observe(window.tally, "inputs", name, local(tensor.detach()))

    def _observe_output(
        self, window: Window, hook: ForwardHook, tensor: Tensor, index: int
    ) -> None:
        if not self._activations:
            return
        output, tensor = Output(hook.name, index), local(tensor)
        axis = self._unit_axis(hook, tensor)
        if not window.observe(window.tally, "outputs", output, tensor, unit_axis=axis):
            what = described(tensor)
            self.faults.tell(
                f"what {hook.called} returned is not measured: {what} cannot be", kind=what
            )

    def _unit_axis(self, hook: ForwardHook, tensor: Tensor) -> int | None:
        """Axis that counts units or channels; that of the layer before where shapes agree."""
        dim = tensor.dim()
        if dim < 2:
            return None
        if hook.units == "unknown":
            return self._unit_axes.get(tuple(tensor.shape), 1 if dim > 3 else dim - 1)
        axis = 1 if hook.units == "first" else dim - 1
        self._unit_axes[tuple(tensor.shape)] = axis
        return axis

    def _take_images(self, window: Window, name: str, args: Any, output: Any) -> None:
        if name in self._pictured and name not in window.feature_maps:
            sample = next(map(images.sample_feature_maps, tensors_in(output)), None)
            if sample is not None:
                window.feature_maps[name] = HostCopy(sample)
        if self._input_picture and window.input is None:
            sample = next(map(images.sample_inputs, tensors_in(args)), None)
            if sample is not None:
                window.input = HostCopy(sample)

    # --- backward passes -----------------------------------------------------------------------

    def _accumulated(self, parameter: Tensor) -> None:
        """A gradient has accumulated, so this backward pass is one of training."""
        with self.own_time:
            try:
                current = self._passes.current() if self._passes is not None else None
                if current is not None:
                    current.accumulated[id(parameter)] = parameter
            except Exception:
                self.faults.report("to follow a backward pass")

    def _end_pass(self, window: Window, ended: BackwardPass) -> None:
        if window is not self._window or self._paused:
            return  # its step is over, or only repeated
        if ended.accumulated:
            self._pass_ended(window, ended.tally, ended.accumulated.values())
        elif window.passes == 0:
            self._probes.absorb(ended.tally)


_WITHOUT_VALUES = (
    "passes in which the model is traced or transformed, or is on the meta device, have no values "
    "to measure"
)

"""Forward hooks on the watched modules, and tensor hooks on what they return.

A module's backward hook would replace its outputs and fail where they are changed in place
afterwards. A hook on the output tensor itself does neither, and sees the gradient of the value
that the module returned.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from telemetry import images
from telemetry.capture import compiled
from telemetry.capture.outputs import tensors_in
from telemetry.capture.window import Window
from telemetry.faults import Faults
from telemetry.host_copy import HostCopy
from telemetry.torch_private import (
    NO_TASK,
    at_end_of_backward,
    backward_task,
    is_being_traced,
    undisturbed,
)

_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
)
_UNITS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.Bilinear)


class ModuleHooks:
    """Observes forward and backward passes while it is armed.

    With ``activation_grads`` or ``backward_ended`` only training is observed: passes with gradients
    enabled, while the model is in training mode. Only one thread is, the first to run a watched
    module.

    The model is held weakly.

    Args:
        model: The model that the modules belong to.
        faults: Where hooks tell what failed.
        activations: Whether outputs are measured.
        activation_grads: Whether gradients with respect to them are.
        backward_ended: Called with the window at the end of each backward pass that reaches a
            parameter; None observes forward passes of any kind, and no backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        faults: Faults,
        *,
        activations: bool,
        activation_grads: bool,
        backward_ended: Callable[[Window], None] | None = None,
    ) -> None:
        self.faults = faults
        self.thread: int | None = None
        self.armed = False
        self.watched: Mapping[str, nn.Module] = {}
        self._model = weakref.ref(model)
        self._activations = activations
        self._activation_grads = activation_grads
        self._backward_ended = backward_ended
        self._paused = False
        self._window: Window | None = None
        self._hooks: dict[str, _ForwardHook] = {}
        self._handles: list[RemovableHandle] = []

    def arm(
        self,
        watched: Mapping[str, nn.Module],
        window: Window,
        *,
        pictured: frozenset[str] = frozenset(),
        input_picture: bool = False,
    ) -> None:
        """Put hooks on the modules; what they see goes to ``window``.

        Args:
            watched: Modules by name.
            window: Where observations go.
            pictured: Modules whose feature maps are wanted.
            input_picture: Whether the input of the first module that runs is wanted.
        """
        self.watched = watched
        self._window = window
        self._pictured = pictured
        self._input_picture = input_picture
        self._seen_outside_backward: set[str] = set()
        self._unit_axes: dict[tuple[int, ...], int] = {}
        for name, module in watched.items():
            hook = self._hooks.get(name)
            if hook is None or hook.module() is not module:
                hook = self._hooks[name] = _ForwardHook(self, name, module)
            hook.install()
        model = self._model()
        if model is not None and self._backward_ended is not None:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._commit)
                for parameter in model.parameters()
                if parameter.requires_grad and parameter.is_leaf
            ]
        self.armed = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Observe no forward pass meanwhile."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def stop(self) -> None:
        """Observe nothing more, also where a graph still holds a hook of ours."""
        self._window = None
        self.armed = False

    def disarm(self) -> None:
        """Take the hooks off, but for modules in compiled graphs, which test :attr:`armed`."""
        self.stop()
        self._remove_handles()
        for hook in self._hooks.values():
            if not hook.traced:
                hook.remove()

    def remove(self) -> None:
        """Take all hooks off; harmless when done twice."""
        self.disarm()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.watched = {}

    def _remove_handles(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    # --- what the hooks see --------------------------------------------------------------------

    def on_forward(self, hook: _ForwardHook, args: Any, output: Any) -> None:
        """A module returned ``output``."""
        window = self._window
        if window is None or not self._begins(hook.name, torch.is_grad_enabled()):
            return
        is_first = not window.order
        window.order.setdefault(hook.name)
        for index, tensor in enumerate(tensors_in(output)):
            if is_being_traced(tensor):
                return
            self._observe_output(window, hook, tensor, index)
            # Without a grad_fn it is a leaf: a parameter would keep the hook beyond this step.
            if self._activation_grads and tensor.requires_grad and tensor.grad_fn is not None:
                grad_hook = _GradHook(self, window, hook, index)
                tensor.register_hook(grad_hook)
        self._take_images(window, hook.name, args if is_first else (), output)

    def on_gradient(self, window: Window, hook: _ForwardHook, index: int, grad: Tensor) -> None:
        """The gradient of an output; kept only if this backward pass reaches a parameter."""
        if window is not self._window:
            return  # a graph kept from an earlier step
        with undisturbed():
            name = _output_name(hook.name, index)
            window.observe("activation_grads", name, grad, task=backward_task())

    def on_graph(self, hook: _ForwardHook, tensor: Tensor, index: int, backward: bool) -> None:
        """A compiled graph shows an output or its gradient."""
        window = self._window
        if window is None:
            return
        if backward:
            if self._activation_grads:
                self.on_gradient(window, hook, index, tensor)
        elif self._begins(hook.name, grad_enabled=True):  # said by the trace
            window.order.setdefault(hook.name)
            self._observe_output(window, hook, tensor, index)

    def _begins(self, name: str, grad_enabled: bool) -> bool:
        """Whether this call of a module is to be observed: one of training, no repetition."""
        model = self._model()
        if model is None or self._paused:
            return False
        if self._backward_ended is not None and not (model.training and grad_enabled):
            return False
        if self.thread is None:
            self.thread = threading.get_ident()
        if self.thread != threading.get_ident():
            return False
        if backward_task() != NO_TASK:  # checkpointing runs the forward pass again
            return name not in self._seen_outside_backward
        self._seen_outside_backward.add(name)
        return True

    def _observe_output(
        self, window: Window, hook: _ForwardHook, tensor: Tensor, index: int
    ) -> None:
        if self._activations:
            axis = self._unit_axis(hook, tensor)
            with undisturbed():
                window.observe(
                    "activations", _output_name(hook.name, index), tensor, unit_axis=axis
                )

    def _unit_axis(self, hook: _ForwardHook, tensor: Tensor) -> int | None:
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

    def _commit(self, parameter: Tensor) -> None:
        """A gradient has accumulated, so this backward pass is one of training."""
        window, task = self._window, backward_task()
        if window is None or task in window.committed:
            return
        window.committed.add(task)
        # Queued twice, to come after the callback by which DDP ends its reduction.
        at_end_of_backward(lambda: at_end_of_backward(lambda: self._on_backward_end(window)))

    def _on_backward_end(self, window: Window) -> None:
        if window is self._window and self._backward_ended is not None:
            self._backward_ended(window)


class _Inert:
    """Copies and pickles of a hook do nothing: a copied model is another model.

    They become a bound method of the standard library that takes anything and returns None, so
    that a model saved while it was watched loads where telemetry is not installed.
    """

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class _ForwardHook(_Inert):
    """The hook of one module; the same object at every arming, for compiled graphs refer to it."""

    def __init__(self, hooks: ModuleHooks, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = weakref.ref(module)
        self.traced = False
        self.units = "unknown"
        if isinstance(module, _CHANNELS_FIRST):
            self.units = "first"
        elif isinstance(module, _UNITS_LAST):
            self.units = "last"
        self._hooks = hooks
        self._number = compiled.register(self)
        self._handle: RemovableHandle | None = None

    def install(self) -> None:
        """Put the hook on its module, after the user's own: what those return is measured."""
        module = self.module()
        if self._handle is None and module is not None:
            self._handle = module.register_forward_hook(self)

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # Compiled graphs are guarded by this flag: there is one with observers and one without.
        if not self._hooks.armed:
            return
        if torch.compiler.is_compiling():
            self.traced = True
            if torch.is_grad_enabled():
                for index, tensor in enumerate(tensors_in(output)):
                    compiled.observe(tensor, self._number, index)
            return
        try:
            self._hooks.on_forward(self, args, output)
        except Exception:
            self._hooks.faults.report(f"to observe the output of {self.name or 'the model'}")

    def in_graph(self, tensor: Tensor, index: int, backward: bool) -> None:
        """See :class:`telemetry.capture.compiled.Observer`."""
        try:
            self._hooks.on_graph(self, tensor, index, backward)
        except Exception:
            self._hooks.faults.report(f"to observe {self.name or 'the model'} in a compiled graph")


class _GradHook(_Inert):
    __slots__ = ("_forward_hook", "_hooks", "_index", "_window")

    def __init__(self, hooks: ModuleHooks, window: Window, hook: _ForwardHook, index: int) -> None:
        self._hooks = hooks
        self._window = window
        self._forward_hook = hook
        self._index = index

    def __call__(self, grad: Tensor) -> None:
        try:
            self._hooks.on_gradient(self._window, self._forward_hook, self._index, grad)
        except Exception:
            name = self._forward_hook.name or "the model"
            self._hooks.faults.report(f"to observe the gradient of {name}")


def _output_name(name: str, index: int) -> str:
    return name if index == 0 else f"{name}[{index}]"

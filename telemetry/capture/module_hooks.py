"""Forward hooks on the watched modules, and tensor hooks on what they return.

A module's backward hook would replace its outputs and fail where they are changed in place
afterwards. A hook on the output tensor itself does neither, and sees the gradient of the value
that the module returned.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from telemetry import images
from telemetry.capture.outputs import tensors_in
from telemetry.capture.window import Window
from telemetry.faults import Faults
from telemetry.host_copy import HostCopy
from telemetry.torch_private import NO_TASK, backward_task, is_being_traced, undisturbed

_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
)
_UNITS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.Bilinear)


class ModuleHooks:
    """Observes one step's forward and backward passes; made when a step is to be measured.

    Only training is observed: passes with gradients enabled, while the model is in training mode,
    on one thread: ``thread``, or the first to run a watched module if it is None.
    """

    def __init__(
        self,
        model: nn.Module,
        watched: Mapping[str, nn.Module],
        window: Window,
        faults: Faults,
        *,
        activations: bool,
        activation_grads: bool,
        image_modules: frozenset[str],
        input_image: bool,
        thread: int | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._window: Window | None = window
        self.watched = watched
        self.faults = faults
        self._activations = activations
        self._activation_grads = activation_grads
        self._image_modules = image_modules
        self._input_image = input_image
        self.thread = thread
        self._seen_outside_backward: set[str] = set()
        self._unit_axes: dict[tuple[int, ...], int] = {}
        # Appended after the user's own hooks, so that what those return is what is measured.
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(_ForwardHook(self, name))
            for name, module in watched.items()
        ]
        self._handles += [
            parameter.register_post_accumulate_grad_hook(self._commit)  # type: ignore[no-untyped-call]
            for parameter in model.parameters()
            if parameter.requires_grad and parameter.is_leaf
        ]

    def stop(self) -> None:
        """Observe nothing more, also where a graph still holds a hook of ours."""
        self._window = None

    def remove(self) -> None:
        """Take the hooks off the modules; harmless when done twice."""
        self.stop()
        while self._handles:
            self._handles.pop().remove()

    def on_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Measure what ``module`` returned and hook its gradient."""
        window = self._window
        model = self._model()
        if window is None or model is None or not model.training or not torch.is_grad_enabled():
            return
        if self.thread is None:
            self.thread = threading.get_ident()
        if self.thread != threading.get_ident():
            return
        task = backward_task()
        if task == NO_TASK:
            self._seen_outside_backward.add(name)
        elif name in self._seen_outside_backward:
            return  # checkpointing runs the forward pass again
        first = not window.order
        window.order.setdefault(name)
        for index, tensor in enumerate(tensors_in(output)):
            if is_being_traced(tensor):
                return
            tensor_name = name if index == 0 else f"{name}[{index}]"
            axis = self._unit_axis(module, tensor)
            if self._activations:
                with undisturbed():
                    window.observe("activations", tensor_name, tensor, unit_axis=axis)
            # Without a grad_fn it is a leaf: a parameter would keep the hook beyond this step.
            if self._activation_grads and tensor.requires_grad and tensor.grad_fn is not None:
                hook = _GradHook(self, window, tensor_name, axis)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        self._take_images(window, name, args if first else (), output)

    def on_gradient(self, window: Window, name: str, axis: int | None, grad: Tensor) -> None:
        """Measure the gradient of an output; kept only if this pass reaches a parameter."""
        if window is not self._window:
            return  # a graph kept from an earlier step
        with undisturbed():
            window.observe("activation_grads", name, grad, unit_axis=axis, task=backward_task())

    def _commit(self, parameter: Tensor) -> None:
        if self._window is not None:
            self._window.committed.add(backward_task())

    def _unit_axis(self, module: nn.Module, tensor: Tensor) -> int | None:
        """Axis that counts units or channels; that of the layer before where shapes agree."""
        if tensor.dim() < 2:
            return None
        if isinstance(module, _CHANNELS_FIRST):
            axis = 1
        elif isinstance(module, _UNITS_LAST):
            axis = tensor.dim() - 1
        else:
            default = 1 if tensor.dim() > 3 else tensor.dim() - 1
            return self._unit_axes.get(tuple(tensor.shape), default)
        self._unit_axes[tuple(tensor.shape)] = axis
        return axis

    def _take_images(self, window: Window, name: str, args: Any, output: Any) -> None:
        if name in self._image_modules and name not in window.feature_maps:
            sample = next(map(images.sample_feature_maps, tensors_in(output)), None)
            if sample is not None:
                window.feature_maps[name] = HostCopy(sample)
        if self._input_image and window.input is None:
            sample = next(map(images.sample_inputs, tensors_in(args)), None)
            if sample is not None:
                window.input = HostCopy(sample)


class _Inert:
    """Copies and pickles of a hook do nothing: a copied model is another model.

    They become a bound method of the standard library that takes anything and returns None, so
    that a model saved while it was watched loads where telemetry is not installed.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class _ForwardHook(_Inert):
    __slots__ = ("_hooks", "_name")

    def __init__(self, hooks: ModuleHooks, name: str) -> None:
        self._hooks = hooks
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._hooks.on_forward(self._name, module, args, output)
        except Exception:
            self._hooks.faults.report(f"to observe the output of {self._name or 'the model'}")


class _GradHook(_Inert):
    __slots__ = ("_axis", "_hooks", "_name", "_window")

    def __init__(self, hooks: ModuleHooks, window: Window, name: str, axis: int | None) -> None:
        self._hooks = hooks
        self._window = window
        self._name = name
        self._axis = axis

    def __call__(self, grad: Tensor) -> None:
        try:
            self._hooks.on_gradient(self._window, self._name, self._axis, grad)
        except Exception:
            self._hooks.faults.report(f"to observe the gradient of {self._name or 'the model'}")

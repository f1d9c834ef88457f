"""The objects that PyTorch calls: on a module, on what it returned, inside a compiled graph."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from telemetry.capture import compiled
from telemetry.capture.inert import Inert
from telemetry.capture.outputs import tensors_in
from telemetry.faults import Faults

# Public names of what nn.modules.conv._ConvNd and nn.modules.batchnorm._NormBase stand for.
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_CHANNELS_FIRST = (
    *CONVOLUTIONS,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
)
_UNITS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.Bilinear)


class Watcher(Protocol):
    """Who the hooks belong to and tell what they see.

    Compiled graphs are guarded by ``armed`` and ``in_phase``, so that there is one with observers
    and one without.
    """

    armed: bool
    in_phase: bool
    gradients_wanted: bool
    faults: Faults
    own_time: AbstractContextManager[None]

    def on_input(self, hook: InputHook, given: Any) -> None:
        """The model is called with ``given``."""

    def on_forward(self, hook: ForwardHook, args: Any, output: Any) -> None:
        """A module returned ``output``."""

    def on_graph(self, hook: ForwardHook, tensor: Tensor, index: int, backward: bool) -> None:
        """A compiled graph shows an output or its gradient."""

    def on_gradient(self, hook: ForwardHook, index: int, window: int, grad: Tensor) -> None:
        """The gradient of an output that was returned in the window with this number."""


class ModuleHook(Inert):
    """A hook of one module; the same object at every arming, for compiled graphs refer to it.

    Attributes:
        module: The module, held weakly.
    """

    def __init__(self, watcher: Watcher, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self._watcher = watcher
        self._handle: RemovableHandle | None = None

    @property
    def installed(self) -> bool:
        """Whether it is on its module."""
        return self._handle is not None

    def install(self) -> None:
        """Put the hook on its module, after the user's own: what those return is measured."""
        module = self.module()
        if self._handle is None and module is not None:
            self._handle = self._put_on(module)

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _put_on(self, module: nn.Module) -> RemovableHandle:
        raise NotImplementedError


class InputHook(ModuleHook):
    """The hook on the model itself, for what it is given; in a compiled graph it does nothing."""

    def _put_on(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._watcher.armed or model is not self.module():
            return
        with self._watcher.own_time:
            try:
                self._watcher.on_input(self, (args, kwargs))
            except Exception:
                self._watcher.faults.report("to observe what the model was given")


class ForwardHook(ModuleHook):
    """The hook of a watched module, for what it returns.

    Attributes:
        name: The module's.
        ran_eagerly: Whether Python has called the hook, not only the compiler.
        traced: Whether a compiled graph has shown something for it.
        units: Which axis of its outputs counts units or channels.
    """

    def __init__(self, watcher: Watcher, name: str, module: nn.Module) -> None:
        super().__init__(watcher, module)
        self.name = name
        self.ran_eagerly = False
        self.traced = False
        self.units = "unknown"
        if isinstance(module, _CHANNELS_FIRST):
            self.units = "first"
        elif isinstance(module, _UNITS_LAST):
            self.units = "last"
        self._number = compiled.register(self)

    @property
    def called(self) -> str:
        """What to call the module in a message."""
        return self.name or "the model"

    def for_gradient(self, index: int, window: int) -> GradHook:
        """A hook for an output, by its place among them and the number of the window."""
        return GradHook(self._watcher, self, index, window)

    def _put_on(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self._trace(output)
            return
        self.ran_eagerly = True
        # A module that shares its hooks with this one is a shallow copy, as DataParallel makes.
        if not self._watcher.armed or module is not self.module():
            return
        with self._watcher.own_time:
            try:
                self._watcher.on_forward(self, args, output)
            except Exception:
                self._watcher.faults.report(f"to observe the output of {self.called}")

    def _trace(self, output: Any) -> None:
        """Put observers into the graph that the compiler is making; it traces what is here."""
        if torch.compiler.is_exporting():
            return
        grad_enabled = torch.is_grad_enabled()
        if not (self._watcher.armed if grad_enabled else self._watcher.in_phase):
            return
        for index, tensor in enumerate(tensors_in(output)):
            compiled.observe(tensor, self._number, index)
            if tensor.requires_grad and self._watcher.gradients_wanted:
                compiled.observe_gradient(tensor, self._number, index)

    def in_graph(self, tensor: Tensor, index: int, backward: bool) -> None:
        """See :class:`telemetry.capture.compiled.Observer`."""
        self.traced = True
        with self._watcher.own_time:
            try:
                self._watcher.on_graph(self, tensor, index, backward)
            except Exception:
                self._watcher.faults.report(f"to observe {self.called} in a compiled graph")


class GradHook(Inert):
    """The hook of a module's output, for its gradient.

    The user may keep the output for long, so all that is kept with it is a weak reference.
    """

    __slots__ = ("_hook", "_index", "_watcher", "_window")

    __torch_unserializable__ = True
    """Keeps PyTorch from warning that it does not save the hook along with the output."""

    def __init__(self, watcher: Watcher, hook: ForwardHook, index: int, window: int) -> None:
        self._watcher = weakref.ref(watcher)
        self._hook = weakref.ref(hook)
        self._index = index
        self._window = window

    def __call__(self, grad: Tensor) -> None:
        watcher, hook = self._watcher(), self._hook()
        if watcher is None or hook is None:
            return
        with watcher.own_time:
            try:
                watcher.on_gradient(hook, self._index, self._window, grad)
            except Exception:
                watcher.faults.report(f"to observe the gradient of {hook.called}")


def is_inert_copy(hook: object) -> bool:
    """Whether this is what became of a hook that was copied along with its module."""
    return isinstance(getattr(hook, "__self__", None), nullcontext)

"""The objects that PyTorch calls for a module, and the tensors inside whatever that returns."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from telemetry.capture import compiled
from telemetry.capture.inert import Inert
from telemetry.capture.watch import Watch
from telemetry.records import Output
from telemetry.torch_private import find
from telemetry.torch_private.compiler import GRAPHS_CAN_BE_OBSERVED

# Public names of what nn.modules.conv._ConvNd and nn.modules.batchnorm._NormBase stand for.
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_CHANNELS_FIRST = (*CONVOLUTIONS, *_BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm)
_UNITS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.Bilinear)

_GLOBAL_HOOKS = find(
    nn.modules.module, "_global_forward_hooks", "what nn.Sequential returns is measured twice"
)


class Receiver(Protocol):
    """What the hooks on modules call: see :class:`telemetry.capture.steps.Steps`."""

    def on_input(self, hook: InputHook, given: Any) -> None: ...
    def on_output(self, hook: ForwardHook, args: Any, output: Any) -> None: ...
    def on_graph(self, hook: ForwardHook, tensor: Tensor, place: int, backward: bool) -> None: ...


class ModuleHook(Inert):
    """A hook of one module; the same object at every step, because compiled graphs refer to it.

    Attributes:
        module: The module, held weakly.
    """

    def __init__(self, watch: Watch, receiver: Receiver, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self._watch = watch
        self._receiver = receiver
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
        if not self._watch.switch.armed or model is not self.module():
            return
        doing = "to observe what the model was given"
        self._watch.contain(doing, self._receiver.on_input, self, (args, kwargs))


class ForwardHook(ModuleHook):
    """The hook of a watched module, for what it returns.

    Attributes:
        name: The module's.
        output: The first tensor that it returns.
        called: What to call the module in a message.
        ran_eagerly: Whether Python has called the hook, not only the compiler.
        traced: Whether a compiled graph has shown something for it.
        units: Which axis of its outputs counts units or channels: "first", "last" or "unknown".
    """

    def __init__(self, watch: Watch, receiver: Receiver, name: str, module: nn.Module) -> None:
        super().__init__(watch, receiver, module)
        self.rename(name)
        self.ran_eagerly = False
        self.traced = False
        last = "last" if isinstance(module, _UNITS_LAST) else "unknown"
        self.units = "first" if isinstance(module, _CHANNELS_FIRST) else last
        self._number = compiled.register(self)

    def rename(self, name: str) -> None:
        """Go by this name of the module: layers before it may have been added or removed."""
        self.name, self.output, self.called = name, Output(name), name or "the model"

    def _put_on(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self._trace(output)
            return
        self.ran_eagerly = True
        # A module that shares its hooks with this one is a shallow copy, as DataParallel makes.
        if not self._watch.switch.armed or module is not self.module():
            return
        doing = f"to observe the output of {self.called}"
        self._watch.contain(doing, self._receiver.on_output, self, args, output)

    def _trace(self, output: Any) -> None:
        """Put observers into the graph that the compiler is making; it traces this method."""
        if not GRAPHS_CAN_BE_OBSERVED or torch.compiler.is_exporting():
            return
        switch = self._watch.switch
        if not (switch.armed if torch.is_grad_enabled() else switch.in_phase):
            return
        for place, tensor in enumerate(tensors_in(output)):
            compiled.observe(tensor, self._number, place)
            if tensor.requires_grad and switch.output_grads:
                compiled.observe_gradient(tensor, self._number, place)

    def repeats(self) -> Output | None:
        """Whose output this module returns unchanged, which is then measured once.

        That is known of ``nn.Sequential`` and its last module, as long as no hook but ours comes
        between. PyTorch does not tell whether values have changed: they can be written through
        ``.data``, and by compiled code.
        """
        module = self.module()
        if type(module) is not nn.Sequential or "forward" in vars(module) or not len(module):
            return None
        last = module[-1]
        ours = next(reversed(last._forward_hooks.values()), None)
        if not isinstance(ours, ForwardHook) or ours.module() is not last:
            return None
        if last._backward_hooks or last._backward_pre_hooks or _GLOBAL_HOOKS != {}:
            return None
        return ours.output if next(iter(module._forward_hooks.values()), None) is self else None

    def in_graph(self, tensor: Tensor, place: int, backward: bool) -> None:
        """See :class:`telemetry.capture.compiled.Observer`."""
        self.traced = True
        doing = f"to observe {self.called} in a compiled graph"
        self._watch.contain(doing, self._receiver.on_graph, self, tensor, place, backward)


def is_inert_copy(hook: object) -> bool:
    """Whether this is what became of a hook that was copied along with its module."""
    return isinstance(getattr(hook, "__self__", None), nullcontext)


_DEEPEST = 8
"""Containers inside of each other; one that holds itself would have no end."""


def tensors_in(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Tensors in tuples, lists, mappings and dataclasses, nested in each other, in their order.

    Anything else (None, numbers, foreign objects) is passed over.
    """
    if isinstance(value, Tensor):
        yield value
    elif depth == _DEEPEST:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), depth + 1)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor of :func:`tensors_in` replaced by what ``function`` makes of it.

    Containers are rebuilt as what they were; a mapping that cannot be changed stays as it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        rebuilt = copy.copy(value)
        for key, item in value.items():
            rebuilt[key] = map_tensors(item, function)
        return rebuilt
    if isinstance(value, tuple | list):
        items = [map_tensors(item, function) for item in value]
        # Named tuples take one argument for each field; torch's own take a sequence, as others do.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            # Frozen ones are values, too.
            item = map_tensors(getattr(value, field.name, None), function)
            object.__setattr__(other, field.name, item)
        return other
    return value

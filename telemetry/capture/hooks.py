"""Hooks of modules, as PyTorch and compiled graphs call them, and the tensors that they receive."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from telemetry.capture.context import Context
from telemetry.capture.experts import Router
from telemetry.records import Output
from telemetry.torch_private import undisturbed
from telemetry.torch_private.compiler import GRAPHS_CAN_BE_OBSERVED, keep_in_graph
from telemetry.torch_private.module_calls import keywords_of_call

# Public names of the subclasses of nn.modules.conv._ConvNd and nn.modules.batchnorm._NormBase.
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_CHANNELS_FIRST = (*_CONVOLUTIONS, *_BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm)
_UNITS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.Bilinear)

# Functions, named like their modules, by the class of their node in the graph.
_FUNCTIONS = {
    "SoftmaxBackward0": "Softmax",
    "SigmoidBackward0": "Sigmoid",
    "ReluBackward0": "ReLU",
    "TanhBackward0": "Tanh",
}


class CallObserver(Protocol):
    """Receiver of the module calls that hooks observe; ``grad_enabled`` is that of the call."""

    def on_input(self, hook: InputHook, given: Any, grad_enabled: bool) -> None:
        """Receive the arguments of the model, before it runs."""

    def on_output(self, hook: ForwardHook, args: Any, output: Any, grad_enabled: bool) -> None:
        """Receive the positional arguments and the output of a module."""

    def on_attention(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Receive the arguments of ``scaled_dot_product_attention``, after the call."""

    def in_graph(self, hook: ForwardHook, tensor: Tensor, place: int, backward: bool) -> None:
        """Receive a module's output, or its gradient if ``backward``, from a compiled graph."""


class Inert:
    """Base of hooks whose copies and pickles do nothing: a copied model is another model.

    A copy is a bound method of the standard library that takes anything and returns None. So a
    model that was saved with hooks loads where telemetry is not installed.
    """

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class ModuleHook(Inert):
    """Hook of one module; the same object at every step, because compiled graphs refer to it.

    The global hook of :class:`~telemetry.torch_private.module_calls.AroundModuleCalls` calls it.
    After a compilation, and behind hooks of the user's own, it is installed on its module instead.
    """

    def __init__(self, observer: CallObserver, context: Context, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.handle: RemovableHandle | None = None  # while the hook is on its module
        self._observer, self._context = observer, context
        self._for_one_call = False

    def install(self, *, for_one_call: bool = False) -> None:
        """Put the hook on its module, after the user's own: what those return is measured."""
        module = self.module()
        if self.handle is None and module is not None:
            self.handle, self._for_one_call = self._put_on(module), for_one_call

    def remove(self) -> None:
        """Take the hook off its module; idempotent."""
        if self.handle is not None:
            self.handle.remove()
            self.handle, self._for_one_call = None, False

    def _put_on(self, module: nn.Module) -> RemovableHandle:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a hook that does nothing, and is removed when the whole copy has been made."""
        handle = self.handle
        copied = None if handle is None else memo.get(id(handle.hooks_dict_ref()))
        if copied is not None and handle is not None:
            end = nullcontext()
            memo[id(end)] = end  # dies with the memo, when copying has ended
            weakref.finalize(end, copied.pop, handle.id, None)
        return nullcontext().__exit__


class InputHook(ModuleHook):
    """Hook on the model itself, for its inputs; in a compiled graph it does nothing."""

    def _put_on(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(self)

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._context.armed and model is self.module():
            given = (args, keywords_of_call())
            self._observer.on_input(self, given, torch.is_grad_enabled())


class ForwardHook(ModuleHook):
    """Hook of a watched module, for its outputs."""

    def __init__(
        self, observer: CallObserver, context: Context, name: str, module: nn.Module
    ) -> None:
        super().__init__(observer, context, module)
        self.rename(name)
        self.pictured = False  # its feature maps are drawn
        self.router: Router | None = None  # it chooses experts
        self.ran_eagerly = False  # Python has called the hook, not only the compiler
        self.traced = False  # a compiled graph has reported a tensor of the module
        self.convolves = isinstance(module, _CONVOLUTIONS)
        # Axis of its outputs that counts units or channels.
        last = "last" if isinstance(module, _UNITS_LAST) else "unknown"
        self.units = "first" if isinstance(module, _CHANNELS_FIRST) else last
        # A tensor of shape ``[]``: an int would be a constant of the graph, and each of several
        # equal layers would be compiled again.
        number = next(_numbers)
        self._number = torch.tensor(number, device="cpu")
        _hooks[number] = self

    def rename(self, name: str) -> None:
        """Set the module's name: layers before it may have been added or removed."""
        self.name, self.output, self.called = name, Output(name), name or "the model"

    def _put_on(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self._trace(output)
        else:
            self.observe(module, args, output)

    def observe(self, module: nn.Module, args: Any, output: Any) -> None:
        """Report a call of the module by Python."""
        self.ran_eagerly = True
        # A module that shares its hooks with this one is a shallow copy, as DataParallel makes.
        if module is self.module():
            if self._for_one_call:
                self.remove()
            if self._context.armed:
                self._observer.on_output(self, args, output, torch.is_grad_enabled())

    def _trace(self, output: Any) -> None:
        """Put observers into the graph that is compiled; the compiler traces this method."""
        if not GRAPHS_CAN_BE_OBSERVED or torch.compiler.is_exporting():
            return
        context = self._context
        if not (context.armed if torch.is_grad_enabled() else context.in_phase):
            return
        for place, tensor in enumerate(tensors_in(output)):
            torch.ops.telemetry.observe(tensor, self._number, place, False)
            if tensor.requires_grad and context.output_grads:
                _observe_gradient(tensor, self._number, place)

    def in_graph(self, tensor: Tensor, place: int, backward: bool) -> None:
        """Report an output of the module, or its gradient, from a compiled graph that runs."""
        self.traced = True
        self._observer.in_graph(self, tensor, place, backward)


class ResultHook(ForwardHook):
    """Hook of the model itself, for a result that a function of PyTorch has computed.

    It is never installed on the model.

    Attributes:
        function: The function, named like its module.
    """

    function = ""

    def observe(self, module: nn.Module, args: Any, output: Any) -> None:
        """Report a call of the model that ended with one of the functions.

        A model with own parameters has its place in the forward order already. Subclasses of
        tensors would see that their node is read.
        """
        if module is not self.module() or module._parameters or type(output) is not Tensor:
            return
        if (function := _function_of(output)) is not None:
            self.function = function
            super().observe(module, args, output)


@undisturbed(always=True)
def _function_of(output: Tensor) -> str | None:
    return _FUNCTIONS.get(type(output.grad_fn).__name__)


# --- tensors in arguments and outputs -------------------------------------------------------------

_DEEPEST = 8  # containers inside of each other; one may contain itself


def tensors_in(value: object, depth: int = 0) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, mappings and dataclasses, in their order.

    Other objects are skipped.
    """
    if isinstance(value, Tensor):
        return [value]
    items: Iterable[object] = ()
    if depth == _DEEPEST:
        return []
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, tuple | list):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    tensors: list[Tensor] = []
    for item in items:
        tensors += [item] if isinstance(item, Tensor) else tensors_in(item, depth + 1)
    return tensors


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``function`` applied to every tensor of :func:`tensors_in`.

    Containers keep their types; a mapping that cannot be changed stays as it is.
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
        # Named tuples take one argument for each field; torch's own take a sequence.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            item = map_tensors(getattr(value, field.name, None), function)
            object.__setattr__(other, field.name, item)  # also on a frozen one
        return other
    return value


# --- compiled graphs ------------------------------------------------------------------------------

# torch.compile traces a hook only if it finds it at the first compiled call, and would either break
# the graph at what our hooks do or trace it into the graph. So under the compiler a hook emits
# ``telemetry::observe``, an operator that the compiler does not look into.

_hooks: weakref.WeakValueDictionary[int, ForwardHook] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _observe_gradient(output: Tensor, number: Tensor, index: int) -> None:
    def report_gradient(grad: Tensor) -> Tensor:
        torch.ops.telemetry.observe(grad, number, index, True)
        return grad

    output.register_hook(report_gradient)


def _report(x: Tensor, number: Tensor, index: int, backward: bool) -> None:
    hook = _hooks.get(int(number))
    if hook is not None:
        hook.in_graph(x, index, backward)


_LIBRARY = torch.library.Library("telemetry", "DEF")
_SCHEMA = "observe(Tensor x, Tensor number, int index, bool backward) -> ()"
# A graph that is replayed runs no Python. PyTorch has the tag since 2.8.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_LIBRARY.define(_SCHEMA, tags=() if _UNSAFE is None else (_UNSAFE,))
_LIBRARY.impl("observe", _report, "CompositeExplicitAutograd")
_LIBRARY.impl("observe", lambda x, number, index, backward: None, "Meta")
keep_in_graph(torch.ops.telemetry.observe.default)

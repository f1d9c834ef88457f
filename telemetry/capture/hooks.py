"""The hooks of modules, as PyTorch and compiled graphs call them, kept apart from training."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from telemetry.capture.nested import tensors_in
from telemetry.failures import Failures
from telemetry.records import Output
from telemetry.torch_private import keywords_of_call, undisturbed
from telemetry.torch_private.compiler import GRAPHS_CAN_BE_OBSERVED, keep_in_graph

if TYPE_CHECKING:
    from telemetry.capture.capture import Capture

log = logging.getLogger("telemetry")

# Public names of what nn.modules.conv._ConvNd and nn.modules.batchnorm._NormBase stand for.
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_CHANNELS_FIRST = (*_CONVOLUTIONS, *_BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm)
_UNITS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.Bilinear)

Method = TypeVar("Method", bound=Callable[..., None])


class Guard(NamedTuple):
    """Where to report what failed, and what is entered while anything is done."""

    failures: Failures
    own_time: AbstractContextManager[None]


def guarded(doing: str, *, reads: bool = True) -> Callable[[Method], Method]:
    """Keep a method apart from training: its faults are reported, its time is counted as ours.

    Its owner has a :class:`Guard`, ``guard``.

    Args:
        doing: What failed, "to ..."; ``{0}`` stands for the owner, ``{1}`` for the first argument.
        reads: Whether tensors are read, which no mode of the caller's may see; nothing is done
            where that cannot be.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def contained(self: Any, *args: Any, **kwargs: Any) -> None:
            failures, own_time = self.guard
            try:
                with own_time:
                    if not reads:
                        return method(self, *args, **kwargs)
                    with undisturbed() as possible:
                        if possible:
                            method(self, *args, **kwargs)
            except Exception:
                failures.report(doing.format(self, *args))

        return cast(Method, contained)

    return decorate


class Inert:
    """Copies and pickles of a hook do nothing: a copied model is another model.

    They become a bound method of the standard library that takes anything and returns None, so
    that a model saved while it had hooks loads where telemetry is not installed.
    """

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class ModuleHook(Inert):
    """A hook of one module; the same object at every step, because compiled graphs refer to it.

    It is called by the global hook of :class:`~telemetry.torch_private.AroundModuleCalls`, or is on
    its module: where something has been compiled, and after hooks of the user's own.
    """

    def __init__(self, capture: Capture, module: nn.Module) -> None:
        self.guard = capture.guard
        self.module = weakref.ref(module)
        self._capture = capture
        self._handle: RemovableHandle | None = None
        self._for_one_call = False

    @property
    def installed(self) -> bool:
        """Whether it is on its module."""
        return self._handle is not None

    def install(self, *, for_one_call: bool = False) -> None:
        """Put the hook on its module, after the user's own: what those return is measured."""
        module = self.module()
        if self._handle is None and module is not None:
            self._handle, self._for_one_call = self._put_on(module), for_one_call

    def remove(self, *, after_one_call: bool = False) -> None:
        """Take the hook off; ``after_one_call``: only if it was put there for that."""
        if self._handle is not None and (self._for_one_call or not after_one_call):
            self._handle.remove()
            self._handle = None

    def _put_on(self, module: nn.Module) -> RemovableHandle:
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a hook that does nothing, and is dropped when the whole copy has been made."""
        hooks = None if self._handle is None else self._handle.hooks_dict_ref()
        copied = None if hooks is None else memo.get(id(hooks))
        if copied is not None and self._handle is not None:
            end = nullcontext()
            memo[id(end)] = end  # lives as long as the memo: until copying has ended
            weakref.finalize(end, copied.pop, self._handle.id, None)
        return nullcontext().__exit__


class InputHook(ModuleHook):
    """The hook on the model itself, for what it is given; in a compiled graph it does nothing."""

    def _put_on(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_pre_hook(self)

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._capture.armed and model is self.module():
            self._on_input((args, keywords_of_call()), torch.is_grad_enabled())

    @guarded("to observe what the model was given")
    def _on_input(self, given: Any, grad_enabled: bool) -> None:
        self._capture.join_ranks()
        step = self._capture.step_of_call(self, grad_enabled)
        if step is not None:
            step.on_input(given)


class ForwardHook(ModuleHook):
    """The hook of a watched module, for what it returns."""

    def __init__(self, capture: Capture, name: str, module: nn.Module) -> None:
        super().__init__(capture, module)
        self.rename(name)
        self.ran_eagerly = False  # Python has called the hook, not only the compiler
        self.traced = False  # a compiled graph has shown something for it
        self.convolves = isinstance(module, _CONVOLUTIONS)
        # Which axis of its outputs counts units or channels.
        last = "last" if isinstance(module, _UNITS_LAST) else "unknown"
        self.units = "first" if isinstance(module, _CHANNELS_FIRST) else last
        # A tensor of shape ``[]``: an int would be a constant of the graph, and each of several
        # equal layers would be compiled anew.
        number = next(_numbers)
        self._number = torch.tensor(number, device="cpu")
        _observers[number] = self

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
        if module is self.module():
            self.remove(after_one_call=True)
            if self._capture.armed:
                self._on_output(args, output, torch.is_grad_enabled())

    @guarded("to observe the output of {0.called}")
    def _on_output(self, args: Any, output: Any, grad_enabled: bool) -> None:
        step = self._capture.step_of_call(self, grad_enabled)
        if step is not None:
            step.on_output(self, args, output)

    def _trace(self, output: Any) -> None:
        """Put observers into the graph that the compiler is making; it traces this method."""
        if not GRAPHS_CAN_BE_OBSERVED or torch.compiler.is_exporting():
            return
        capture = self._capture
        if not (capture.armed if torch.is_grad_enabled() else capture.in_phase):
            return
        for place, tensor in enumerate(tensors_in(output)):
            torch.ops.telemetry.observe(tensor, self._number, place, False)
            if tensor.requires_grad and capture.output_grads:
                _observe_gradient(tensor, self._number, place)

    @guarded("to observe {0.called} in a compiled graph")
    def in_graph(self, tensor: Tensor, place: int, backward: bool) -> None:
        """A compiled graph runs: its module returned ``tensor``, or has its gradient."""
        self.traced = True
        if backward:
            self._capture.in_progress.on_output_grad(self, place, tensor, in_graph=True)
            return
        # Without gradients only the graphs of a phase show anything.
        step = self._capture.step_of_call(self, grad_enabled=True)
        if step is not None:
            step.on_graph_output(self, tensor, place)


# --- compiled graphs ------------------------------------------------------------------------------

# torch.compile traces a hook only if it finds it at the first compiled call, and would either break
# the graph at what our hooks do or trace it into the graph. So under the compiler a hook emits
# ``telemetry::observe``, which the compiler takes as opaque and runs as it is.

_observers: weakref.WeakValueDictionary[int, ForwardHook] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _observe_gradient(output: Tensor, number: Tensor, index: int) -> None:
    def show_gradient(grad: Tensor) -> Tensor:
        torch.ops.telemetry.observe(grad, number, index, True)
        return grad

    output.register_hook(show_gradient)


def _show(x: Tensor, number: Tensor, index: int, backward: bool) -> None:
    observer = _observers.get(int(number))
    if observer is not None:
        observer.in_graph(x, index, backward)


_LIBRARY = torch.library.Library("telemetry", "DEF")
_SCHEMA = "observe(Tensor x, Tensor number, int index, bool backward) -> ()"
# A graph that is replayed runs no Python. Before PyTorch 2.8 there is no such tag.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)
_LIBRARY.define(_SCHEMA, tags=() if _UNSAFE is None else (_UNSAFE,))
_LIBRARY.impl("observe", _show, "CompositeExplicitAutograd")
_LIBRARY.impl("observe", lambda x, number, index, backward: None, "Meta")
keep_in_graph(torch.ops.telemetry.observe.default)

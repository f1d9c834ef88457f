"""Captures inputs, outputs and gradients of modules without changing them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from telemetry.capture.hooks import tensors_in
from telemetry.capture.inert import Inert
from telemetry.failures import Failures
from telemetry.interventions.intervention import Intervention, remove_all
from telemetry.selection import Selectors, select_modules
from telemetry.torch_compiler import drop_compiled_code, graph_break
from telemetry.torch_private import NO_TASK, backward_task, is_being_traced, undisturbed

F = TypeVar("F", bound=Callable[..., None])
_uncompiled: Callable[[F], F] = graph_break(
    "capture() of telemetry needs graph breaks; compile without fullgraph=True"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """Inputs and outputs of one call of a module: detached copies on the same device.

    Attributes:
        inputs: The tensors that it was called with, as they were before it ran; those in keyword
            arguments come last.
        outputs: The tensors that it returned, as they were before anything changed them in place.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    _grads: list[Tensor | None]

    @property
    def grad_outputs(self) -> tuple[Tensor | None, ...]:
        """The gradients with respect to :attr:`outputs` so far; None for outputs without one.

        Several backward passes through the same call add up, as in ``Tensor.grad``.
        """
        return tuple(self._grads)


def capture(model: nn.Module, select: Selectors | None = None, *, calls: int = 1) -> Capturing:
    """Capture the inputs and outputs of modules, and the gradients of the outputs.

    ::

        with capture(model, "conv*") as captured:
            loss_function(model(x), y).backward()
        captured["conv1"].outputs[0]       # what conv1 returned
        captured["conv1"].grad_outputs[0]  # the gradient of the loss with respect to it

    The network computes the same as without it, bit for bit, with two exceptions. In evaluation
    mode, PyTorch has a fast path for transformer layers without hooks, which rounds differently. A
    compiled model is compiled again, with graph breaks at the selected modules; compiled with
    ``fullgraph=True``, it raises.

    Tensors are found in tuples, lists, mappings and dataclasses. A parameter that a module returns
    unchanged has no gradient here. Under a ``GradScaler``, gradients include its factor. A call
    has no gradients if checkpointing with ``use_reentrant=True`` does not repeat it bit for bit.

    Args:
        model: The model whose modules are captured.
        select: Which modules; default: every leaf module.
        calls: How many of the latest calls of each module to keep. They stay in memory as long as
            the returned object.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A glob matches no module, or ``calls`` is less than 1.
    """
    if isinstance(calls, bool) or not isinstance(calls, int):
        raise TypeError(f"capture(calls={calls!r}): must be an int")
    if calls < 1:
        raise ValueError(f"capture(calls={calls}): must be at least 1")
    return Capturing(select_modules(model, select, caller="capture"), calls)


class Capturing(Intervention, Mapping[str, Captured]):
    """The latest call of each selected module that ran, by its name in ``named_modules()``.

    It can still be read after :meth:`remove`. When it is garbage-collected, its hooks are removed.
    """

    def __init__(self, modules: Mapping[str, nn.Module], calls: int) -> None:
        self._keepers = {name: _CallKeeper(name, calls) for name in modules}
        super().__init__(
            put_on
            for name, module in modules.items()
            for put_on in self._keepers[name].hooks(module)
        )
        weakref.finalize(self, remove_all, self._handles).atexit = False
        drop_compiled_code()

    def __getitem__(self, name: str) -> Captured:
        kept = self.calls(name)
        if not kept:
            raise KeyError(f"{name!r} has not run since capture() was called")
        return kept[-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, keeper in self._keepers.items() if keeper.kept)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def calls(self, name: str) -> tuple[Captured, ...]:
        """The calls of one module that were kept, the latest one last."""
        if name not in self._keepers:
            raise KeyError(f"{name!r} is not captured; choose from {', '.join(self._keepers)}")
        return tuple(call.captured for call in self._keepers[name].kept)

    def remove(self) -> None:
        """Remove the hooks, including those that wait for gradients. Harmless when repeated."""
        super().remove()
        for keeper in self._keepers.values():
            keeper.stop()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    captured: Captured
    with_grad: bool
    handles: list[RemovableHandle] = field(default_factory=list)

    def watch(self, output: object, failures: Failures) -> None:
        """Capture the gradients of ``output``, whose values were captured."""
        grads = self.captured._grads
        for index, tensor in enumerate(tensors_in(output)):
            # Without a grad_fn it is a leaf, whose gradient sums over all its uses.
            if tensor.requires_grad and tensor.grad_fn is not None:
                self.handles.append(tensor.register_hook(partial(_add, grads, index, failures)))

    def stop(self) -> None:
        remove_all(self.handles)


def _add(grads: list[Tensor | None], index: int, failures: Failures, grad: Tensor) -> None:
    try:
        with undisturbed():
            earlier = grads[index]
            grads[index] = grad.detach().clone() if earlier is None else earlier + grad
    except Exception:
        failures.report("to capture a gradient")


class _CallKeeper:
    """Keeps the latest calls of one module."""

    def __init__(self, name: str, calls: int) -> None:
        self._name = name
        self._calls = calls
        self._failures = Failures()
        self._pending = threading.local()
        self.kept: deque[_Call] = deque()

    def hooks(self, module: nn.Module) -> Iterator[Any]:
        """Functions that register the hooks."""
        before, after = _Hook(self.before), _Hook(self.after)
        yield partial(module.register_forward_pre_hook, before, with_kwargs=True)
        # Also called after an exception, to forget the inputs.
        yield partial(module.register_forward_hook, after, with_kwargs=True, always_call=True)

    def stop(self) -> None:
        """Capture no more gradients."""
        for call in self.kept:
            call.stop()

    def before(self, args: Any, kwargs: Any) -> None:
        """The module is about to be called."""
        if backward_task() != NO_TASK:
            return
        if not hasattr(self._pending, "inputs"):
            self._pending.inputs = []
        # A list for each thread: a module may call itself.
        self._pending.inputs.append(())
        try:
            self._pending.inputs[-1] = _copies((args, kwargs))
        except Exception:
            self._failures.report(f"to capture the inputs of {self._name or 'the model'}")

    def after(self, args: Any, kwargs: Any, output: Any) -> None:
        """The module returned ``output``, or None after an exception."""
        try:
            if backward_task() != NO_TASK:
                self._run_again(output)
            else:
                self._keep(self._pending.inputs.pop(), output)
        except Exception:
            self._failures.report(f"to capture the outputs of {self._name or 'the model'}")

    def _keep(self, inputs: tuple[Tensor, ...], output: Any) -> None:
        if output is None or any(map(is_being_traced, tensors_in(output))):
            return
        outputs = _copies(output)
        grads: list[Tensor | None] = [None] * len(outputs)
        captured = Captured(inputs=inputs, outputs=outputs, _grads=grads)
        call = _Call(captured=captured, with_grad=torch.is_grad_enabled())
        call.watch(output, self._failures)
        if len(self.kept) == self._calls:
            self.kept.popleft().stop()
        self.kept.append(call)

    def _run_again(self, output: Any) -> None:
        """Checkpointing repeats a call. If it first ran without gradients, this call has them."""
        for call in reversed(self.kept):
            if not call.with_grad and not call.handles and _same(call.captured.outputs, output):
                call.watch(output, self._failures)
                return


def _copies(value: Any) -> tuple[Tensor, ...]:
    with undisturbed():
        return tuple(tensor.detach().clone() for tensor in tensors_in(value))


def _same(captured: tuple[Tensor, ...], output: Any) -> bool:
    tensors = tuple(tensors_in(output))
    with undisturbed():
        return len(captured) == len(tensors) and all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(captured, tensors, strict=True)
        )


class _Hook(Inert):
    """Calls a method of an object that may be gone by then."""

    __slots__ = ("_method",)

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    @_uncompiled
    def __call__(self, module: nn.Module, *given: Any) -> None:
        method = self._method()
        if method is not None:
            method(*given)

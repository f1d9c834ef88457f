"""When the optimizers of a model step: the clock of everything that is captured."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from telemetry.torch_private import NO_TASK, at_end_of_backward, backward_task


class StepListener(Protocol):
    """What is told of each optimizer step."""

    def steps_parameters(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds parameters of the watched model."""

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradients are final and the parameters not yet changed."""

    def passes_over(self) -> None:
        """What runs forward or backward from here to the end of the step is not part of it."""

    def after_step(self, optimizer: Optimizer) -> None:
        """The parameters have changed."""

    def step_completed(self) -> None:
        """The primary optimizer has stepped; an optimizer step of the model is over."""

    def safe_point(self) -> None:
        """Training is between two steps; the only call that may raise."""


class OptimizerHooks:
    """Calls a listener around the steps of the optimizers that hold its parameters.

    PyTorch's hooks on all optimizers are used, so it does not matter whether an optimizer is made
    before or after, nor which library calls it. The primary optimizer is the one given, else the
    first one that steps; when it is gone, the next one takes its place.

    The listener and the optimizers are held weakly.
    """

    def __init__(self, listener: StepListener, primary: Optimizer | None = None) -> None:
        self._listener = weakref.ref(listener)
        self._primary = weakref.ref(primary) if primary is not None else None
        hooks = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
        self._handles = [
            register_optimizer_step_pre_hook(_weakly(hooks[0])),
            register_optimizer_step_post_hook(_weakly(hooks[1])),
        ]
        weakref.finalize(self, _remove, self._handles)

    def remove(self) -> None:
        """Take the hooks off; harmless when done twice."""
        _remove(self._handles)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        listener = self._listener()
        if listener is None or not listener.steps_parameters(optimizer):
            return None
        if self._primary is None or self._primary() is None:
            self._primary = weakref.ref(optimizer)
        # With a closure the gradients are stale until it has run: Lightning, LBFGS.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _FirstCall(kwargs["closure"], listener, optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], _FirstCall(args[1], listener, optimizer), *args[2:]), kwargs
        listener.before_step(optimizer)
        return None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listener = self._listener()
        if listener is None or not listener.steps_parameters(optimizer):
            return
        listener.after_step(optimizer)
        if self._primary is None or self._primary() is not optimizer:
            return
        # An optimizer that steps inside backward is not the last one to do so.
        if backward_task() == NO_TASK or not at_end_of_backward(listener.step_completed):
            listener.step_completed()
            listener.safe_point()


class _FirstCall:
    """A closure that tells the listener after its first evaluation."""

    def __init__(
        self, closure: Callable[[], Any], listener: StepListener, optimizer: Optimizer
    ) -> None:
        self._closure = closure
        self._listener: StepListener | None = listener
        self._optimizer = optimizer

    def __call__(self) -> Any:
        loss = self._closure()
        if self._listener is not None:
            self._listener.before_step(self._optimizer)
            self._listener.passes_over()
            self._listener = None
        return loss


def _weakly(method: weakref.WeakMethod[Callable[..., Any]]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        bound = method()
        return bound(*args) if bound is not None else None

    return call


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()

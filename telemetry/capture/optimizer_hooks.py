"""The objects that PyTorch calls around the steps of all optimizers, and in their closures."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from telemetry.torch_private import NO_TASK, at_end_of_backward, backward_task, not_compiled


class StepReceiver(Protocol):
    """What the hooks on optimizers call, in this order."""

    def steps_parameters(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds parameters of the watched model; of the others only this."""

    def other_step(self) -> None:
        """An optimizer that holds none of them has stepped."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step, or to run a closure for its gradients."""

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradients are final and the parameters not yet changed."""

    def evaluated(self) -> None:
        """A closure has run for the first time: until the step ends, it is only repeated."""

    def after_step(self, optimizer: Optimizer) -> bool:
        """The parameters have changed; whether that ends a step of training."""

    def step_completed(self) -> None:
        """A step of training is over, and its backward pass, too."""


class OptimizerHooks:
    """Calls a receiver around the steps of the optimizers that hold its parameters.

    PyTorch's hooks on all optimizers are used, so it does not matter whether an optimizer is made
    before or after, nor which library calls it. The receiver is held weakly.

    Args:
        receiver: What is called.
        safe_point: Called between two steps, and may raise into the training loop.
    """

    def __init__(self, receiver: StepReceiver, safe_point: Callable[[], None]) -> None:
        self._receiver = weakref.ref(receiver)
        self._safe_point = safe_point
        self._handles = [
            register_optimizer_step_pre_hook(_weakly(weakref.WeakMethod(self._before))),
            register_optimizer_step_post_hook(_weakly(weakref.WeakMethod(self._after))),
        ]
        weakref.finalize(self, _remove, self._handles)

    def remove(self) -> None:
        """Take the hooks off; harmless when done twice."""
        _remove(self._handles)

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        receiver = self._receiver()
        if receiver is None or not receiver.steps_parameters(optimizer):
            return None
        receiver.step_begins(optimizer)
        # With a closure the gradients are stale until it has run: Lightning, LBFGS.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _FirstCall(kwargs["closure"], receiver, optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], _FirstCall(args[1], receiver, optimizer), *args[2:]), kwargs
        receiver.before_step(optimizer)
        return None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        receiver = self._receiver()
        if receiver is None:
            return
        if not receiver.steps_parameters(optimizer):
            receiver.other_step()
            return
        if not receiver.after_step(optimizer):
            return
        # An optimizer that steps inside backward is not the last one to do so. Deferred, to come
        # after the end of that backward pass.
        if backward_task() == NO_TASK or not at_end_of_backward(
            receiver.step_completed, deferred=2
        ):
            receiver.step_completed()
            self._safe_point()


class _FirstCall:
    """A closure that calls the receiver after its first evaluation."""

    def __init__(
        self, closure: Callable[[], Any], receiver: StepReceiver, optimizer: Optimizer
    ) -> None:
        self._closure = closure
        self._receiver: StepReceiver | None = receiver
        self._optimizer = optimizer

    def __call__(self) -> Any:
        loss = self._closure()
        if self._receiver is not None:
            self._receiver.before_step(self._optimizer)
            self._receiver.evaluated()
            self._receiver = None
        return loss


def _weakly(method: weakref.WeakMethod[Callable[..., Any]]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        bound = method()
        return bound(*args) if bound is not None else None

    outside_of_graphs = not_compiled(call)

    def hook(*args: Any) -> Any:
        return outside_of_graphs(*args) if torch.compiler.is_compiling() else call(*args)

    return hook


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()

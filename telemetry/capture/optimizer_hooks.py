"""When the optimizers of a model step: the clock of everything that is captured."""

from __future__ import annotations

import logging
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

log = logging.getLogger("telemetry")

_STEPS_UNTIL_REPLACED = 20
"""Steps of another optimizer, without one of the primary in between, after which that is the
primary: a second stage of training has begun, and the first stage's optimizer still exists."""


class StepListener(Protocol):
    """What is told of each optimizer step."""

    def steps_parameters(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds parameters of the watched model."""

    def other_step(self) -> None:
        """An optimizer that holds none of them has stepped."""

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradients are final and the parameters not yet changed."""

    def evaluated(self) -> None:
        """A closure has run for the first time: until the step ends, it is only repeated."""

    def after_step(self, optimizer: Optimizer) -> None:
        """The parameters have changed."""

    def all_stepped(self) -> bool:
        """Whether every parameter that has a gradient was stepped since the last step ended."""

    def step_completed(self) -> None:
        """The primary optimizer has stepped; an optimizer step of the model is over."""

    def safe_point(self) -> None:
        """Training is between two steps; the only call that may raise."""


class OptimizerHooks:
    """Calls a listener around the steps of the optimizers that hold its parameters.

    PyTorch's hooks on all optimizers are used, so it does not matter whether an optimizer is made
    before or after, nor which library calls it. A step is over when the primary optimizer has
    stepped: the one given, or the one after whose step no gradient is left for another, or the last
    one before the next pass of training. Another takes its place when it is gone, or when that one
    steps on and on without it.

    The listener and the optimizers are held weakly.
    """

    def __init__(self, listener: StepListener, primary: Optimizer | None = None) -> None:
        self._listener = weakref.ref(listener)
        self._primary = weakref.ref(primary) if primary is not None else None
        self._is_given = primary is not None
        # Has stepped while there is no primary, and others may be about to.
        self._waiting: weakref.ref[Optimizer] | None = None
        # Of each other optimizer, since the primary last stepped.
        self._steps_without: weakref.WeakKeyDictionary[Optimizer, int]
        self._steps_without = weakref.WeakKeyDictionary()
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
        listener = self._listener()
        if listener is None or not listener.steps_parameters(optimizer):
            return None
        if self._waiting is not None and self._waiting() is optimizer:
            self.pass_begins()
        # With a closure the gradients are stale until it has run: Lightning, LBFGS.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _FirstCall(kwargs["closure"], listener, optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], _FirstCall(args[1], listener, optimizer), *args[2:]), kwargs
        listener.before_step(optimizer)
        return None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        listener = self._listener()
        if listener is None:
            return
        if not listener.steps_parameters(optimizer):
            listener.other_step()
            return
        listener.after_step(optimizer)
        if not self._ends_step(optimizer):
            return
        # An optimizer that steps inside backward is not the last one to do so. Deferred, to come
        # after the end of that backward pass.
        if backward_task() == NO_TASK or not at_end_of_backward(
            listener.step_completed, deferred=2
        ):
            listener.step_completed()
            listener.safe_point()

    def pass_begins(self) -> None:
        """A pass of training begins, so no other optimizer steps with the gradients at hand."""
        listener, last = self._listener(), self._waiting() if self._waiting is not None else None
        if listener is not None and last is not None:
            self._set_primary(last)
            listener.step_completed()

    def _ends_step(self, optimizer: Optimizer) -> bool:
        """Whether the step that this optimizer took is that of the primary one."""
        primary = self._primary() if self._primary is not None else None
        listener = self._listener()
        if primary is None:
            if listener is not None and not listener.all_stepped():
                self._waiting = weakref.ref(optimizer)
                return False
        elif primary is not optimizer:
            steps = self._steps_without.get(optimizer, 0) + 1
            self._steps_without[optimizer] = steps
            if self._is_given or steps < _STEPS_UNTIL_REPLACED:
                return False
            log.warning(
                "telemetry: %s no longer steps, %s does, so its steps are counted from here on; "
                "HookLogger(optimizer=...) names the one that counts",
                type(primary).__name__,
                type(optimizer).__name__,
            )
        self._set_primary(optimizer)
        return True

    def _set_primary(self, optimizer: Optimizer) -> None:
        self._primary = weakref.ref(optimizer)
        self._waiting = None
        self._steps_without.clear()


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
            self._listener.evaluated()
            self._listener = None
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

"""The objects that PyTorch calls around the steps of all optimizers; which of those end a step."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from telemetry.torch_private import NO_TASK, at_end_of_backward, backward_task
from telemetry.torch_private.compiler import not_compiled

log = logging.getLogger("telemetry")

_STEPS_UNTIL_REPLACED = 20
"""Steps of another optimizer, without one of the primary in between, after which that is the
primary: a second stage of training has begun, and the first stage's optimizer still exists."""


class StepReceiver(Protocol):
    """What the hooks on optimizers call: see :class:`telemetry.capture.steps.Steps`."""

    def before_light_step(self, optimizer: Optimizer) -> bool: ...
    def after_light_step(self, optimizer: Optimizer) -> bool: ...
    def steps_parameters(self, optimizer: Optimizer) -> bool: ...
    def other_step(self) -> None: ...
    def before_step(self, optimizer: Optimizer) -> None: ...
    def evaluated(self) -> None: ...
    def after_step(self, optimizer: Optimizer) -> None: ...
    def all_stepped(self) -> bool: ...
    def step_completed(self) -> None: ...


class OptimizerHooks:
    """Calls a receiver around the steps of the optimizers that hold its parameters.

    PyTorch's hooks on all optimizers are used, so it does not matter whether an optimizer is made
    before or after, nor which library calls it. The receiver and the optimizers are held weakly.

    Args:
        primary: Whose steps count; None: see :class:`StepClock`.
        safe_point: Called between two steps, and may raise into the training loop.

    Attributes:
        clock: Counts the steps since the hooks were installed.
    """

    def __init__(
        self, receiver: StepReceiver, primary: Optimizer | None, safe_point: Callable[[], None]
    ) -> None:
        self._receiver = weakref.ref(receiver)
        self._primary = weakref.ref(primary) if primary is not None else None
        self._safe_point = safe_point
        self.clock = StepClock()
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles)

    @property
    def installed(self) -> bool:
        """Whether PyTorch calls them."""
        return bool(self._handles)

    def install(self) -> None:
        """Have PyTorch call the hooks."""
        self.clock = StepClock(self._primary() if self._primary is not None else None)
        self._handles += [
            optimizers.register_optimizer_step_pre_hook(_weakly(self, OptimizerHooks._before)),
            optimizers.register_optimizer_step_post_hook(_weakly(self, OptimizerHooks._after)),
        ]

    def remove(self) -> None:
        """Take the hooks off; harmless when done twice."""
        _remove(self._handles)
        self.clock = StepClock()

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        receiver = self._receiver()
        if receiver is None:
            return None
        if self.clock.is_usual(optimizer, args, kwargs) and receiver.before_light_step(optimizer):
            return None
        if not receiver.steps_parameters(optimizer):
            return None
        if self.clock.step_begins(optimizer):
            receiver.step_completed()
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
        if receiver.after_light_step(optimizer):
            self._safe_point()
            return
        if not receiver.steps_parameters(optimizer):
            receiver.other_step()
            return
        receiver.after_step(optimizer)
        if not self.clock.has_stepped(optimizer, receiver.all_stepped):
            return
        # An optimizer that steps inside backward is not the last one to do so. Deferred, to come
        # after the end of that backward pass.
        if backward_task() == NO_TASK or not at_end_of_backward(
            receiver.step_completed, deferred=2
        ):
            receiver.step_completed()
            self._safe_point()


@dataclass(eq=False)
class _FirstCall:
    """A closure that calls the receiver after its first evaluation."""

    closure: Callable[[], Any]
    receiver: StepReceiver | None
    optimizer: Optimizer

    def __call__(self) -> Any:
        loss = self.closure()
        if self.receiver is not None:
            self.receiver.before_step(self.optimizer)
            self.receiver.evaluated()
            self.receiver = None
        return loss


def _weakly(owner: OptimizerHooks, method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method of ``owner`` while there is one; in few calls, for each step pays them."""
    reference = weakref.ref(owner)

    def call(*args: Any) -> Any:
        alive = reference()
        return method(alive, *args) if alive is not None else None

    outside_of_graphs = not_compiled(call)

    def hook(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return outside_of_graphs(*args)
        alive = reference()
        return method(alive, *args) if alive is not None else None

    return hook


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


class StepClock:
    """Counts the optimizer steps of one model.

    A step is over when the primary optimizer has stepped: the one given, or the one after whose
    step no gradient is left for another, or the last one before the next pass of training. Another
    takes its place when it is gone, or when that one steps on and on without it.

    The optimizers are held weakly.

    Attributes:
        thread: That steps; None until a step has ended outside of a backward pass.
    """

    def __init__(self, primary: Optimizer | None = None) -> None:
        self.thread: int | None = None
        self._primary = weakref.ref(primary) if primary is not None else None
        self._is_given = primary is not None
        # Has stepped while there is no primary, and others may be about to.
        self._waiting: weakref.ref[Optimizer] | None = None
        # Of each other optimizer, since the primary last stepped.
        self._steps_without: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def is_usual(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call like all others begins: of the primary, and there is no closure.

        Args:
            optimizer: That was called.
            args: With what; the optimizer itself is the first.
            kwargs: Likewise.
        """
        return (
            self._primary is not None
            and self._primary() is optimizer
            and self._waiting is None
            and (len(args) == 1 or not any(args[1:]))
            and (not kwargs or not any(kwargs.values()))
            and not self._steps_without
            and backward_task() == NO_TASK
        )

    def step_begins(self, optimizer: Optimizer) -> bool:
        """Whether that ends the step before: it waited, and the same optimizer took it."""
        return self._waiting is not None and self._waiting() is optimizer and self.pass_begins()

    def pass_begins(self) -> bool:
        """Whether that ends a step: no other optimizer will use the gradients at hand."""
        last = self._waiting() if self._waiting is not None else None
        if last is not None:
            self._set_primary(last)
        return last is not None

    def has_stepped(self, optimizer: Optimizer, all_stepped: Callable[[], bool]) -> bool:
        """Whether that ends the step.

        Args:
            optimizer: Holds parameters of the model.
            all_stepped: Whether every parameter that has a gradient was stepped by now.
        """
        primary = self._primary() if self._primary is not None else None
        if primary is None:
            if not all_stepped():
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

    def note_thread(self) -> None:
        """A step ends on this thread; in a backward pass it may be one of autograd's."""
        if backward_task() == NO_TASK:
            self.thread = threading.get_ident()

    def _set_primary(self, optimizer: Optimizer) -> None:
        self._primary = weakref.ref(optimizer)
        self._waiting = None
        self._steps_without.clear()

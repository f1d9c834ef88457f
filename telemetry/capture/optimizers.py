"""Hooks on the steps of all optimizers, and the rule which of them ends a training step.

A training step ends when the optimizer that steps at every batch has stepped, or the last one if
several do. The gradients that a less frequent optimizer uses after that belong to the next step. An
optimizer that another one calls ends no step: its caller does (Lookahead, ZeroRedundancyOptimizer).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from telemetry.capture.parameters import ParameterTable
from telemetry.capture.state import State
from telemetry.torch_private import NO_TASK, at_end_of_backward, backward_task, is_called_by
from telemetry.torch_private.compiler import not_compiled

log = logging.getLogger("telemetry")

# An optimizer no longer ends steps if it was absent from three of the latest eight: it steps less
# often than another, or a second stage of training has begun. A ``GradScaler`` skips single steps.
_RECENT_STEPS = 8
_ABSENT_STEPS = 3


class StepObserver(Protocol):
    """Receiver of the steps of the optimizers that hold parameters of the model."""

    def before_light_step(self, optimizer: Optimizer) -> bool:
        """Read the final gradients by one call; whether nothing else is needed at this step."""

    def before_step(self, optimizer: Optimizer, *, repeats: bool = False) -> None:
        """Read the final gradients; ``repeats``: until the step ends, passes only repeat."""

    def after_light_step(self, optimizer: Optimizer) -> bool:
        """End the step if it is light; whether it was."""

    def after_step(self, optimizer: Optimizer, *, inner: bool = False) -> None:
        """Read the new parameters; ``inner``: another optimizer calls this one."""

    def after_other_step(self) -> None:
        """Count the step of an optimizer without parameters of the model."""

    def all_gradients_used(self) -> bool:
        """Whether optimizers have used every gradient of the model in this step."""

    def step_completed(self) -> None:
        """End the step in progress."""

    def safe_point(self) -> None:
        """Return, or raise into the training loop."""


class Optimizers:
    """Calls the observer around the steps of the optimizers that hold the model's parameters.

    The hooks are PyTorch's global ones, so an optimizer may be made before or after, and any
    library may call it.

    Args:
        given: The optimizer that ends the steps; None: found by the rule above. In the first batch
            that is the one after whose step every gradient has been used, or else the last one
            before the next forward pass.
    """

    def __init__(
        self,
        observer: StepObserver,
        state: State,
        table: ParameterTable,
        given: Optimizer | None,
    ) -> None:
        self._observer = weakref.ref(observer)
        self._state, self._table = state, table
        self._given = None if given is None else weakref.ref(given)
        # Those that have stepped, in the order of their first steps.
        self._met: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        weakref.finalize(observer, _HOOKS.remove, self)
        self._forget()

    def _forget(self) -> None:
        self._ends: weakref.ref[Optimizer] | None = self._given
        self._begun: set[weakref.ref[Optimizer]] = set()  # in the step in progress
        self._latest: weakref.ref[Optimizer] | None = None  # that has stepped in it
        self._stepping: weakref.ref[Optimizer] | None = None  # whose step is running
        self._absences: deque[bool] = deque(maxlen=_RECENT_STEPS)

    def install(self) -> None:
        """Install the hooks."""
        self._forget()
        _HOOKS.add(self)

    def remove(self) -> None:
        """Remove the hooks; idempotent."""
        _HOOKS.remove(self)
        self._forget()

    @property
    def installed(self) -> bool:
        """Whether the hooks are installed."""
        return _HOOKS.calls(self)

    def met(self, optimizer: Optimizer) -> Iterable[Optimizer]:
        """Return all optimizers that have stepped, and this one that is about to."""
        self._met.setdefault(optimizer)
        return self._met

    def is_only(self, optimizer: Optimizer) -> bool:
        """Whether no other optimizer has stepped."""
        return list(self._met) == [optimizer]

    def ends_later(self, optimizer: Optimizer) -> Optimizer | None:
        """Return the optimizer that will end this step, if another one has ended the last."""
        ends, ended = _alive(self._ends), bool(self._absences) and not self._absences[-1]
        return None if not ended or ends is optimizer or self._is_inner(optimizer) else ends

    def end_open_step(self) -> bool:
        """Whether the step in progress was open only for other optimizers, which did not step."""
        if _alive(self._ends) is not None or _alive(self._latest) is None:
            return False
        self._ends = self._latest
        return True

    def step_ended(self) -> None:
        """Begin the next step."""
        self._latest = None
        self._begun.clear()

    # --- what PyTorch calls -----------------------------------------------------------------------

    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        observer = self._observer()
        if observer is None:
            return None
        if self._is_usual(optimizer, args, kwargs) and observer.before_light_step(optimizer):
            self._stepping = self._ends
            return None
        if not self._table.are_stepped_by(optimizer):
            return None
        if self._is_inner(optimizer):
            if _alive(self._ends) is optimizer:
                self._ends = self._stepping
            if self._state.light:
                return None
        else:
            self._stepping = weakref.ref(optimizer)
            if self._stepping in self._begun and self._begins_next_step(optimizer):
                observer.step_completed()
            self._begun.add(self._stepping)
        # With a closure the gradients are stale until it has run: Lightning, LBFGS.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _FirstCall(kwargs["closure"], observer, optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], _FirstCall(args[1], observer, optimizer), *args[2:]), kwargs
        observer.before_step(optimizer)
        return None

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observer = self._observer()
        if observer is None:
            return
        if observer.after_light_step(optimizer):
            self._stepping = None
            observer.safe_point()
            return
        if not self._table.are_stepped_by(optimizer):
            observer.after_other_step()
            return
        if self._is_inner(optimizer):
            observer.after_step(optimizer, inner=True)
            return
        self._stepping = None
        observer.after_step(optimizer)
        self._latest = weakref.ref(optimizer)
        ends = _alive(self._ends)
        if ends is None and observer.all_gradients_used():
            self._ends, ends = self._latest, optimizer
        if ends is not optimizer:
            return
        self._absences.append(False)
        # An optimizer that steps inside backward is not the last one to do so. Deferred, to come
        # after the end of that backward pass.
        if backward_task() == NO_TASK or not at_end_of_backward(
            observer.step_completed, deferred=2
        ):
            observer.step_completed()
            observer.safe_point()

    def _is_usual(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether the optimizer that ends steps begins one, without a closure."""
        return (
            self._ends is not None
            and self._ends() is optimizer
            and (len(args) == 1 or not any(args[1:]))
            and (not kwargs or not any(kwargs.values()))
            and not self._begun
            and backward_task() == NO_TASK
        )

    def _is_inner(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer calls this one."""
        outer = _alive(self._stepping)
        # One whose step has raised is not running any more.
        return outer is not None and outer is not optimizer and is_called_by(outer)

    def _begins_next_step(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that steps again has begun the next step."""
        ends, latest = _alive(self._ends), _alive(self._latest)
        if ends is None:
            return self.end_open_step()
        if ends is optimizer or latest is None or self._given is not None:
            return False
        self._absences.append(True)
        if sum(self._absences) >= _ABSENT_STEPS:
            self._ends = self._latest
            self._absences.clear()
            log.warning(
                "telemetry: %s steps more often than %s, so its steps are counted from here on; "
                "HookLogger(optimizer=...) sets the optimizer whose steps are counted",
                type(latest).__name__,
                type(ends).__name__,
            )
        return True


@dataclass(eq=False)
class _FirstCall:
    """A closure that calls the observer after its first evaluation."""

    closure: Callable[[], Any]
    observer: StepObserver | None
    optimizer: Optimizer

    def __call__(self) -> Any:
        loss = self.closure()
        if self.observer is not None:
            self.observer.before_step(self.optimizer, repeats=True)
            self.observer = None
        return loss


def _alive(reference: weakref.ref[Optimizer] | None) -> Optimizer | None:
    return None if reference is None else reference()


class _GlobalHooks:
    """PyTorch's hooks on all optimizers: one before and one after the step, for all loggers.

    PyTorch iterates over its hooks during a step, and raises if another thread adds or removes one
    of several. The last one of an iteration may be removed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may remove one while it is held
        self._called: dict[int, Optimizers] = {}
        self._handles: list[Any] = []

    def add(self, own: Optimizers) -> None:
        with self._lock:
            self._called[id(own)] = own
            if not self._handles:
                self._handles = [
                    optimizers.register_optimizer_step_pre_hook(self._on_step),
                    optimizers.register_optimizer_step_post_hook(self._on_stepped),
                ]

    def remove(self, own: Optimizers) -> None:
        with self._lock:
            self._called.pop(id(own), None)
            while self._handles and not self._called:
                self._handles.pop().remove()

    def calls(self, own: Optimizers) -> bool:
        """Whether they call the methods of ``own``."""
        return id(own) in self._called

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed = None
        for own in [*self._called.values()]:
            if (found := own.before(optimizer, args, kwargs)) is not None:
                args, kwargs = changed = found
        return changed

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for own in [*self._called.values()]:
            own.after(optimizer, args, kwargs)

    _before_outside_of_graphs = not_compiled(_before)
    _after_outside_of_graphs = not_compiled(_after)

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._before_outside_of_graphs(optimizer, args, kwargs)
        return self._before(optimizer, args, kwargs)

    def _on_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._after_outside_of_graphs(optimizer, args, kwargs)
        else:
            self._after(optimizer, args, kwargs)


_HOOKS = _GlobalHooks()

"""The objects that PyTorch calls around the steps of all optimizers; which of those end a step.

The rule: a step ends when the optimizer that steps at every batch has stepped, the last one if
several do. What one that steps more rarely uses after that belongs to the next step. An optimizer
that another one calls, as Lookahead and ZeroRedundancyOptimizer do, ends none: its caller does.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from telemetry.torch_private import NO_TASK, at_end_of_backward, backward_task, is_called_by
from telemetry.torch_private.compiler import not_compiled

if TYPE_CHECKING:
    from telemetry.capture.capture import Capture

log = logging.getLogger("telemetry")

# An optimizer ends steps no longer if so many of the latest ones went without it: it steps more
# rarely than another, or a second stage of training has begun. A ``GradScaler`` skips single ones.
_STEPS_LOOKED_AT = 8
_STEPS_WITHOUT = 3


class Optimizers:
    """Calls the capture around the steps of the optimizers that hold the model's parameters.

    PyTorch's hooks on all optimizers are used, so it does not matter whether an optimizer is made
    before or after, nor which library calls it.

    Args:
        given: Ends the steps; None: found by the rule above. In the first batch it is the one after
            whose step no gradient is left for another, or the last one before the next pass.
    """

    def __init__(self, capture: Capture, given: Optimizer | None) -> None:
        self._capture = weakref.ref(capture)
        self._given = None if given is None else weakref.ref(given)
        # Those that have stepped, in the order of their first steps.
        self._met: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        self.handles: list[Any] = []  # of PyTorch's hooks, while they are in place
        weakref.finalize(capture, _remove, self.handles)
        self._forget()

    def _forget(self) -> None:
        self._ends: weakref.ref[Optimizer] | None = self._given
        self._begun: WeakSet[Optimizer] = WeakSet()  # in the step in progress
        self._latest: weakref.ref[Optimizer] | None = None  # that has stepped in it
        self._stepping: weakref.ref[Optimizer] | None = None  # whose step is running
        self._went_without: deque[bool] = deque(maxlen=_STEPS_LOOKED_AT)

    def install(self) -> None:
        """Have PyTorch call the hooks."""
        self._forget()
        self.handles += [
            optimizers.register_optimizer_step_pre_hook(self._on_step),
            optimizers.register_optimizer_step_post_hook(self._on_stepped),
        ]

    def remove(self) -> None:
        """Take the hooks off; harmless when done twice."""
        _remove(self.handles)
        self._forget()

    def met(self, optimizer: Optimizer) -> Iterable[Optimizer]:
        """All that have stepped so far, and this one that is about to."""
        self._met.setdefault(optimizer)
        return self._met

    def is_only(self, optimizer: Optimizer) -> bool:
        """Whether no other optimizer has stepped so far."""
        return list(self._met) == [optimizer]

    def step_waited(self) -> bool:
        """Whether the step in progress only waited for other optimizers, which do not come."""
        if _alive(self._ends) is not None or _alive(self._latest) is None:
            return False
        self._ends = self._latest
        return True

    def step_ended(self) -> None:
        """The next step begins."""
        self._latest = None
        self._begun.clear()

    # --- what PyTorch calls -----------------------------------------------------------------------

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        capture = self._capture()
        if capture is None:
            return None
        if self._is_usual(optimizer, args, kwargs) and capture.before_light_step(optimizer):
            self._stepping = self._ends
            return None
        if not capture.table.are_stepped_by(optimizer):
            return None
        if self._is_inner(optimizer):
            if _alive(self._ends) is optimizer:
                self._ends = self._stepping
            if capture.in_progress.light:
                return None
        else:
            if optimizer in self._begun and self._step_was_over(optimizer):
                capture.step_completed()
            self._begun.add(optimizer)
            self._stepping = weakref.ref(optimizer)
        # With a closure the gradients are stale until it has run: Lightning, LBFGS.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _FirstCall(kwargs["closure"], capture, optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], _FirstCall(args[1], capture, optimizer), *args[2:]), kwargs
        capture.before_step(optimizer)
        return None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        capture = self._capture()
        if capture is None:
            return
        if capture.after_light_step(optimizer):
            self._stepping = None
            capture.safe_point()
            return
        if not capture.table.are_stepped_by(optimizer):
            capture.in_progress.unseen.other_steps += 1
            return
        if self._is_inner(optimizer):
            capture.in_progress.after_step(optimizer)
            return
        self._stepping = None
        capture.after_step(optimizer)
        self._latest = weakref.ref(optimizer)
        ends = _alive(self._ends)
        if ends is None and capture.table.all_among(capture.in_progress.captured.stepped()):
            self._ends, ends = self._latest, optimizer
        if ends is not optimizer:
            return
        self._went_without.append(False)
        # An optimizer that steps inside backward is not the last one to do so. Deferred, to come
        # after the end of that backward pass.
        if backward_task() == NO_TASK or not at_end_of_backward(capture.step_completed, deferred=2):
            capture.step_completed()
            capture.safe_point()

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

    def _is_usual(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a call like most begins: of the optimizer that ends steps, without a closure."""
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

    def _step_was_over(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that steps again has begun the next step."""
        ends, latest = _alive(self._ends), _alive(self._latest)
        if ends is None:
            return self.step_waited()
        if ends is optimizer or latest is None or self._given is not None:
            return False
        self._went_without.append(True)
        if sum(self._went_without) >= _STEPS_WITHOUT:
            self._ends = self._latest
            self._went_without.clear()
            log.warning(
                "telemetry: %s steps more often than %s, so its steps are counted from here on; "
                "HookLogger(optimizer=...) names the one that counts",
                type(latest).__name__,
                type(ends).__name__,
            )
        return True


@dataclass(eq=False)
class _FirstCall:
    """A closure that calls the capture after its first evaluation."""

    closure: Callable[[], Any]
    capture: Capture | None
    optimizer: Optimizer

    def __call__(self) -> Any:
        loss = self.closure()
        if self.capture is not None:
            self.capture.before_step(self.optimizer)
            # Until the step ends, the closure is only repeated.
            self.capture.observe(training=False)
            self.capture = None
        return loss


def _alive(reference: weakref.ref[Optimizer] | None) -> Optimizer | None:
    return None if reference is None else reference()


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()

"""Watches one model while it trains: puts the pieces together, and turns them on and off."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from telemetry.budget import Budget
from telemetry.capture.captured import CapturedStep
from telemetry.capture.costs import StepCosts
from telemetry.capture.hand_over import HandOver
from telemetry.capture.optimizer_hooks import OptimizerHooks
from telemetry.capture.scripting import leave_modules_that_are_scripted
from telemetry.capture.steps import Steps
from telemetry.capture.watch import Content, Watch
from telemetry.faults import Faults
from telemetry.schedule import Schedule
from telemetry.selection import Selection


class Capture:
    """Turns the training of one model into :class:`CapturedStep` values, one per optimizer step.

    The model is held weakly. Hooks are on its modules only during steps that ``is_due`` names; on
    all other steps the norms of the gradients are taken and nothing else is done.

    Args:
        model: The model in training.
        selection: Which of its modules are watched.
        is_due: Which steps are measured in full.
        content: What that holds.
        deliver: Called on the training thread with each finished step; must not wait.
        safe_point: Called between steps; may raise into the training loop.
        primary: Whose steps count; None: the first optimizer that steps the model's parameters.
        faults: Where hooks report what failed.
        first_step: Number of the first step.
        budget: What this may cost, and takes note of it; None: whatever is due is done.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        selection: Selection,
        is_due: Schedule,
        content: Content,
        deliver: Callable[[CapturedStep], None],
        safe_point: Callable[[], None],
        primary: Optimizer | None,
        faults: Faults,
        first_step: int = 0,
        budget: Budget | None = None,
    ) -> None:
        costs = StepCosts(budget)
        watch = Watch(
            model, selection=selection, content=content, faults=faults, own_time=costs.own
        )
        hand_over = HandOver(model, watch, deliver)
        self._steps = Steps(first_step, watch, is_due, costs, hand_over)
        self._model = watch.model
        self._primary = weakref.ref(primary) if primary is not None else None
        self._safe_point = safe_point
        self._optimizer_hooks: OptimizerHooks | None = None
        self._end_scripting: Callable[[], None] = lambda: None

    @property
    def step(self) -> int:
        """Number of the step in progress."""
        return self._steps.window.step

    @property
    def attached(self) -> bool:
        """Whether hooks are in place."""
        return self._optimizer_hooks is not None

    def attach(self) -> None:
        """Begin to watch, from the current step on."""
        if self.attached:
            return
        self._optimizer_hooks = OptimizerHooks(self._steps, self._safe_point)
        self._end_scripting = leave_modules_that_are_scripted()
        self._steps.attach(self._primary() if self._primary is not None else None)

    def end(self) -> None:
        """Take every hook off for good; log what was seen if that was not a single step."""
        if self.attached:
            self._steps.complete_waiting()
            self._steps.explain_nothing()
        self.detach()

    def detach(self) -> None:
        """Take every hook off; harmless when done twice."""
        if self._optimizer_hooks is not None:
            self._steps.complete_waiting()
            self._optimizer_hooks.remove()
            self._optimizer_hooks = None
            self._end_scripting()
        self._steps.detach()

    def manual_step(self) -> None:
        """A step of a loop that has no ``torch.optim.Optimizer``: gradients are still there."""
        self._steps.step_by_hand()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure every forward pass inside, as a phase of its own; none of them is training."""
        if self.attached and self._model() is not None:
            with self._steps.phase(name):
                yield
        else:
            yield

"""How much of each step is measured, and what that cost."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager

from torch import nn

from telemetry.budget import Budget
from telemetry.capture.costs import StepCosts
from telemetry.capture.layout import LayoutKeeper
from telemetry.capture.window import Window
from telemetry.measure import Measurer
from telemetry.schedule import Schedule
from telemetry.torch_private import undisturbed


class StepPlan:
    """Decides for each step whether it is measured in full, with norms only, or not at all.

    Args:
        model: The model in training, held weakly.
        layout: Its layers, which take turns where all of them cost too much.
        is_due: Which steps are measured in full.
        budget: What that may cost, and takes note of it; None: whatever is due is done.

    Attributes:
        own_time: To be entered while anything is done on the training thread.
    """

    def __init__(
        self, model: nn.Module, layout: LayoutKeeper, is_due: Schedule, budget: Budget | None
    ) -> None:
        self._model = weakref.ref(model)
        self._layout = layout
        self._is_due = is_due
        self._budget = budget
        self._costs = StepCosts(budget)
        self._measurer = Measurer()
        self.own_time: AbstractContextManager[None] = self._costs.own

    def restart(self) -> None:
        """The next step begins now: what came before belongs to none."""
        self._costs.restart()

    def window(self, step: int, thread: int | None) -> Window:
        """For a step that begins; ``thread``: see :class:`Window`."""
        budget = self._budget
        full = (budget is None or budget.affords_full()) and self._is_due(step)
        return Window(
            step=step,
            measurer=self._measurer if full else None,
            norms=full or budget is None or budget.affords_norms(),
            thread=thread,
        )

    def take_turns(self, window: Window) -> None:
        """Leave the modules out of a fully measured step whose turn it is not."""
        if self._budget is not None:
            modules = self._layout.current().modules
            turn = self._budget.begin_full(len(modules))
            window.left_out = frozenset(
                module.name for i, module in enumerate(modules) if not turn.takes(i)
            )

    def completed(self, window: Window) -> None:
        """Take note of what the step cost."""
        model = self._model() if self._budget is not None else None
        if model is not None:
            with undisturbed():
                device = next(model.parameters()).device
            self._costs.step_ended(window.step, full=window.full, norms=window.norms, device=device)

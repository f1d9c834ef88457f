"""Watches the training of one model: on and off, resumed, and phases apart from its steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from telemetry.capture.budget import Budget
from telemetry.capture.captured import CapturedStep
from telemetry.capture.hand_over import HandOver
from telemetry.capture.light import LightBlock
from telemetry.capture.parameters import ParameterTable
from telemetry.capture.steps import Steps
from telemetry.capture.watch import Content, Switch, Watch
from telemetry.capture.window import Window
from telemetry.failures import Failures
from telemetry.measure import Measurer
from telemetry.ranks.observer import RankObserver
from telemetry.schedule import FullSteps
from telemetry.selection import Selection


class Capture:
    """Turns the training of one model into :class:`CapturedStep` values, one per optimizer step.

    The model is held weakly. Hooks are on its modules only during steps that are measured in full;
    of all other steps the norms of the gradients are taken and nothing else is done. Where that is
    possible, they become rows of a :class:`LightBlock`.

    Args:
        model: The model in training.
        selection: Which of its modules are watched.
        full_steps: Which steps are measured in full.
        content: What that holds.
        deliver: Called on the training thread with each finished step, or with the block whose last
            row it is; must not wait.
        safe_point: Called between steps; may raise into the training loop.
        primary: Whose steps count; None: the first optimizer that steps the model's parameters.
        failures: Where to report what failed.
        first_step: Number of the first step.
        budget: What this may cost, and takes note of it; None: whatever is due is done.
        find_ranks: Called before anything is measured; tells who says what this rank is to measure
            for all ranks together, or None to measure everything.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        selection: Selection,
        full_steps: FullSteps,
        content: Content,
        deliver: Callable[[CapturedStep | LightBlock], None],
        safe_point: Callable[[], None],
        primary: Optimizer | None,
        failures: Failures,
        first_step: int = 0,
        budget: Budget | None = None,
        find_ranks: Callable[[], RankObserver | None] = lambda: None,
    ) -> None:
        self._watch = Watch(
            model=weakref.ref(model),
            table=ParameterTable(model),
            selection=selection,
            content=content,
            switch=Switch(output_grads=content.activation_gradients),
            failures=failures,
            own_time=budget,
        )
        self._hand_over = HandOver(model, self._watch, deliver)
        self._steps = Steps(
            self._watch,
            self._hand_over,
            budget,
            full_steps=full_steps,
            primary=primary,
            safe_point=safe_point,
            first_step=first_step,
            find_ranks=find_ranks,
        )

    @property
    def step(self) -> int:
        """Number of the step in progress."""
        return self._steps.window.step

    @property
    def model_is_gone(self) -> bool:
        """Whether the model no longer exists: this does not keep it alive."""
        return self._watch.model() is None

    @property
    def attached(self) -> bool:
        """Whether hooks are in place."""
        return self._steps.optimizers.installed

    def attach(self) -> None:
        """Begin to watch: the step in progress begins anew."""
        if not self.attached:
            self._steps.start()

    def detach(self) -> None:
        """Take every hook off; harmless when done twice."""
        self._steps.stop()

    def end(self) -> None:
        """Take every hook off for good; log what was seen if nothing was handed over."""
        self._steps.end_waiting()
        if self.attached and not self._hand_over.happened:
            ran = self._steps.modules.how_they_ran(self._steps.window)
            message, level = self._steps.window.no_step.at_the_end(ran)
            if message is not None:
                self._watch.failures.log_once(message, level=level)
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, in numbers, strings, lists and dicts; call it between steps."""
        self._steps.end_waiting()
        order = self._hand_over.forward_order
        return {"step": self.step, "full": self._steps.window.full, "forward_order": list(order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, as far as it says; hooks must be off."""
        self._steps.window = Window(step=state.get("step", self.step), measurer=None)
        self._hand_over.load_forward_order(state.get("forward_order", ()))

    def manual_step(self) -> None:
        """A step of a loop that has no ``torch.optim.Optimizer``: gradients are still there."""
        self._steps.manual_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure every forward pass inside, as a phase of its own; none of them is training."""
        if self._watch.model() is None or not self.attached:
            yield
            return
        window = Window(step=self.step, measurer=Measurer(), phase=name)
        with self._watch.failures.contained("to attach its hooks"):
            self._steps.modules.install(self._steps)
        try:
            with self._steps.passes.phase(window, self._steps.modules.pictured):
                yield
        finally:
            with self._watch.failures.contained("to hand over a phase"):
                if not self._steps.window.full:
                    self._steps.modules.uninstall()
                self._hand_over(window)

"""The step in progress: how the events of training move it on, from its begin to the hand-over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from telemetry.capture.costs import StepCosts
from telemetry.capture.forward import ForwardPasses
from telemetry.capture.hand_over import HandOver
from telemetry.capture.hooks import ForwardHook, InputHook
from telemetry.capture.modules import WatchedModules
from telemetry.capture.optimizer_hooks import StepClock
from telemetry.capture.passes import Passes
from telemetry.capture.random_state import read_random_states
from telemetry.capture.reader import StepReader
from telemetry.capture.watch import Watch
from telemetry.capture.window import Window
from telemetry.measure import Measurer
from telemetry.schedule import Schedule
from telemetry.torch_private import undisturbed


class Steps:
    """Moves one :class:`Window` after the other from its begin to the hand-over.

    PyTorch calls our hooks, these call the methods here, and the methods here call the pieces below
    in turn. None of those calls back.

    Args:
        step: Number of the first step.
        watch: What is watched.
        is_due: Which steps are measured in full.
        costs: Whether that is affordable.
        hand_over: Takes what is complete.

    Attributes:
        window: What the step in progress has shown so far.
    """

    def __init__(
        self, step: int, watch: Watch, is_due: Schedule, costs: StepCosts, hand_over: HandOver
    ) -> None:
        self.window = Window(step=step, measurer=None)
        self._watch = watch
        self._is_due = is_due
        self._costs = costs
        self._measurer = Measurer()
        self._clock = StepClock()
        self._modules = WatchedModules(watch)
        self._reader = StepReader(watch)
        self._passes = Passes(watch, self._reader)
        self._hand_over = hand_over

    # --- a step begins -------------------------------------------------------------------------

    def attach(self, primary: Optimizer | None) -> None:
        """Begin to watch: the step in progress begins anew."""
        self._clock = StepClock(primary)
        self._watch.table.forget_optimizers()
        self._costs.restart()
        with self._watch.own_time:
            self._begin(self.window.step, attaching=True)

    def _begin(self, step: int, *, attaching: bool = False) -> None:
        self._reader.forget()
        full, norms = self._costs.affords(full=self._is_due(step))
        measurer = self._measurer if full else None
        self.window = Window(step=step, measurer=measurer, norms=norms, thread=self._clock.thread)
        try:
            # Hooks are there when training begins even if nothing is due: a model that is compiled
            # without them would never show anything.
            if full or attaching:
                self._modules.install(self)
            if full:
                self._begin_full(self.window)
        except Exception:
            self._watch.faults.report("to attach its hooks")
            self._remove_hooks()

    def _begin_full(self, window: Window) -> None:
        modules = self._hand_over.layout().modules
        window.left_out = self._costs.left_out([module.name for module in modules])
        with undisturbed() as alone:
            if alone:
                self._watch.table.refresh()
                window.random_states = read_random_states()
                self._reader.begin(window)
            self._passes.begin(window, self._modules.pictured)

    # --- forward and backward passes: the receiver of the hooks on modules ------------------------

    def on_input(self, hook: InputHook, given: Any) -> None:
        """See :class:`telemetry.capture.hooks.Receiver`, also for the next two."""
        forward = self._forward_of(hook, grad_enabled=torch.is_grad_enabled())
        if forward is not None:
            forward.on_input(given)

    def on_output(self, hook: ForwardHook, args: Any, output: Any) -> None:
        forward = self._forward_of(hook, grad_enabled=torch.is_grad_enabled())
        if forward is not None:
            forward.on_output(hook, args, output)

    def on_graph(self, hook: ForwardHook, tensor: Tensor, place: int, backward: bool) -> None:
        if backward:
            if self._passes.backward is not None:
                self._passes.backward.on_output_grad(hook, place, tensor)
            return
        # Without gradients only the graphs of a phase show anything.
        forward = self._forward_of(hook, grad_enabled=True)
        if forward is not None:
            forward.on_graph_output(hook, tensor, place)

    def _forward_of(
        self, hook: ForwardHook | InputHook, *, grad_enabled: bool
    ) -> ForwardPasses | None:
        forward = self._passes.of_call(hook, grad_enabled=grad_enabled)
        begins = self.window.optimizers and self._passes.begins_training(forward)
        if begins and self.complete_waiting():
            return self._passes.of_call(hook, grad_enabled=grad_enabled)
        return forward

    # --- optimizer steps: the receiver of the hooks on optimizers ---------------------------------

    def steps_parameters(self, optimizer: Optimizer) -> bool:
        """See :class:`telemetry.capture.optimizer_hooks.StepReceiver`, also for the next ones."""
        return self._watch.table.are_stepped_by(optimizer)

    def other_step(self) -> None:
        self.window.no_step.other_step()

    def step_begins(self, optimizer: Optimizer) -> None:
        if self._clock.step_begins(optimizer):
            self.step_completed()

    def before_step(self, optimizer: Optimizer) -> None:
        if not self.window.norms:
            return
        with (
            self._watch.own_time,
            self._watch.faults.contained("to read the gradients"),
            undisturbed() as alone,
        ):
            if alone:
                self._reader.before_step(self.window, optimizer)

    def evaluated(self) -> None:
        self._passes.pause()

    def after_step(self, optimizer: Optimizer) -> bool:
        if self.window.full:
            doing = "to measure the update"
            with self._watch.own_time, self._watch.faults.contained(doing), undisturbed() as alone:
                if alone:
                    self._reader.after_step(self.window, optimizer)
            self._passes.resume()
        return self._clock.has_stepped(
            optimizer, lambda: self._watch.table.all_among(set(self.window.indices()))
        )

    def step_by_hand(self) -> None:
        """A step of a loop that has no ``torch.optim.Optimizer``: gradients are still there."""
        self._reader.by_hand = True
        with (
            self._watch.own_time,
            self._watch.faults.contained("to read the gradients"),
            undisturbed() as alone,
        ):
            if alone and self.window.norms:
                self._reader.step_by_hand(self.window)
        self.step_completed()

    # --- a step ends ---------------------------------------------------------------------------

    def complete_waiting(self) -> bool:
        """End a step that still waits for other optimizers, if there is one."""
        waiting = self._clock.pass_begins()
        if waiting:
            self.step_completed()
        return waiting

    def step_completed(self) -> None:
        self._clock.step_ends()
        window = self.window
        with self._watch.own_time:
            with self._watch.faults.contained("to hand over a step"):
                self._passes.end()
                if window.norms:
                    self._hand_over(window)
                if window.full:
                    trained = self._watch.table.owners(window.indices())
                    self._modules.explain_silence(window, trained)
                self._modules.uninstall()
                self._costs.enter(window, self._watch.model())
            self._begin(window.step + 1)

    def detach(self) -> None:
        """Watch no more; what has begun is not handed over."""
        self._remove_hooks()
        self._reader.forget()

    def _remove_hooks(self) -> None:
        self._passes.end()
        self._modules.remove()

    def explain_nothing(self) -> None:
        """Log what was seen if nothing was handed over."""
        if not self._hand_over.happened:
            message = self.window.no_step.at_the_end(self._modules.ran_in(self.window))
            if message is not None:
                self._watch.faults.tell(message)

    # --- apart from steps ----------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure every forward pass inside, as a phase of its own; none of them is training."""
        window = Window(step=self.window.step, measurer=Measurer(), phase=name)
        with self._watch.faults.contained("to attach its hooks"):
            self._modules.install(self)
        try:
            with self._passes.phase(window, self._modules.pictured):
                yield
        finally:
            with self._watch.faults.contained("to hand over a phase"):
                if not self.window.full:
                    self._modules.uninstall()
                self._hand_over(window)

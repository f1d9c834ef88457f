"""The way of each step, from its begin to the hand-over: what the hooks call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from telemetry.capture.budget import Budget
from telemetry.capture.hand_over import HandOver
from telemetry.capture.hooks import ForwardHook, InputHook, ModuleHook
from telemetry.capture.light import LightReader
from telemetry.capture.modules import WatchedModules
from telemetry.capture.optimizer_hooks import OptimizerHooks
from telemetry.capture.passes import ForwardPasses, Passes
from telemetry.capture.reader import StepReader
from telemetry.capture.watch import Watch, alone
from telemetry.capture.window import Window
from telemetry.measure import Measurer
from telemetry.ranks.observer import RankObserver
from telemetry.records import Output
from telemetry.torch_private import NO_TASK, backward_task, undisturbed


class Steps:
    """Takes the steps of training one after the other.

    The hooks call the methods here, and these call the pieces in turn; no piece calls back.

    Args:
        watch: What is watched.
        hand_over: Is given each step that is over.
        budget: Says how much is affordable, and is told what was done; None: no limit.
        is_full: Whether a step is measured in full; asked in their order.
        primary, safe_point, first_step, find_ranks: As in :class:`Capture`.

    Attributes:
        window: The step in progress.
        modules: The hooks on the model.
        optimizers: The hooks on its optimizers.
        passes: Those of the step in progress.
    """

    def __init__(
        self,
        watch: Watch,
        hand_over: HandOver,
        budget: Budget | None,
        *,
        is_full: Callable[[int], bool],
        primary: Optimizer | None,
        safe_point: Callable[[], None],
        first_step: int,
        find_ranks: Callable[[], RankObserver | None],
    ) -> None:
        self._watch = watch
        self._hand_over = hand_over
        self._budget = budget
        self._is_full = is_full
        self._find_ranks: Callable[[], RankObserver | None] | None = find_ranks
        self._measurer = Measurer()
        self._reader = StepReader(watch)
        self._light = LightReader(watch.table)
        self.modules = WatchedModules(watch)
        self.passes = Passes(watch, self._reader)
        self.optimizers = OptimizerHooks(self, primary, safe_point)
        self.window = Window(step=first_step, measurer=None)
        self._checked_step: int | None = None

    def start(self) -> None:
        """Begin to watch: the step in progress begins anew."""
        self.optimizers.install()
        self._watch.table.forget_optimizers()
        if self._budget is not None:
            self._budget.restart()
        step = self.window.step
        begin = partial(self._begin, attaching=True)
        self._watch.contain("to attach its hooks", begin, step, self._is_full(step))

    def stop(self) -> None:
        """Take every hook off; harmless when done twice."""
        self.end_waiting()
        self.optimizers.remove()
        self._remove_hooks()
        self._reader.forget()

    def _remove_hooks(self) -> None:
        self.passes.end()
        self.modules.remove()

    def _begin(self, step: int, full: bool, *, attaching: bool = False) -> None:
        norms = True
        if self._budget is not None:
            full, norms = self._budget.affords(step, full=full)
        if self.window.light and not full:
            self.window.step, self.window.norms, self.window.light = step, norms, False
            return
        self._open(step, full=full, norms=norms, attaching=attaching)

    def _open(self, step: int, *, full: bool, norms: bool = True, attaching: bool = False) -> None:
        """Gather a step from here on; anew if the model has changed since it began."""
        self._reader.forget()
        self.window = Window(
            step=step,
            measurer=self._measurer if full else None,
            norms=norms,
            thread=self.optimizers.clock.thread,
        )
        try:
            # Hooks are there when training begins even if nothing is due: a model that is compiled
            # without them would never show anything.
            if full or attaching:
                self.modules.install(self)
            if full:
                alone(self._reader.begin, self.window)
                with undisturbed():
                    self.passes.begin(self.window, self.modules.pictured)
        except Exception:
            self._watch.failures.report("to attach its hooks")
            self._remove_hooks()

    # --- its passes: called by the hooks on modules ----------------------------------------------

    def on_input(self, hook: InputHook, given: Any) -> None:
        """The model is called with ``given``."""
        self._join_ranks()
        forward = self._passes_of(hook, torch.is_grad_enabled())
        if forward is not None:
            alone(forward.on_input, given)

    def on_output(self, hook: ForwardHook, args: Any, output: Any) -> None:
        """A module was called with ``args`` and returned ``output``."""
        forward = self._passes_of(hook, torch.is_grad_enabled())
        if forward is not None and not forward.on_plain_output(hook, output):
            alone(forward.on_output, hook, args, output)

    def on_graph(self, hook: ForwardHook, tensor: Tensor, place: int, backward: bool) -> None:
        """A compiled graph shows an output of a module, or the gradient of one."""
        if not backward:
            # Without gradients only the graphs of a phase show anything.
            forward = self._passes_of(hook, grad_enabled=True)
            if forward is not None:
                alone(forward.on_graph_output, hook, tensor, place)
        elif self.passes.backward is not None:
            self.passes.backward.on_output_grad(hook, place, tensor)
        # What is measured depends on the compiler, so the first time it is compared.
        if self.window.full and self._checked_step in (None, self.window.step):
            self._checked_step = self.window.step
            kind = "output_grads" if backward else "outputs"
            alone(self.window.check, kind, Output(hook.name, place), tensor)

    def _join_ranks(self) -> None:
        """The first call of the model or step of an optimizer: by now the ranks are known."""
        if self._find_ranks is not None:
            find, self._find_ranks = self._find_ranks, None
            with self._watch.failures.contained("to join the other ranks"):
                self._watch.ranks = find()

    def _passes_of(self, hook: ModuleHook, grad_enabled: bool) -> ForwardPasses | None:
        """Those that a module's call belongs to; it may be the first call of the next step."""
        forward = self.passes.of_call(hook, grad_enabled)
        # What checkpointing runs again, in a backward pass, begins no other pass.
        if forward is not None and forward.window.optimizers and backward_task() == NO_TASK:
            self.end_waiting()
            forward = self.passes.of_call(hook, grad_enabled)
        if forward is not None and forward is self.passes.forward and not forward.begun:
            forward.begun = True
            if self.modules.changed():
                self.passes.end()
                self._open(self.window.step, full=True)
                forward = self.passes.of_call(hook, grad_enabled)
                if forward is not None:
                    forward.begun = True
        return forward

    # --- its optimizer steps: called by the hooks on optimizers -----------------------------------

    def steps_parameters(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds parameters of the model."""
        return self._watch.table.are_stepped_by(optimizer)

    def other_step(self) -> None:
        """An optimizer that holds none of them has stepped."""
        self.window.no_step.other_step()

    def before_light_step(self, optimizer: Optimizer) -> bool:
        """The gradients are final; whether that is all there is to read of this step, and was."""
        window = self.window
        if window.measurer is not None or window.optimizers or not self._light.reads(optimizer):
            return False
        if not window.norms:
            window.light = True
        elif not window.light:
            self._watch.contain("to read the gradients", self._read_light_step, optimizer)
        return window.light

    def _read_light_step(self, optimizer: Optimizer) -> None:
        self._note_mode()
        if not self.window.eval_mode:
            self.window.light = self._light.read(optimizer, self._hand_over.layout())

    def after_light_step(self, optimizer: Optimizer) -> bool:
        """The parameters have changed; whether that was such a step, which is over now."""
        window = self.window
        if not window.light or not self._light.reads(optimizer):
            return False
        full = self._is_full(window.step + 1)
        self._watch.contain("to hand over a step", self._hand_over_light_step, window)
        self._watch.contain("to begin a step", self._begin, window.step + 1, full)
        return True

    def _hand_over_light_step(self, window: Window) -> None:
        if window.norms:
            self._hand_over.light(self._light.completed(window.step))
        if self.modules.installed:
            self.modules.uninstall()
        self._enter_costs(window)

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradients are final and the parameters not yet changed."""
        self._note_mode()
        if not self._light.reads(optimizer):
            self._light.stop()
        if self.window.norms:
            read = self._reader.before_step
            self._watch.contain_alone("to read the gradients", read, self.window, optimizer)

    def evaluated(self) -> None:
        """A closure has run for the first time: until the step ends, it is only repeated."""
        self._watch.switch.turn(training=False)

    def after_step(self, optimizer: Optimizer) -> None:
        """The parameters have changed."""
        if self.window.full:
            read = self._reader.after_step
            self._watch.contain_alone("to measure the update", read, self.window, optimizer)
            self._watch.switch.turn(training=self.passes.forward is not None)
        if self._reader.reads_alone(optimizer):
            self._light.prepare(optimizer, again=self.window.full)

    def all_stepped(self) -> bool:
        """Whether every parameter that has a gradient was stepped since the last step ended."""
        return self._watch.table.all_among(self.window.indices())

    def manual_step(self) -> None:
        """A step of a loop that has no ``torch.optim.Optimizer``: gradients are still there."""
        self._reader.by_hand = True
        self._note_mode()
        if self.window.norms:
            read = self._reader.step_by_hand
            self._watch.contain_alone("to read the gradients", read, self.window)
        self.step_completed()

    def _note_mode(self) -> None:
        """Whatever mode the model steps in, passes in that mode are training."""
        if self._find_ranks is not None:
            self._join_ranks()
        model = self._watch.model()
        if model is not None:
            self.window.eval_mode = self.passes.eval_mode = not model.training

    # --- its end -------------------------------------------------------------------------------

    def end_waiting(self) -> None:
        """End the step in progress if it only waits for other optimizers."""
        if self.optimizers.clock.pass_begins():
            self.step_completed()

    def step_completed(self) -> None:
        """A step is over, and its last backward pass, too."""
        self.optimizers.clock.note_thread()
        window = self.window
        # Asked first: whatever rules say of this step is about a later one than the next, so that
        # a run that is repeated measures the same steps, as long as they answer within one.
        full = self._is_full(window.step + 1)
        self._watch.contain("to hand over a step", self._end_step, window)
        self._watch.contain("to begin a step", self._begin, window.step + 1, full)

    def _end_step(self, window: Window) -> None:
        self.passes.end()
        if window.norms:
            self._hand_over(window)
        if window.full:
            self.modules.explain_silence(window)
        self.modules.uninstall()
        self._enter_costs(window)

    def _enter_costs(self, window: Window) -> None:
        if self._budget is None or (model := self._watch.model()) is None:
            return
        with undisturbed():
            device = next(model.parameters()).device
        self._budget.step_ended(window.step, full=window.full, norms=window.norms, device=device)

"""The way of one step, from its begin to the hand-over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from telemetry.budget import Budget
from telemetry.capture.captured import CapturedStep
from telemetry.capture.costs import StepCosts
from telemetry.capture.hand_over import HandOver
from telemetry.capture.hooks import ForwardHook, InputHook, ModuleHook
from telemetry.capture.light import LightBlock, LightReader
from telemetry.capture.modules import WatchedModules
from telemetry.capture.optimizer_hooks import OptimizerHooks
from telemetry.capture.parameters import ParameterTable
from telemetry.capture.passes import ForwardPasses, Passes
from telemetry.capture.reader import StepReader
from telemetry.capture.watch import Content, Switch, Watch, alone
from telemetry.capture.window import Window
from telemetry.failures import Failures
from telemetry.measure import Measurer
from telemetry.ranks.observer import RankObserver
from telemetry.schedule import FullSteps
from telemetry.selection import Selection
from telemetry.torch_private import NO_TASK, backward_task, undisturbed


class Capture:
    """Turns the training of one model into :class:`CapturedStep` values, one per optimizer step.

    The model is held weakly. Hooks are on its modules only during steps that are measured in full;
    of all other steps the norms of the gradients are taken and nothing else is done. Where that is
    possible, they become rows of a :class:`LightBlock`.

    The hooks call the methods here, and these call the pieces in turn; no piece calls back.

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
        self._full_steps = full_steps
        self._find_ranks: Callable[[], RankObserver | None] | None = find_ranks
        self._costs = StepCosts(budget)
        self._measurer = Measurer()
        self._watch = Watch(
            model=weakref.ref(model),
            table=ParameterTable(model),
            selection=selection,
            content=content,
            switch=Switch(output_grads=content.activation_gradients),
            failures=failures,
            own_time=self._costs.own,
        )
        self._modules = WatchedModules(self._watch)
        self._reader = StepReader(self._watch)
        self._light = LightReader(self._watch.table)
        self._passes = Passes(self._watch, self._reader)
        self._optimizers = OptimizerHooks(self, primary, safe_point)
        self._hand_over = HandOver(model, self._watch, deliver)
        self._window = Window(step=first_step, measurer=None)

    @property
    def step(self) -> int:
        """Number of the step in progress."""
        return self._window.step

    # --- on and off ----------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether hooks are in place."""
        return self._optimizers.installed

    def attach(self) -> None:
        """Begin to watch: the step in progress begins anew."""
        if self.attached:
            return
        self._optimizers.install()
        self._watch.table.forget_optimizers()
        self._costs.restart()
        with self._watch.own_time:
            self._begin(self.step, attaching=True)

    def detach(self) -> None:
        """Take every hook off; harmless when done twice."""
        self._end_waiting()
        self._optimizers.remove()
        self._remove_hooks()
        self._reader.forget()

    def end(self) -> None:
        """Take every hook off for good; log what was seen if nothing was handed over."""
        self._end_waiting()
        if self.attached and not self._hand_over.happened:
            ran = self._modules.how_they_ran(self._window)
            message, level = self._window.no_step.at_the_end(ran)
            if message is not None:
                self._watch.failures.log_once(message, level=level)
        self.detach()

    def _remove_hooks(self) -> None:
        self._passes.end()
        self._modules.remove()

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, in numbers, strings, lists and dicts; call it between steps."""
        self._end_waiting()
        order = self._hand_over.forward_order
        return {"step": self.step, "full": self._window.full, "forward_order": list(order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, as far as it says; hooks must be off."""
        self._window = Window(step=state.get("step", self.step), measurer=None)
        self._hand_over.load_forward_order(state.get("forward_order", ()))

    # --- a step begins -------------------------------------------------------------------------

    def _begin(self, step: int, *, attaching: bool = False) -> None:
        full, norms = self._costs.affords(full=self._full_steps(step))
        if self._window.light and not full:
            self._window.step, self._window.norms, self._window.light = step, norms, False
            return
        self._reader.forget()
        self._window = Window(
            step=step,
            measurer=self._measurer if full else None,
            norms=norms,
            thread=self._optimizers.clock.thread,
        )
        try:
            # Hooks are there when training begins even if nothing is due: a model that is compiled
            # without them would never show anything.
            if full or attaching:
                self._modules.install(self)
            if full:
                self._window.left_out = self._costs.left_out(self._hand_over.layout().modules)
                alone(self._reader.begin, self._window)
                with undisturbed():
                    self._passes.begin(self._window, self._modules.pictured)
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
        if forward is not None:
            alone(forward.on_output, hook, args, output)

    def on_graph(self, hook: ForwardHook, tensor: Tensor, place: int, backward: bool) -> None:
        """A compiled graph shows an output of a module, or the gradient of one."""
        if backward:
            if self._passes.backward is not None:
                self._passes.backward.on_output_grad(hook, place, tensor)
            return
        # Without gradients only the graphs of a phase show anything.
        forward = self._passes_of(hook, grad_enabled=True)
        if forward is not None:
            alone(forward.on_graph_output, hook, tensor, place)

    def _join_ranks(self) -> None:
        """The first call of the model or step of an optimizer: by now the ranks are known."""
        if self._find_ranks is not None:
            find, self._find_ranks = self._find_ranks, None
            with self._watch.failures.contained("to join the other ranks"):
                self._watch.ranks = find()

    def _passes_of(self, hook: ModuleHook, grad_enabled: bool) -> ForwardPasses | None:
        """Those that a module's call belongs to; it may be the first call of the next step."""
        forward = self._passes.of_call(hook, grad_enabled)
        # What checkpointing runs again, in a backward pass, begins no other pass.
        if forward is not None and forward.window.optimizers and backward_task() == NO_TASK:
            self._end_waiting()
            forward = self._passes.of_call(hook, grad_enabled)
        return forward

    # --- its optimizer steps: called by the hooks on optimizers -----------------------------------

    def steps_parameters(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer holds parameters of the model."""
        return self._watch.table.are_stepped_by(optimizer)

    def other_step(self) -> None:
        """An optimizer that holds none of them has stepped."""
        self._window.no_step.other_step()

    def before_light_step(self, optimizer: Optimizer) -> bool:
        """The gradients are final; whether that is all there is to read of this step, and was."""
        window = self._window
        if window.full or not window.norms or window.optimizers or not self._light.reads(optimizer):
            return False
        if not window.light:
            with self._watch.own_time:
                try:
                    self._note_mode()
                    if not window.eval_mode:
                        window.light = self._light.read(optimizer, self._hand_over.layout())
                except Exception:
                    self._watch.failures.report("to read the gradients")
        return window.light

    def after_light_step(self, optimizer: Optimizer) -> bool:
        """The parameters have changed; whether that was such a step, which is over now."""
        window = self._window
        if not window.light or not self._light.reads(optimizer):
            return False
        with self._watch.own_time:
            try:
                self._full_steps.see(window.step, self._light.square)
                self._hand_over.light(self._light.completed(window.step))
                self._modules.uninstall()
                self._costs.enter(window, self._watch.model())
            except Exception:
                self._watch.failures.report("to hand over a step")
            self._begin(window.step + 1)
        return True

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradients are final and the parameters not yet changed."""
        self._note_mode()
        if not self._light.reads(optimizer):
            self._light.stop()
        if self._window.norms:
            read = self._reader.before_step
            self._watch.contain_alone("to read the gradients", read, self._window, optimizer)

    def evaluated(self) -> None:
        """A closure has run for the first time: until the step ends, it is only repeated."""
        self._watch.switch.turn(training=False)

    def after_step(self, optimizer: Optimizer) -> None:
        """The parameters have changed."""
        if self._window.full:
            read = self._reader.after_step
            self._watch.contain_alone("to measure the update", read, self._window, optimizer)
            self._watch.switch.turn(training=self._passes.forward is not None)
        if self._reader.reads_alone(optimizer):
            self._light.prepare(optimizer, again=self._window.full)

    def all_stepped(self) -> bool:
        """Whether every parameter that has a gradient was stepped since the last step ended."""
        return self._watch.table.all_among(set(self._window.indices()))

    def manual_step(self) -> None:
        """A step of a loop that has no ``torch.optim.Optimizer``: gradients are still there."""
        self._reader.by_hand = True
        self._note_mode()
        if self._window.norms:
            read = self._reader.step_by_hand
            self._watch.contain_alone("to read the gradients", read, self._window)
        self.step_completed()

    def _note_mode(self) -> None:
        """Whatever mode the model steps in, passes in that mode are training."""
        self._join_ranks()
        model = self._watch.model()
        if model is not None:
            self._window.eval_mode = self._passes.eval_mode = not model.training

    # --- its end -------------------------------------------------------------------------------

    def _end_waiting(self) -> None:
        """End the step in progress if it only waits for other optimizers."""
        if self._optimizers.clock.pass_begins():
            self.step_completed()

    def step_completed(self) -> None:
        """A step is over, and its last backward pass, too."""
        self._optimizers.clock.note_thread()
        window = self._window
        with self._watch.own_time:
            with self._watch.failures.contained("to hand over a step"):
                self._passes.end()
                if window.on_host:
                    self._full_steps.see(window.step, window.square)
                if window.norms:
                    self._hand_over(window)
                if window.full:
                    self._modules.explain_silence(window)
                self._modules.uninstall()
                self._costs.enter(window, self._watch.model())
            self._begin(window.step + 1)

    # --- apart from steps ----------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure every forward pass inside, as a phase of its own; none of them is training."""
        if self._watch.model() is None or not self.attached:
            yield
            return
        window = Window(step=self.step, measurer=Measurer(), phase=name)
        with self._watch.failures.contained("to attach its hooks"):
            self._modules.install(self)
        try:
            with self._passes.phase(window, self._modules.pictured):
                yield
        finally:
            with self._watch.failures.contained("to hand over a phase"):
                if not self._window.full:
                    self._modules.uninstall()
                self._hand_over(window)

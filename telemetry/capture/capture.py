"""Captures the training of one model: opens and ends its steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from telemetry.capture.account import Plan
from telemetry.capture.captured_step import CapturedStep
from telemetry.capture.clock import LoopClock
from telemetry.capture.hooks import ForwardHook, InputHook
from telemetry.capture.layouts import Layouts
from telemetry.capture.light_step import LightReader, LightStep
from telemetry.capture.missed_steps import MissedSteps
from telemetry.capture.modules import WatchedModules
from telemetry.capture.optimizers import Optimizers
from telemetry.capture.parameters import ParameterTable
from telemetry.capture.schedule import Schedule
from telemetry.capture.state import Content, Guard, State, Target, guarded
from telemetry.capture.step import Step
from telemetry.capture.usage import APART, OPTIMIZER
from telemetry.failures import Failures
from telemetry.ranks.topology import RankObserver
from telemetry.selection import Selection
from telemetry.torch_private import NO_TASK, backward_task, undisturbed
from telemetry.torch_private.ranks import calling_stage


class Capture:
    """Turns the training of one model into :class:`CapturedStep` values, one per optimizer step.

    The model is held weakly. Hooks are on its modules only during full steps. At all other steps
    only the norms of the gradients are taken; where possible, one call reads them
    (:class:`LightStep`).

    Args:
        schedule: Plans each step, and measures the time of the training thread.
        deliver: Called on the training thread with each finished step; must not block.
        safe_point: Called between steps; may raise into the training loop.
        primary: Optimizer whose steps count; None: see :class:`Optimizers`.
        find_ranks: Called before anything is measured. Returns the observer of the other ranks, or
            None if this rank measures everything.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        selection: Selection,
        schedule: Schedule,
        content: Content,
        deliver: Callable[[CapturedStep | LightStep], None],
        safe_point: Callable[[], None],
        primary: Optimizer | None,
        failures: Failures,
        first_step: int = 0,
        find_ranks: Callable[[], RankObserver | None] = lambda: None,
    ) -> None:
        self.guard = Guard(failures, schedule.account.stopwatch)
        self.model = weakref.ref(model)
        self.safe_point = safe_point
        self._table = ParameterTable(model, selection)
        self._target = Target(
            model=self.model,
            selection=selection,
            table=self._table,
            content=content,
            guard=self.guard,
        )
        self._state = State(first_step)
        self._layouts = Layouts(self._target)
        self.clock = LoopClock(model, failures)
        self._modules = WatchedModules(
            self._target, self._state, self, self.clock.before_compilation
        )
        self._optimizers = Optimizers(self, self._state, self._table, primary)
        self._light_reader = LightReader(self._table)
        self._missed_steps = MissedSteps()
        self._schedule = schedule
        self._plan: Plan = "norms"  # of the step in progress
        self._step = self._new_step(full=False)
        self._phases: list[tuple[int, Step]] = []  # with their threads, the innermost last
        self._deliver, self._delivered = deliver, False
        self._find_ranks: Callable[[], RankObserver | None] | None = find_ranks
        self._by_hand = False  # the loop has no optimizer
        self._stepping_thread: int | None = None  # None while steps end in backward passes

    @property
    def step(self) -> int:
        """Number of the step in progress."""
        return self._state.step

    @property
    def attached(self) -> bool:
        """Whether the hooks are installed."""
        return self._optimizers.installed

    # --- on and off -------------------------------------------------------------------------------

    def attach(self) -> None:
        """Install the hooks; the step in progress restarts."""
        if self.attached:
            return
        self._optimizers.install()
        self._table.forget_optimizers()
        self._schedule.account.restart()
        with self.guard.failures.contained("to attach its hooks"):
            self._modules.attach()
        self._begin(self.step, self._plan_step(self.step), attaching=True)
        self.clock.start()

    def detach(self) -> None:
        """Remove all hooks; idempotent."""
        self.end_open_step()
        self.clock.stop()
        self._optimizers.remove()
        self._remove_hooks()

    def end(self) -> None:
        """Remove all hooks permanently; log the reason if no step was delivered."""
        self.end_open_step()
        if self.attached and not self._delivered:
            ran = self._modules.how_they_ran(self._step)
            level, message = self._missed_steps.at_the_end(ran)
            if message:
                self.guard.failures.log_once(message, level=level)
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dicts for a checkpoint; call it between steps."""
        self.end_open_step()
        return {"step": self.step, "forward_order": list(self._layouts.forward_order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the fields that ``state`` has; hooks must be off."""
        self._state.step, self._state.light = state.get("step", self.step), False
        self._step = self._new_step(full=False)
        self._layouts.load_forward_order(state.get("forward_order", ()))

    def _observe(self, *, training: bool) -> None:
        """Observe passes of training, or no longer, and those of phases."""
        state = self._state
        state.training, state.in_phase = training, bool(self._phases)
        state.armed = state.training or state.in_phase

    def _remove_hooks(self) -> None:
        self._step.stop()
        self._observe(training=False)
        self._modules.detach()

    # --- begin of a step --------------------------------------------------------------------------

    def _plan_step(self, number: int) -> Plan:
        try:
            return self._schedule.plan(number)
        except Exception:
            self.guard.failures.report("to plan a step")
            return "norms"

    @guarded("to begin a step", reads=False)
    def _begin(self, number: int, plan: Plan, attaching: bool = False) -> None:
        state = self._state
        state.step, self._plan = number, plan
        if state.light and plan != "full":
            state.light = False  # the step object is unused
        else:
            self._open(full=plan == "full", attaching=attaching)

    def _open(self, *, full: bool, attaching: bool = False) -> None:
        """Gather a new step from here on."""
        self._step.stop()
        state = self._state
        state.light, state.thread = False, self._stepping_thread
        self._missed_steps = MissedSteps()
        self._step = step = self._new_step(full=full)
        try:
            if full:
                self._modules.observe()
                follows, by_hand = not attaching, self._by_hand
                state.output_grads = step.begin(follows=follows, by_hand=by_hand)
                self.clock.measure(self._table.device)
                self._schedule.account.measure(self._table.device)
                self._observe(training=True)
            else:
                self._modules.stop()
        except Exception:
            self.guard.failures.report("to attach its hooks")
            self._remove_hooks()

    def _new_step(self, *, full: bool, phase: str = "") -> Step:
        return Step(self._target, self._state, self._optimizers, self, full=full, phase=phase)

    def _join_ranks(self) -> None:
        """Find the other ranks, at the first call of the model or step of an optimizer."""
        if self._find_ranks is not None:
            find, self._find_ranks = self._find_ranks, None
            with self.guard.failures.contained("to join the other ranks"):
                self._state.ranks = find()

    # --- forward and backward passes --------------------------------------------------------------

    @guarded("to observe what the model was given")
    def on_input(self, hook: InputHook, given: Any, grad_enabled: bool) -> None:
        self._join_ranks()
        if (step := self._step_of_call(hook, grad_enabled)) is not None:
            step.forward.on_input(given)
        if step is self._step and backward_task() == NO_TASK:
            self._modules.observe_attention()

    @guarded("to observe the output of {1.called}")
    def on_output(self, hook: ForwardHook, args: Any, output: Any, grad_enabled: bool) -> None:
        if (step := self._step_of_call(hook, grad_enabled)) is not None:
            step.forward.on_output(hook, args, output)

    @guarded("to measure attention")
    def on_attention(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        if self._step.over or backward_task() != NO_TASK:  # checkpointing repeats the call
            return
        if (name := self._modules.calling_module()) is not None:
            self._step.forward.on_attention(name, *args, **keywords)

    @guarded("to observe {1.called} in a compiled graph")
    def in_graph(self, hook: ForwardHook, tensor: Tensor, place: int, backward: bool) -> None:
        if backward:
            self._step.on_output_grad(hook, place, tensor, in_graph=True)
            return
        # Graphs that run without gradients have observers only in phases.
        if (step := self._step_of_call(hook, grad_enabled=True)) is not None:
            step.forward.on_graph_output(hook, tensor, place)

    def _step_of_call(self, hook: ForwardHook | InputHook, grad_enabled: bool) -> Step | None:
        """Return the step or phase of a module's call; None if it is neither.

        A call is training if gradients are enabled and the model or the module is in training
        mode, on one thread; also in evaluation mode if the last optimizer step was taken in it. In
        a :meth:`phase` every forward pass of its thread is observed.

        The call may be the first of the next step.
        """
        thread, step, state = threading.get_ident(), self._step, self._state
        if self._phases and self._phases[-1][0] == thread:
            return self._phases[-1][1]
        model, module = self.model(), hook.module()
        if not state.training or not grad_enabled or model is None or module is None:
            return None
        if not (model.training or module.training or self.clock.eval_mode):
            return None
        if (stage := calling_stage()) is not None and stage.probes:
            return None
        if backward_task() != NO_TASK:  # checkpointing runs the forward pass again
            return None if hook in step.ran else step
        if state.thread not in (None, thread):
            return None
        state.thread = thread
        if step.parameters and self._optimizers.end_open_step():  # an optimizer has stepped
            self.step_completed()
            return self._step_of_call(hook, grad_enabled)
        if not step.unchanged and self._modules.changed():
            self._open(full=True)
            step, state.thread = self._step, thread
        step.unchanged = True
        step.ran.add(hook)
        return step

    def after_pass(self, passes: int, accumulated: Mapping[int, Tensor]) -> None:
        """Stop observing if many passes came without a step, and log the reason."""
        if (message := self._missed_steps.after_pass(passes, accumulated)) is not None:
            self.guard.failures.log_once(message)
            self._observe(training=False)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure every forward pass inside as a separate phase, which is not training."""
        if self.model() is None or not self.attached:
            yield
            return
        phase = threading.get_ident(), self._new_step(full=True, phase=name)
        with self.guard.failures.contained("to attach its hooks"):
            self._modules.observe()
        self._phases.append(phase)
        self._observe(training=self._state.training)
        self.clock.lap(APART)
        try:
            yield
        finally:
            self.clock.wait()
            self._phases.remove(phase)
            self._observe(training=self._state.training)
            if not self._step.full:
                self._modules.stop()
            self._hand_over(phase[1])

    # --- optimizer steps --------------------------------------------------------------------------

    def before_light_step(self, optimizer: Optimizer) -> bool:
        state = self._state
        if self._step.full or not self._light_reader.reads(optimizer):
            return False
        self.clock.lap(APART)
        if not self._takes_norms():
            state.light = True
        elif not state.light:
            self._read_light_step(optimizer)
        self.clock.lap(OPTIMIZER)
        return state.light

    @guarded("to read the gradients", reads=False)
    def _read_light_step(self, optimizer: Optimizer) -> None:
        self._note_mode()
        if not self.clock.eval_mode:
            self._state.light = self._light_reader.read(optimizer, self._layouts.layout())

    def before_step(self, optimizer: Optimizer, *, repeats: bool = False) -> None:
        self.clock.lap(APART)
        self._note_mode()
        if not self._light_reader.reads(optimizer):
            self._light_reader.stop()
        if self._takes_norms():
            self._step.before_step(optimizer)
        if repeats:
            self._observe(training=False)
        self.clock.lap(OPTIMIZER)

    def after_light_step(self, optimizer: Optimizer) -> bool:
        state = self._state
        if not state.light or not self._light_reader.reads(optimizer):
            return False
        self.clock.end_step()
        if self._plan != "skip":
            self._end_light_step()
        number = state.step + 1
        if (plan := self._plan_step(number)) == "full":
            self._begin(number, plan)
        else:  # most steps of fast loops pass here: between two, code leaves the core's cache
            state.step, state.light, self._plan = number, False, plan
        self.clock.begin_step(full=plan == "full")
        return True

    def after_step(self, optimizer: Optimizer, *, inner: bool = False) -> None:
        step = self._step
        if inner:
            step.after_step(optimizer)
            return
        self.clock.lap(APART)
        if step.full:
            step.after_step(optimizer)
            self._observe(training=not step.over)
        if self._optimizers.is_only(optimizer):
            self._light_reader.prepare(optimizer, again=step.full)
        self.clock.wait()

    def after_other_step(self) -> None:
        self._missed_steps.other_steps += 1
        self.clock.restart_wait()

    def all_gradients_used(self) -> bool:
        return self._table.all_among(self._step.captured.stepped())

    def manual_step(self) -> None:
        """End a step of a loop without a ``torch.optim.Optimizer``: gradients are still there."""
        self._by_hand = True
        self._note_mode()
        if self._takes_norms():
            self._step.step_by_hand()
        self.step_completed()

    def _takes_norms(self) -> bool:
        """Whether at least the gradient norms of the step in progress are taken."""
        if self._plan == "skip":  # an unusual loss may have been logged since it began
            self._plan = self._plan_step(self._state.step)
        return self._plan != "skip"

    def _note_mode(self) -> None:
        """Note the mode of the model at a step: passes in that mode are training."""
        self._join_ranks()
        if (model := self.model()) is not None:
            self.clock.eval_mode = not model.training

    # --- end of a step ----------------------------------------------------------------------------

    def end_open_step(self) -> None:
        """End the step in progress if it is open only for other optimizers."""
        if self._optimizers.end_open_step():
            self.step_completed()

    def step_completed(self) -> None:
        """End the step in progress and begin the next one."""
        self._optimizers.step_ended()
        if backward_task() == NO_TASK:  # in one, this may be a thread of autograd's
            self._stepping_thread = threading.get_ident()
        step, number = self._step, self.step
        self.clock.end_step(full=step.full)
        step.stop()
        self._observe(training=False)
        if self._plan != "skip":
            step.captured.step, step.captured.eval_mode = number, self.clock.eval_mode
            step.captured.laps = self.clock.take()
            self._hand_over(step)
        plan = self._plan_step(number + 1)
        self._begin(number + 1, plan)
        self.clock.begin_step(full=plan == "full")

    @guarded("to hand over a step", reads=False)
    @undisturbed(always=True)
    def _hand_over(self, step: Step) -> None:
        step.end()
        step.captured.layout = self._layouts.layout(
            step.forward.order, step.parameters, step.forward.function
        )
        self._deliver(step.captured)
        self._delivered = True
        self._modules.log_missed(step)

    @guarded("to hand over a step", reads=False)
    def _end_light_step(self) -> None:
        self._deliver(self._light_reader.completed(self._state.step, self.clock.take()))
        self._delivered = True

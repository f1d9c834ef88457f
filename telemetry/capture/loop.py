"""The loop: begins and ends the steps of one model, and delivers a record of each."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from telemetry.capture.clock import APART, OPTIMIZER, LoopClock
from telemetry.capture.context import Content, Context, Guard, guarded
from telemetry.capture.hooks import ForwardHook, InputHook
from telemetry.capture.layouts import Layouts
from telemetry.capture.modules import WatchedModules
from telemetry.capture.schedule import Plan, Schedule
from telemetry.capture.step import FullStep, Step
from telemetry.failures import Failures
from telemetry.ranks.topology import RankObserver
from telemetry.selection import Selection
from telemetry.torch_private import NO_TASK, at_end_of_backward, backward_task
from telemetry.torch_private.compiler import not_compiled
from telemetry.torch_private.ranks import calling_stage


class Loop:
    """Turns the training of one model into records, one per optimizer step.

    The model is held weakly. While the loop is attached, a step is in progress, which hooks and
    optimizers fill; hooks of modules are installed at full steps only. It ends, and the next one
    begins:

    - After the optimizer that ends steps, see :class:`Turns`.
    - Before an optimizer steps that has stepped in this step already, if :class:`Turns` says so.
    - At the first call of the model, ``batch`` and ``state_dict``, if an optimizer has stepped and
      others could have followed.
    - At ``logger.step()``.

    The :class:`Schedule` plans a step when it begins.

    Args:
        schedule: Plans each step, and measures the time of the training thread.
        deliver: Called on the training thread with each finished step; must not block.
        safe_point: Called between steps; may raise into the training loop.
        primary: Optimizer whose steps count; None: see :class:`Turns`.
        find_ranks: Called before anything is measured. Returns the observer of the other ranks, or
            None if this rank measures everything.

    Attributes:
        attached: Whether the hooks are installed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        selection: Selection,
        schedule: Schedule,
        content: Content,
        deliver: Callable[[Step], None],
        safe_point: Callable[[], None],
        primary: Optimizer | None,
        failures: Failures,
        first_step: int = 0,
        find_ranks: Callable[[], RankObserver | None] = lambda: None,
    ) -> None:
        self.guard = Guard(failures, schedule.account.stopwatch)
        self.attached = False
        self._context = Context(
            model,
            selection=selection,
            content=content,
            guard=self.guard,
            first_step=first_step,
            primary=primary,
        )
        self.model = self._context.model
        self.clock = LoopClock(model, failures)
        self._safe_point = safe_point
        self._layouts = Layouts(self._context)
        self._modules = WatchedModules(self._context, self, self.clock.before_compilation)
        self._turns = self._context.turns
        self._schedule = schedule
        self._plan: Plan = "norms"  # of the step in progress
        self._step = Step(self._context)
        self._phases: list[tuple[int, FullStep]] = []  # with their threads, the innermost last
        self._deliver, self._delivered = deliver, False
        self._find_ranks: Callable[[], RankObserver | None] | None = find_ranks
        self._by_hand = False  # the loop has no optimizer
        self._stepping_thread: int | None = None  # None while steps end in backward passes
        self._passes_elsewhere = False  # on threads that end no step
        weakref.finalize(self, _HOOKS.remove, id(self))

    @property
    def step(self) -> int:
        """Number of the step in progress."""
        return self._context.step

    # --- on and off -------------------------------------------------------------------------------

    def attach(self) -> None:
        """Install the hooks; the step in progress restarts."""
        if self.attached:
            return
        _HOOKS.add(self)
        self._turns.forget()
        self._schedule.account.restart()
        with self.guard.failures.contained("to attach its hooks"):
            self._modules.attach()
        self.attached = True
        self._begin(self.step, follows=False)
        self.clock.start()

    def detach(self) -> None:
        """Remove all hooks; idempotent."""
        self.end_open_step()
        self.clock.stop()
        _HOOKS.remove(id(self))
        self._turns.forget()
        self.attached = False
        self._remove_hooks()

    def end(self) -> None:
        """Remove all hooks permanently; log the reason if no step was delivered."""
        self.end_open_step()
        if self.attached and not self._delivered:
            ran = self._modules.how_they_ran(self._step)
            ends = self._step.backward.ends if isinstance(self._step, FullStep) else []
            missed = self._context.missed
            level, message = missed.at_the_end(ran, ends)
            if message:
                self.guard.failures.log_once(message, level=level)
            if missed.overflows:
                self.manual_step()
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings, lists and dicts for a checkpoint; call it between steps."""
        self.end_open_step()
        return {"step": self.step, "forward_order": list(self._layouts.forward_order)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the fields that ``state`` has; hooks must be off."""
        self._context.step = state.get("step", self.step)
        self._step = Step(self._context)
        self._layouts.load_forward_order(state.get("forward_order", ()))

    def _remove_hooks(self) -> None:
        self._step.stop()
        self._context.observe(training=False)
        self._modules.detach()

    # --- begin of a step --------------------------------------------------------------------------

    def _plan_step(self, number: int) -> Plan:
        try:
            return self._schedule.plan(number)
        except Exception:
            self.guard.failures.report("to plan a step")
            return "norms"

    def _begin(self, number: int, *, follows: bool = True) -> None:
        """Begin a step; ``follows``: another one has just ended."""
        self._context.step, self._context.thread = number, self._stepping_thread
        self._plan = self._plan_step(number)
        if self._plan == "full":
            self._begin_full(follows=follows)
            return
        if self._step.full:
            self._stop_observing()
        self._step = Step(self._context)

    @guarded("to begin a step", reads=False)
    def _begin_full(self, *, follows: bool) -> None:
        context = self._context
        self._step.stop()
        self._step = step = FullStep(context)
        try:
            self._modules.observe()
            context.output_grads = step.begin(follows=follows, by_hand=self._by_hand)
            self.clock.measure(context.table.device)
            self._schedule.account.measure(context.table.device)
            context.observe(training=True)
        except Exception:
            self.guard.failures.report("to attach its hooks")
            self._remove_hooks()

    @guarded("to stop observing", reads=False)
    def _stop_observing(self) -> None:
        self._step.stop()
        self._modules.stop()

    def _join_ranks(self) -> None:
        """Find the other ranks, at the first call of the model or step of an optimizer."""
        if self._find_ranks is not None:
            find, self._find_ranks = self._find_ranks, None
            with self.guard.failures.contained("to join the other ranks"):
                self._context.ranks = find()

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
        step = self._step
        if not isinstance(step, FullStep) or step.backward.over or backward_task() != NO_TASK:
            return  # checkpointing repeats the call
        if (name := self._modules.calling_module()) is not None:
            step.forward.on_attention(name, *args, **keywords)

    @guarded("to observe {1.called} in a compiled graph")
    def in_graph(self, hook: ForwardHook, tensor: Tensor, place: int, backward: bool) -> None:
        if backward:
            if isinstance(self._step, FullStep):
                self._step.backward.on_output_grad(hook, place, tensor)
            return
        # Graphs that run without gradients have observers only in phases.
        if (step := self._step_of_call(hook, grad_enabled=True)) is not None:
            step.forward.on_graph_output(hook, tensor, place)

    def _step_of_call(self, hook: ForwardHook | InputHook, grad_enabled: bool) -> FullStep | None:
        """Return the step or phase of a module's call; None if it is neither.

        A call is training if gradients are enabled and the model or the module is in training
        mode, on one thread; also in evaluation mode if the last optimizer step was taken in it. In
        a :meth:`phase` every forward pass of its thread is observed.

        The call may be the first of the next step.
        """
        thread, step, context = threading.get_ident(), self._step, self._context
        if self._phases and self._phases[-1][0] == thread:
            return self._phases[-1][1]
        model, module = self.model(), hook.module()
        if not (context.training and grad_enabled and isinstance(step, FullStep)):
            return None
        if model is None or module is None:
            return None
        if not (model.training or module.training or self.clock.eval_mode):
            return None
        if (stage := calling_stage()) is not None and stage.probes:
            return None
        if backward_task() != NO_TASK:  # checkpointing runs the forward pass again
            return None if hook in step.ran else step
        if context.thread not in (None, thread):
            step.elsewhere = True
            return None
        context.thread = thread
        if step.parameters and self._turns.settle():  # an optimizer has stepped
            self._complete()
            return self._step_of_call(hook, grad_enabled)
        if not step.unchanged and self._modules.changed():
            context.thread = self._stepping_thread
            self._begin_full(follows=True)
            return self._step_of_call(hook, grad_enabled)
        step.unchanged = True
        step.ran.add(hook)
        return step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure every forward pass inside as a separate phase, which is not training."""
        if self.model() is None or not self.attached:
            yield
            return
        phase = threading.get_ident(), FullStep(self._context, name)
        with self.guard.failures.contained("to attach its hooks"):
            self._modules.observe()
        self._phases.append(phase)
        self._observe_phases()
        self.clock.lap(APART)
        try:
            yield
        finally:
            self.clock.wait()
            self._phases.remove(phase)
            self._observe_phases()
            if not self._step.full:
                self._modules.stop()
            self._hand_over(phase[1])

    def _observe_phases(self) -> None:
        self._context.in_phase = bool(self._phases)
        self._context.observe(training=self._context.training)

    # --- optimizer steps --------------------------------------------------------------------------

    def before_optimizer(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Read the gradients before an optimizer steps; return other arguments for it, or None."""
        if not self._context.table.held_by(optimizer).indices:
            return None
        if self._plan == "norms" and self._turns.has_raised(optimizer):
            self._step = Step(self._context)  # a retry may have other gradients
        if self._turns.begin(optimizer):
            self._complete()
        # With a closure the gradients are stale until it has run: Lightning, LBFGS.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": _FirstCall(kwargs["closure"], self, optimizer)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], _FirstCall(args[1], self, optimizer), *args[2:]), kwargs
        self.before_step(optimizer)
        return None

    def before_step(self, optimizer: Optimizer, *, repeats: bool = False) -> None:
        """Read the final gradients; ``repeats``: until the step ends, passes only repeat."""
        self.clock.lap(APART)
        self._note_mode()
        if self._takes_norms():
            self._step.before_step(optimizer)
        if repeats:
            self._context.observe(training=False)
        self.clock.lap(OPTIMIZER)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Read the parameters after an optimizer has stepped, and end the step if it is over."""
        context, step = self._context, self._step
        if not context.table.held_by(optimizer).indices:
            context.missed.other_steps += 1
            self.clock.restart_wait()
            return
        if self._turns.is_inner(optimizer):
            step.after_step(optimizer)
            return
        self.clock.lap(APART)
        step.after_step(optimizer)
        if isinstance(step, FullStep):
            context.observe(training=not step.backward.over)
        if not self._turns.end(optimizer, step.held):
            self.clock.wait()
            return
        # An optimizer that steps inside backward is not the last one to do so. Deferred, to come
        # after the end of that backward pass.
        if backward_task() == NO_TASK or not at_end_of_backward(self._complete, deferred=2):
            self._complete()
            self._safe_point()

    def manual_step(self) -> None:
        """End a step of a loop without a ``torch.optim.Optimizer``: gradients are still there."""
        self._by_hand = True
        self._note_mode()
        if self._takes_norms():
            self._step.step_by_hand()
        self._complete()

    def _takes_norms(self) -> bool:
        """Whether at least the gradient norms of the step in progress are taken."""
        if self._plan == "skip":  # an unusual loss may have been logged since it began
            self._plan = self._plan_step(self._context.step)
        return self._plan != "skip"

    def _note_mode(self) -> None:
        """Note the mode of the model at a step: passes in that mode are training."""
        self._join_ranks()
        if (model := self.model()) is not None:
            self.clock.eval_mode = not model.training

    # --- end of a step ----------------------------------------------------------------------------

    def end_open_step(self) -> None:
        """End the step in progress if it is open only for other optimizers."""
        if self._turns.settle():
            self._complete()

    def _complete(self) -> None:
        """End the step in progress and begin the next one."""
        if not self.attached:  # since the end of a backward pass was awaited
            return
        step = self._step
        self._turns.step_ended()
        self.clock.end_step(full=step.full)
        if isinstance(step, FullStep) and step.elsewhere and not step.ran:
            self._passes_elsewhere, self._stepping_thread = True, None
        # In a backward pass, this may be a thread of autograd's.
        if backward_task() == NO_TASK and not self._passes_elsewhere:
            self._stepping_thread = threading.get_ident()
        if step.full:
            step.stop()
            self._context.observe(training=False)
        if self._plan != "skip":
            step.eval_mode, step.laps = self.clock.eval_mode, self.clock.take()
            self._hand_over(step)
        self._begin(self.step + 1)
        self.clock.begin_step(full=self._plan == "full")

    @guarded("to hand over a step", reads=False)
    def _hand_over(self, step: Step) -> None:
        step.end()
        if isinstance(step, FullStep):
            ran, function = step.forward.order, step.forward.function
            step.layout = self._layouts.layout(ran, step.parameters, function)
        else:
            step.layout = self._layouts.layout(parameters=step.parameters)
        self._deliver(step)
        self._delivered = True
        if isinstance(step, FullStep):
            self._modules.log_missing(step)


class _FirstCall:
    """A closure after whose first evaluation the gradients are read."""

    def __init__(self, closure: Callable[[], Any], loop: Loop, optimizer: Optimizer) -> None:
        self._closure, self._optimizer = closure, optimizer
        self._loop: Loop | None = loop

    def __call__(self) -> Any:
        loss = self._closure()
        if self._loop is not None:
            self._loop.before_step(self._optimizer, repeats=True)
            self._loop = None
        return loss


class _OptimizerHooks:
    """PyTorch's hooks on all optimizers: one before and one after the step, for all loops.

    The hooks are global ones, so an optimizer may be made before or after, and any library may call
    it. PyTorch iterates over its hooks during a step, and raises if another thread adds or removes
    one of several. The last one of an iteration may be removed.
    """

    def __init__(self) -> None:
        self._renew_lock()
        self._loops: dict[int, weakref.ref[Loop]] = {}
        self._handles: list[Any] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """Make a lock that no thread holds; in a forked child its owner may be missing."""
        self._lock = threading.RLock()  # the garbage collector may remove one while it is held

    def add(self, loop: Loop) -> None:
        with self._lock:
            self._loops[id(loop)] = weakref.ref(loop)
            if not self._handles:
                self._handles = [
                    optimizers.register_optimizer_step_pre_hook(self._on_step),
                    optimizers.register_optimizer_step_post_hook(self._on_stepped),
                ]

    def remove(self, identity: int) -> None:
        with self._lock:
            self._loops.pop(identity, None)
            while self._handles and not self._loops:
                self._handles.pop().remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        changed = None
        for reference in [*self._loops.values()]:
            if (loop := reference()) is not None:
                others = loop.before_optimizer(optimizer, args, kwargs)
                if others is not None:
                    args, kwargs = changed = others
        return changed

    def _after(self, optimizer: Optimizer) -> None:
        for reference in [*self._loops.values()]:
            if (loop := reference()) is not None:
                loop.after_optimizer(optimizer)

    _before_outside_of_graphs = not_compiled(_before)
    _after_outside_of_graphs = not_compiled(_after)

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._before_outside_of_graphs(optimizer, args, kwargs)
        return self._before(optimizer, args, kwargs)

    def _on_stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._after_outside_of_graphs(optimizer)
        else:
            self._after(optimizer)


_HOOKS = _OptimizerHooks()

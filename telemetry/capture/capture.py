"""Watches the training of one model: which step is in progress, and where each one ends."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from telemetry.capture.budget import Budget
from telemetry.capture.captured import CapturedStep, LightStep, RunTotals
from telemetry.capture.hooks import ForwardHook, Guard, InputHook, guarded
from telemetry.capture.modules import WatchedModules
from telemetry.capture.optimizers import Optimizers
from telemetry.capture.own_pass import Sample
from telemetry.capture.parameters import ParameterTable
from telemetry.capture.step import CHECKS, Step
from telemetry.failures import Failures
from telemetry.measure import cuda
from telemetry.measure.native import TENSORS, available
from telemetry.ranks.topology import RankObserver
from telemetry.records import Layout
from telemetry.selection import Selection
from telemetry.torch_private import (
    NO_TASK,
    backward_task,
    calling_scaler,
    in_function_mode,
    undisturbed,
)
from telemetry.torch_private.compiler import backwards_compiled
from telemetry.torch_private.ranks import calling_stage

if available:
    from telemetry.measure import _native


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a full measurement holds."""

    activations: bool = True
    activation_gradients: bool = True
    gradients: bool = True
    weights: bool = True
    images: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, bool):
                raise TypeError(f"HookLogger({name}={value!r}): must be True or False")


# Stands for the norm of a gradient that there is not.
_ABSENT = -1.0

# Whether a ``GradScaler`` calls is seen once in so many steps.
_LOOK_STEPS = 8


class LightReader:
    """Reads what the only optimizer is about to use, where one call of the C extension can.

    It refuses whatever is out of the ordinary: gradients on an accelerator, sparse or of a class of
    their own, or not finite; learning rates that are tensors; a ``GradScaler``. Those go the long
    way.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self._row = np.zeros(0)
        self._address = self._groups = 0
        self._layout: Layout | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._parameters: tuple[Any, ...] = ()
        self._identities = b""
        self._refused = False
        self._unlooked = 0

    def prepare(self, optimizer: Optimizer, *, again: bool) -> None:
        """Read this optimizer's steps from now on.

        ``again``: even where reading has failed before, or with its parameters read again.
        """
        self._refused &= not again
        if self.reads(optimizer) and not again:
            return
        if TENSORS is not None and not self._refused:
            self._optimizer = weakref.ref(optimizer)
            self._parameters = self._table.parameters
            self._identities = self._table.identities_of(optimizer)

    def stop(self) -> None:
        """Read nothing until the next :meth:`prepare`."""
        self._optimizer = None

    def reads(self, optimizer: Optimizer) -> bool:
        """Whether it is this optimizer's steps that are read."""
        return self._optimizer is not None and self._optimizer() is optimizer

    def read(self, optimizer: Optimizer, layout: Layout) -> bool:
        """Read the gradients and learning rates of a step; whether that was possible."""
        if self._parameters is not self._table.parameters:
            return False
        # Looking for a scaler takes as long as reading some gradients, so at some steps only: it
        # leaves the gradients as they should be, unless the optimizer is to divide by its factor.
        if self._unlooked == 0 and calling_scaler() is not None:
            return False
        if getattr(optimizer, "grad_scale", None) is not None or in_function_mode():
            return False
        groups = optimizer.param_groups
        if layout is not self._layout or len(groups) != self._groups:
            self._layout, self._groups = layout, len(groups)
            self._row = np.zeros(len(groups) + len(layout.parameters))
            self._address = self._row.ctypes.data
        self._row.fill(_ABSENT)
        square = _native.take_norms(groups, self._identities, torch.Tensor, TENSORS, self._address)
        if square == -1.0:
            self.stop()
            self._refused = True
        self._unlooked = (self._unlooked + 1) % _LOOK_STEPS
        return 0 <= square < math.inf

    def completed(self, step: int) -> LightStep:
        """What was read of this step, which is over."""
        assert self._layout is not None
        return LightStep(step, time.time(), self._layout, self._groups, self._row.copy())


class Capture:
    """Turns the training of one model into :class:`CapturedStep` values, one per optimizer step.

    The model is held weakly. Hooks are on its modules only during steps that are measured in full;
    of all other steps the norms of the gradients are taken and nothing else is done. Where that is
    possible, one call reads them: :class:`LightStep`.

    Args:
        is_full: Whether a step is measured in full; asked in their order.
        have_norms: Whether the gradient norms of another step are taken; asked when they are there.
        deliver: Called on the training thread with each finished step; must not wait.
        safe_point: Called between steps; may raise into the training loop.
        primary: Whose steps count; None: see :class:`Optimizers`.
        budget: What this may cost, and takes note of it; None: whatever is due is done.
        sample: Whose feature maps are drawn; None: those of the batches.
        find_ranks: Called before anything is measured; tells who says what this rank is to measure
            for all ranks together, or None to measure everything.

    Attributes:
        training, in_phase, armed: Whether passes of training are observed, those of a phase, any.
            Compiled graphs are guarded by these: one graph has observers and one has not.
        output_grads: Whether gradients with respect to outputs are observed, too.
        thread: That steps; None until a step has ended outside of a backward pass.
        eval_mode: Whether the model was in evaluation mode at the last step, or at the beginning.
        by_hand: Whether the loop has no optimizer.
        ranks: What ``find_ranks`` returned; None before.
        backwards_before: How many passes compiled autograd had compiled when watching began.
        to_check: How many of the tensors that compiled graphs show PyTorch is still to reduce, too.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        selection: Selection,
        is_full: Callable[[int], bool],
        have_norms: Callable[[int], bool] = lambda step: True,
        content: Content,
        deliver: Callable[[CapturedStep | LightStep], None],
        safe_point: Callable[[], None],
        primary: Optimizer | None,
        failures: Failures,
        first_step: int = 0,
        budget: Budget | None = None,
        sample: Sample | None = None,
        find_ranks: Callable[[], RankObserver | None] = lambda: None,
    ) -> None:
        self.guard = Guard(failures, nullcontext() if budget is None else budget)
        self.model = weakref.ref(model)
        self.table = ParameterTable(model, selection)
        self.content = content
        self.safe_point = safe_point
        self.sample = sample
        self.totals = RunTotals()
        self.training = self.in_phase = self.armed = self.by_hand = False
        self.output_grads = content.activation_gradients
        self.thread: int | None = None
        self.eval_mode = not model.training
        self.ranks: RankObserver | None = None
        self.backwards_before = backwards_compiled()
        self.to_check = {"outputs": CHECKS, "output_grads": CHECKS}
        self.modules = WatchedModules(self, model, selection)
        self.optimizers = Optimizers(self, primary)
        cuda.prepare(parameter.device for parameter in model.parameters())
        self.in_progress = Step(self, first_step)
        self._phase: Step | None = None
        self._light = LightReader(self.table)
        self._is_full = is_full
        self._have_norms = have_norms
        self._deliver = deliver
        self._delivered = False
        self._budget = budget
        self._device = torch.device("cpu")  # of the parameters at the last full step
        self._find_ranks: Callable[[], RankObserver | None] | None = find_ranks

    @property
    def step(self) -> int:
        """Number of the step in progress."""
        return self.in_progress.number

    @property
    def attached(self) -> bool:
        """Whether hooks are in place."""
        return bool(self.optimizers.handles)

    # --- on and off -------------------------------------------------------------------------------

    def attach(self) -> None:
        """Begin to watch: the step in progress begins anew."""
        if self.attached:
            return
        self.optimizers.install()
        self.table.forget_optimizers()
        if self._budget is not None:
            self._budget.restart()
        with self.guard.failures.contained("to attach its hooks"):
            self.modules.attach()
        self._begin(self.step, self._is_full(self.step), attaching=True)

    def detach(self) -> None:
        """Take every hook off; harmless when done twice."""
        self._end_waiting()
        self.optimizers.remove()
        self._remove_hooks()

    def end(self) -> None:
        """Take every hook off for good; log what was seen if nothing was handed over."""
        self._end_waiting()
        if self.attached and not self._delivered:
            step = self.in_progress
            level, message = step.unseen.at_the_end(self.modules.how_they_ran(step))
            if message:
                self.guard.failures.log_once(message, level=level)
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, in numbers, strings, lists and dicts; call it between steps."""
        self._end_waiting()
        order = list(self.modules.forward_order)
        return {"step": self.step, "full": self.in_progress.full, "forward_order": order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, as far as it says; hooks must be off."""
        self.in_progress = Step(self, state.get("step", self.step))
        self.modules.load_forward_order(state.get("forward_order", ()))

    def observe(self, *, training: bool | None = None, in_phase: bool | None = None) -> None:
        """Observe these passes, or no longer; None: as before."""
        self.training = self.training if training is None else training
        self.in_phase = self.in_phase if in_phase is None else in_phase
        self.armed = self.training or self.in_phase

    def _remove_hooks(self) -> None:
        self.in_progress.stop()
        self.observe(training=False)
        self.modules.detach()

    # --- begin of a step --------------------------------------------------------------------------

    def _begin(self, number: int, full: bool, attaching: bool = False) -> None:
        norms, step = True, self.in_progress
        if self._budget is not None:
            full, norms = self._budget.affords(number, full=full)
        if step.light and not full:
            step.number, step.norms, step.light = number, norms, False
            return
        self._open(number, full=full, norms=norms, attaching=attaching)

    @guarded("to begin a step", reads=False)
    def _open(
        self, number: int, *, full: bool, norms: bool = True, attaching: bool = False
    ) -> None:
        """Gather a step from here on; anew if the model has changed since it began."""
        self.in_progress.stop()
        self.in_progress = step = Step(self, number, full=full, norms=norms)
        try:
            if full:
                self.modules.observe()
                with undisturbed():
                    step.begins(follows=not attaching)
        except Exception:
            self.guard.failures.report("to attach its hooks")
            self._remove_hooks()

    def join_ranks(self) -> None:
        """The first call of the model or step of an optimizer: by now the ranks are known."""
        if self._find_ranks is not None:
            find, self._find_ranks = self._find_ranks, None
            with self.guard.failures.contained("to join the other ranks"):
                self.ranks = find()

    # --- forward passes ---------------------------------------------------------------------------

    def step_of_call(self, hook: ForwardHook | InputHook, grad_enabled: bool) -> Step | None:
        """What a module's call belongs to; None if it is neither training nor in a phase.

        Training is what runs with gradients enabled while the model or the module itself is in
        training mode, on one thread; and also in evaluation mode if the last optimizer step was
        taken in it. In a :meth:`phase` every forward pass of its thread is observed.

        The call may be the first of the next step.
        """
        thread, step = threading.get_ident(), self.in_progress
        if self._phase is not None and self._phase.thread == thread:
            return self._phase
        model, module = self.model(), hook.module()
        if not self.training or not grad_enabled or model is None or module is None:
            return None
        if not (model.training or module.training or self.eval_mode):
            return None
        stage = calling_stage()
        if stage is not None and stage.probes:
            return None
        if backward_task() != NO_TASK:  # checkpointing runs the forward pass again
            return None if hook in step.ran else step
        if step.thread not in (None, thread):
            return None
        step.thread = thread
        if step.parameters and self.optimizers.step_waited():  # an optimizer has stepped
            self.step_completed(between=False)
            return self.step_of_call(hook, grad_enabled)
        if not step.begun and self.modules.changed():
            self._open(step.number, full=True)
            step = self.in_progress
            step.thread = thread
        step.begun = True
        step.ran.add(hook)
        return step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure every forward pass inside, as a phase of its own; none of them is training."""
        if self.model() is None or not self.attached:
            yield
            return
        phase = Step(self, self.step, full=True, phase=name)
        phase.thread = threading.get_ident()
        with self.guard.failures.contained("to attach its hooks"):
            self.modules.observe()
        outer, self._phase = self._phase, phase
        self.observe(in_phase=True)
        try:
            yield
        finally:
            self._phase = outer
            self.observe(in_phase=outer is not None)
            if not self.in_progress.full:
                self.modules.stop()
            self._hand_over(phase)

    # --- optimizer steps --------------------------------------------------------------------------

    def before_light_step(self, optimizer: Optimizer) -> bool:
        """The gradients are final; whether that is all there is to read of this step, and was."""
        step = self.in_progress
        if step.full or not self._light.reads(optimizer):
            return False
        if not self._takes_norms():
            step.light = True
        elif not step.light:
            self._read_light_step(optimizer)
        return step.light

    @guarded("to read the gradients", reads=False)
    def _read_light_step(self, optimizer: Optimizer) -> None:
        self._note_mode()
        if not self.eval_mode:
            self.in_progress.light = self._light.read(optimizer, self.modules.layout())

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradients are final and the parameters not yet changed."""
        self._note_mode()
        if not self._light.reads(optimizer):
            self._light.stop()
        if self._takes_norms():
            self.in_progress.before_step(optimizer)

    def after_light_step(self, optimizer: Optimizer) -> bool:
        """The parameters have changed; whether that was such a step, which is over now."""
        step = self.in_progress
        if not step.light or not self._light.reads(optimizer):
            return False
        full = self._is_full(step.number + 1)
        if step.norms:
            self._end_light_step()
        self._begin(step.number + 1, full)
        return True

    def after_step(self, optimizer: Optimizer) -> None:
        """The parameters have changed."""
        step = self.in_progress
        if step.full:
            step.after_step(optimizer)
            self.observe(training=not step.over)
        if self.optimizers.is_only(optimizer):
            self._light.prepare(optimizer, again=step.full)

    def manual_step(self) -> None:
        """A step of a loop that has no ``torch.optim.Optimizer``: gradients are still there."""
        self.by_hand = True
        self._note_mode()
        if self._takes_norms():
            self.in_progress.step_by_hand()
        self.step_completed()

    def _takes_norms(self) -> bool:
        """Whether at least the gradient norms of the step in progress are taken."""
        step = self.in_progress
        step.norms &= step.full or self._have_norms(step.number)
        return step.norms

    def _note_mode(self) -> None:
        """Whatever mode the model steps in, passes in that mode are training."""
        if self._find_ranks is not None:
            self.join_ranks()
        model = self.model()
        if model is not None:
            self.eval_mode = not model.training
            self.in_progress.captured.eval_mode = self.eval_mode

    # --- end of a step ----------------------------------------------------------------------------

    def _end_waiting(self) -> None:
        """End the step in progress if it only waits for other optimizers."""
        if self.optimizers.step_waited():
            self.step_completed(between=False)

    def step_completed(self, *, between: bool = True) -> None:
        """A step is over, and its last backward pass, too.

        ``between``: whether the model does not run now, and may.
        """
        self.optimizers.step_ended()
        if backward_task() == NO_TASK:  # in one, this may be a thread of autograd's
            self.thread = threading.get_ident()
        step = self.in_progress
        # Asked first: whatever rules say of this step is about a later one than the next, so that
        # a run that is repeated measures the same steps, as long as they answer within one.
        full = self._is_full(step.number + 1)
        step.stop()
        self.observe(training=False)
        if self.sample is not None and step.full:
            self._show_sample(self.sample, step, between=between)
        if step.norms:
            self._hand_over(step)
        self._end(step)
        self._begin(step.number + 1, full)

    @guarded("to show the sample")
    def _show_sample(self, sample: Sample, step: Step, *, between: bool) -> None:
        model, pictured = self.model(), self.modules.pictured_modules()
        log_once = self.guard.failures.log_once
        if not pictured:
            log_once("the sample is not shown: no watched module is a convolution")
        elif not between or backward_task() != NO_TASK:
            log_once("the sample is not shown at steps that end inside of another pass")
        elif model is not None:
            sample.show(model, pictured, step.captured.detail)

    @guarded("to hand over a step", reads=False)
    def _hand_over(self, step: Step) -> None:
        with undisturbed():
            self._deliver(step.ends())
        self._delivered = True

    @guarded("to hand over a step", reads=False)
    def _end_light_step(self) -> None:
        number = self.in_progress.number
        self._deliver(self._light.completed(number))
        self._delivered = True
        if self._budget is not None:
            self._budget.step_ended(number, full=False, norms=True, device=self._device)

    @guarded("to end a step", reads=False)
    def _end(self, step: Step) -> None:
        if step.full:
            with undisturbed():
                self.modules.tell_unseen(step)
        self.modules.stop()
        if self._budget is not None:
            if step.full and (model := self.model()) is not None:
                with undisturbed():
                    self._device = next(model.parameters()).device
            self._budget.step_ended(
                step.number, full=step.full, norms=step.norms, device=self._device
            )

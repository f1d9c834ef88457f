"""Backward passes of a step: measures gradients, and explains why a step does not end."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from telemetry.capture.hooks import ForwardHook
from telemetry.capture.missed_steps import MissedSteps
from telemetry.capture.observations import Observation
from telemetry.capture.parameters import Indexed, take_norms
from telemetry.capture.pending import PendingStep
from telemetry.capture.state import State, Target, guarded
from telemetry.plain_text import called_all
from telemetry.records import Output
from telemetry.torch_private import NO_TASK, at_end_of_backward, backward_task
from telemetry.torch_private.host_copy import HostCopy

_NAMES_IN_MESSAGE = 8


class _Pass(NamedTuple):
    """One run of the autograd engine: its observations, and the parameters that it reached."""

    observations: list[Observation]
    accumulated: dict[int, Tensor]  # by identity; ``autograd.grad`` reaches none


class BackwardPasses:
    """Backward passes of one step.

    Attributes:
        over: Whether nothing is observed any more.
        missed: Evidence of why the step does not end.
    """

    def __init__(self, target: Target, state: State, pending: PendingStep, *, over: bool) -> None:
        self.guard = target.guard
        self.over = over
        self.missed = MissedSteps()
        self._target, self._state, self._pending = target, state, pending
        # By task; there are several at a time if one starts another.
        self._running: dict[int, _Pass] = {}
        self._probed: list[Observation] = []  # of passes that reached no parameter
        self._handles: list[Any] = []

    def begin(self, parameters: Indexed) -> None:
        """Observe from here on which parameters are reached."""
        self._handles += [
            parameter.register_post_accumulate_grad_hook(self.on_accumulated)
            for _, parameter in parameters
            if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf
        ]

    @guarded("to observe the gradient of {1.called}")
    def on_output_grad(
        self, hook: ForwardHook, place: int, grad: Tensor | None, in_graph: bool = False
    ) -> None:
        """Receive the gradient of an output of this step."""
        if self.over or grad is None:
            return  # a graph kept from an earlier step; an output that got no gradient
        running = self._running.get(backward_task()) or self._begin_pass()
        tensors = self._pending.observations
        into = tensors.all if running is None else running.observations
        output = Output(hook.name, place) if place else hook.output
        ranks, notes = self._state.ranks, self._pending.notes
        if ranks is None or ranks.takes_output_grad(notes, output, grad):
            observed = tensors.add("output_grads", output, grad, into, scaled=True)
            if in_graph:
                tensors.check(observed, grad, self._target.totals.checks_left)

    def on_accumulated(self, parameter: Tensor) -> None:
        """Note that a gradient has accumulated, so that this backward pass is one of training."""
        if self.over or torch.compiler.is_compiling():
            return
        running = self._running.get(backward_task()) or self._begin_pass()
        if running is not None:
            running.accumulated[id(parameter)] = parameter

    @guarded("to follow a backward pass", reads=False)
    def _begin_pass(self) -> _Pass | None:
        """Begin this thread's backward pass; None where its end cannot be observed."""
        task = backward_task()
        # Deferred, to come after the callback by which DDP ends its reduction.
        ends = functools.partial(self.on_end, task)
        if task == NO_TASK or not at_end_of_backward(ends, deferred=1):
            return None
        self._running[task] = _Pass([], {})
        return self._running[task]

    @guarded("to end a backward pass")
    def on_end(self, task: int) -> None:
        """Read the gradients after a pass: they are reduced over ranks and not clipped yet."""
        ended = self._running.pop(task)
        pending, state = self._pending, self._state
        if self.over or not state.training:
            return  # its step is over, or only repeated
        if not ended.accumulated:
            if pending.passes == 0:
                self._probed += ended.observations
            return
        pending.passes += 1
        observations = pending.observations.all
        observations += ended.observations
        parameters = ended.accumulated.values()
        for group in take_norms(self._target.table.grads_of(parameters)):
            nonfinite = group.nonfinite()
            if nonfinite is not None:
                pending.overflow_ends.append((HostCopy(nonfinite), len(observations)))
            for place, index in enumerate(group.indices):
                pending.before_clipping[index] = group, place
        # Many passes without a step: nothing more is observed.
        message = self.missed.after_pass(pending.passes, ended.accumulated)
        if message is not None:
            self.guard.failures.log_once(message)
            state.observe(training=False)

    def stop(self) -> None:
        """Observe nothing any more, even where a graph holds a hook of ours."""
        if self._pending.passes == 0:
            # They were all training: loops that use ``autograd.grad`` have no others.
            self._pending.observations.all += self._probed
            self._probed = []
        self.over = True
        while self._handles:
            self._handles.pop().remove()

    def log_adjoints(self, order: Collection[str], outside: Collection[str]) -> None:
        """Log the modules without gradients because they ran inside of a backward pass only.

        Args:
            order: Modules that ran in the step.
            outside: Those that ran outside of a backward pass.
        """
        probed = {o.name.module_name for o in self._probed if isinstance(o.name, Output)}
        names = [name for name in order if name in probed and name not in outside]
        if names:
            self.guard.failures.log_once(
                f"activation gradients of {called_all(names, _NAMES_IN_MESSAGE)} are not measured: "
                "these modules run inside of the backward pass, in separate passes that reach "
                "no parameter, as those of torchdiffeq.odeint_adjoint",
                kind="adjoint",
            )

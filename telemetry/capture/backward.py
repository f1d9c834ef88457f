"""Backward passes of a step: measures gradients, and explains why a step does not end."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from telemetry.capture.context import Context, guarded
from telemetry.capture.hooks import ForwardHook
from telemetry.capture.norms import Norms, take_norms
from telemetry.capture.observations import Observation, Observations
from telemetry.capture.parameters import Indexed
from telemetry.plain_text import called_all
from telemetry.ranks.topology import RankNotes
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
        passes: Number of passes of training that have ended.
        before_clipping: For each parameter that a pass has reached: the norms at the end of the
            last pass, and its place among them.
        ends: For passes with a gradient that is not finite: whether it is, as far as known, and
            the number of observations at the end.
    """

    def __init__(self, context: Context, observations: Observations, notes: RankNotes) -> None:
        self.guard = context.guard
        self.over = False
        self.passes = 0
        self.before_clipping: dict[int, tuple[Norms, int]] = {}
        self.ends: list[tuple[bool | HostCopy, int]] = []
        self._context, self._observations, self._notes = context, observations, notes
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
    def on_output_grad(self, hook: ForwardHook, place: int, grad: Tensor | None) -> None:
        """Receive the gradient of an output of this step."""
        if self.over or grad is None:
            return  # a graph kept from an earlier step; an output that got no gradient
        running = self._running.get(backward_task()) or self._begin_pass()
        into = self._observations.all if running is None else running.observations
        output = Output(hook.name, place) if place else hook.output
        ranks = self._context.ranks
        if ranks is None or ranks.takes_output_grad(self._notes, output, grad):
            self._observations.add("output_grads", output, grad, into, scaled=True)

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
        if self.over or not self._context.training:
            return  # its step is over, or only repeated
        if not ended.accumulated:
            if self.passes == 0:
                self._probed += ended.observations
            return
        self.passes += 1
        self._observations.all += ended.observations
        parameters = ended.accumulated.values()
        for group in take_norms(self._context.table.grads_of(parameters)):
            if (is_nonfinite := group.nonfinite()) is not False:
                self.ends.append((is_nonfinite, len(self._observations.all)))
            for place, index in enumerate(group.indices):
                self.before_clipping[int(index)] = group, place
        # Many passes without a step: nothing more is observed.
        message = self._context.missed.after_pass(
            self.passes, next(iter(parameters)), is_alone=self._context.ranks is None
        )
        if message is not None:
            self.guard.failures.log_once(message)
            self._context.observe(training=False)

    def stop(self) -> None:
        """Observe nothing any more, even where a graph holds a hook of ours."""
        if self.passes == 0:
            # They were all training: loops that use ``autograd.grad`` have no others.
            self._observations.all += self._probed
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

"""The backward passes of one step: which of them are training, and what each one brought."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor
from torch.nn.parameter import is_lazy

from telemetry.capture.hooks import ForwardHook
from telemetry.capture.inert import Inert
from telemetry.capture.parameters import local
from telemetry.capture.reader import StepReader
from telemetry.capture.watch import Watch
from telemetry.capture.window import Tally, Window
from telemetry.records import Output
from telemetry.torch_private import (
    NO_TASK,
    at_end_of_backward,
    backward_task,
    in_function_mode,
    undisturbed,
)


@dataclass(kw_only=True, eq=False)
class _Pass:
    """What one run of the autograd engine brought."""

    tally: Tally = field(default_factory=Tally)
    # Parameters whose gradient has changed, by identity; ``autograd.grad`` changes none.
    accumulated: dict[int, Tensor] = field(default_factory=dict)


class BackwardPasses:
    """Follows the backward passes of one step; there are several at a time if one starts another.

    Args:
        parameters: Which of them each pass reaches is noted.
    """

    def __init__(
        self, window: Window, watch: Watch, reader: StepReader, parameters: Iterable[Tensor]
    ) -> None:
        self.watch = watch
        self._window = window
        self._reader = reader
        self._running: dict[int, _Pass] = {}
        self._probes = Tally()
        self._over = False
        accumulated = partial(watch.contain, "to follow a backward pass", self._accumulated)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(accumulated)
            for parameter in parameters
            if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf
        ]

    def on_output_grad(self, hook: ForwardHook, place: int, grad: Tensor | None) -> None:
        """The gradient of an output that was returned in this step."""
        if self._over or grad is None:
            return  # a graph kept from an earlier step; an output that got no gradient
        current = self._current()
        tally = None if current is None else current.tally
        output = Output(hook.name, place) if place else hook.output
        ranks, notes = self.watch.ranks, self._window.ranks
        if ranks is not None and not ranks.takes_output_grad(notes, output, grad):
            return
        repeats = None if place else hook.repeats()
        observe = partial(self._window.observe, "output_grads", output, repeats=repeats)
        observe = partial(observe, scaled=True, tally=tally)
        if in_function_mode() or not observe(grad, plain=True):
            with undisturbed() as alone:
                if alone:
                    observe(local(grad))

    def end(self) -> None:
        """The step is over; nothing is observed any more, even where a graph holds a hook of ours.

        If no backward pass accumulated a gradient, they were all training: loops that take
        gradients by ``autograd.grad`` have no others.
        """
        if self._window.passes == 0:
            self._window.tally.absorb(self._probes)
        self._over = True
        while self._handles:
            self._handles.pop().remove()

    def _current(self) -> _Pass | None:
        """The pass that this thread is in; None where passes cannot be followed to their end."""
        task = backward_task()
        running = self._running.get(task)
        if running is None and task != NO_TASK:
            # Deferred, to come after the callback by which DDP ends its reduction.
            if not at_end_of_backward(lambda: self._end_pass(task), deferred=1):
                return None
            running = self._running[task] = _Pass()
        return running

    def _accumulated(self, parameter: Tensor) -> None:
        """A gradient has accumulated, so this backward pass is one of training."""
        current = None if self._over else self._current()
        if current is not None:
            current.accumulated[id(parameter)] = parameter

    def _end_pass(self, task: int) -> None:
        """A pass has ended and its gradients are reduced over ranks."""
        ended = self._running.pop(task)
        if self._over or not self.watch.switch.training:
            return  # its step is over, or only repeated
        if not ended.accumulated:
            if self._window.passes == 0:
                self._probes.absorb(ended.tally)
            return
        self.watch.contain("to end a backward pass", self._end_training_pass, ended)

    def _end_training_pass(self, ended: _Pass) -> None:
        parameters = ended.accumulated.values()
        with undisturbed() as alone:
            if alone:
                self._reader.end_pass(self._window, ended.tally, parameters)
            message = self._window.no_step.backward_ended(parameters)
        if message is not None:
            self.watch.failures.log_once(message)
            self.watch.switch.turn(training=False)


class GradHook(Inert):
    """The hook of a module's output, for its gradient.

    The user may keep the output for long, so all that is kept with it are weak references.
    """

    __slots__ = ("_hook", "_passes", "_place")

    __torch_unserializable__ = True
    """Keeps PyTorch from warning that it does not save the hook along with the output."""

    def __init__(self, passes: BackwardPasses, hook: ForwardHook, place: int) -> None:
        self._passes = weakref.ref(passes)
        self._hook = weakref.ref(hook)
        self._place = place

    def __call__(self, grad: Tensor) -> None:
        passes, hook = self._passes(), self._hook()
        if passes is None or hook is None:
            return
        doing = f"to observe the gradient of {hook.called}"
        passes.watch.contain(doing, passes.on_output_grad, hook, self._place, grad)

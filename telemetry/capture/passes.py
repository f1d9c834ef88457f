"""Which forward and backward passes are observed: those of training, and those of a phase."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from telemetry.capture.backward import BackwardPasses
from telemetry.capture.forward import ForwardPasses
from telemetry.capture.hooks import ForwardHook, InputHook, Switch
from telemetry.capture.reader import Content, StepReader
from telemetry.capture.window import Window
from telemetry.faults import Faults
from telemetry.torch_private import NO_TASK, backward_is_compiled, backward_task


class Passes:
    """Keeps the passes of training apart from everything else.

    Training is what runs with gradients enabled while the model or the module itself is in training
    mode, on one thread. In a :meth:`phase` every forward pass of its thread is observed.

    Args:
        model: The model in training, held weakly.
        content: What is measured.
        reader: Reads the gradients at the end of a backward pass.
        faults: Where to report what failed.
        own_time: Entered while anything is done.

    Attributes:
        switch: What the hooks look at.
        forward: Of the step in progress; None if that is not measured in full.
        backward: Likewise.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        content: Content,
        reader: StepReader,
        faults: Faults,
        own_time: AbstractContextManager[None],
    ) -> None:
        self.switch = Switch(output_grads=content.activation_gradients)
        self.forward: ForwardPasses | None = None
        self.backward: BackwardPasses | None = None
        self._phase: ForwardPasses | None = None
        self._model = weakref.ref(model)
        self._content = content
        self._reader = reader
        self._faults = faults
        self._own_time = own_time

    def begin(self, window: Window, *, pictured: frozenset[str]) -> None:
        """Observe training; what is seen goes to ``window``."""
        self.backward = BackwardPasses(
            window,
            reader=self._reader,
            switch=self.switch,
            faults=self._faults,
            own_time=self._own_time,
        )
        self.switch.output_grads = self._content.activation_gradients
        model = self._model()
        if backward_is_compiled():
            self.switch.output_grads = False
            self._faults.tell(
                "activation gradients are not measured: compiled autograd is on, which does not "
                "work with hooks on them"
            )
        elif model is not None:
            self.backward.follow(model.parameters())
        self.forward = self._forward_into(window, pictured, observe_grads=self.switch.output_grads)
        self.switch.turn(training=True)

    def pause(self) -> None:
        """Observe no pass of training until :meth:`resume` or the next step."""
        self.switch.turn(training=False)

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self.switch.turn(training=self.forward is not None)

    def end(self) -> None:
        """Observe no more training."""
        if self.backward is not None:
            self.backward.end()
        self.forward = self.backward = None
        self.switch.turn(training=False)

    @contextmanager
    def phase(self, window: Window, *, pictured: frozenset[str]) -> Iterator[None]:
        """Observe every forward pass of this thread meanwhile, whether it is training or not."""
        window.thread = threading.get_ident()
        outer, self._phase = self._phase, self._forward_into(window, pictured)
        self.switch.turn(in_phase=True)
        try:
            yield
        finally:
            self._phase = outer
            self.switch.turn(in_phase=outer is not None)

    def of_call(self, hook: ForwardHook | InputHook, *, grad_enabled: bool) -> ForwardPasses | None:
        """Where a module's call belongs; None if it is neither training nor in a phase."""
        thread = threading.get_ident()
        if self._phase is not None and self._phase.window.thread == thread:
            return self._phase
        forward, model, module = self.forward, self._model(), hook.module()
        if forward is None or not self.switch.training or not grad_enabled:
            return None
        if model is None or module is None or not (model.training or module.training):
            return None
        if backward_task() != NO_TASK:  # checkpointing runs the forward pass again
            return None if hook in forward.ran else forward
        if forward.window.thread is None:
            forward.window.thread = thread
        if forward.window.thread != thread:
            return None
        forward.ran.add(hook)
        return forward

    def begins_training(self, forward: ForwardPasses | None) -> bool:
        """Whether a call that belongs to ``forward`` is in a pass of training, not in a phase.

        What checkpointing runs again in a backward pass begins none.
        """
        return forward is not None and forward is self.forward and backward_task() == NO_TASK

    def _forward_into(
        self, window: Window, pictured: frozenset[str], *, observe_grads: bool = False
    ) -> ForwardPasses:
        return ForwardPasses(
            window,
            content=self._content,
            pictured=pictured,
            faults=self._faults,
            backward=self.backward if observe_grads else None,
        )

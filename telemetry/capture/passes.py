"""Which forward and backward passes are observed: those of training, and those of a phase."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from telemetry.capture.backward import BackwardPasses
from telemetry.capture.forward import ForwardPasses
from telemetry.capture.hooks import ForwardHook, InputHook
from telemetry.capture.reader import StepReader
from telemetry.capture.watch import Watch
from telemetry.capture.window import Window
from telemetry.torch_private import NO_TASK, backward_is_compiled, backward_task


class Passes:
    """Keeps the passes of training apart from everything else.

    Training is what runs with gradients enabled while the model or the module itself is in training
    mode, on one thread. In a :meth:`phase` every forward pass of its thread is observed.

    Args:
        watch: What is watched.
        reader: Reads the gradients at the end of a backward pass.

    Attributes:
        forward: Those of the step in progress; None if that is not measured in full.
        backward: Likewise.
    """

    def __init__(self, watch: Watch, reader: StepReader) -> None:
        self.forward: ForwardPasses | None = None
        self.backward: BackwardPasses | None = None
        self._phase: ForwardPasses | None = None
        self._watch = watch
        self._reader = reader

    def begin(self, window: Window, pictured: frozenset[str]) -> None:
        """Observe training; what is seen goes to ``window``."""
        watch, model = self._watch, self._watch.model()
        self.backward = backward = BackwardPasses(window, watch, self._reader)
        watch.switch.output_grads = watch.content.activation_gradients
        if backward_is_compiled():
            watch.switch.output_grads = False
            watch.faults.tell(
                "activation gradients are not measured: compiled autograd is on, which does not "
                "work with hooks on them"
            )
        elif model is not None:
            backward.follow(model.parameters())
        takes_grads = backward if watch.switch.output_grads else None
        self.forward = ForwardPasses(window, watch, pictured, takes_grads)
        watch.switch.turn(training=True)

    def pause(self) -> None:
        """Observe no pass of training until :meth:`resume` or the next step."""
        self._watch.switch.turn(training=False)

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        self._watch.switch.turn(training=self.forward is not None)

    def end(self) -> None:
        """Observe no more training."""
        if self.backward is not None:
            self.backward.end()
        self.forward = self.backward = None
        self._watch.switch.turn(training=False)

    @contextmanager
    def phase(self, window: Window, pictured: frozenset[str]) -> Iterator[None]:
        """Observe every forward pass of this thread meanwhile, whether it is training or not."""
        window.thread = threading.get_ident()
        outer, self._phase = self._phase, ForwardPasses(window, self._watch, pictured)
        self._watch.switch.turn(in_phase=True)
        try:
            yield
        finally:
            self._phase = outer
            self._watch.switch.turn(in_phase=outer is not None)

    def of_call(self, hook: ForwardHook | InputHook, *, grad_enabled: bool) -> ForwardPasses | None:
        """Where a module's call belongs; None if it is neither training nor in a phase."""
        thread = threading.get_ident()
        if self._phase is not None and self._phase.window.thread == thread:
            return self._phase
        forward, model, module = self.forward, self._watch.model(), hook.module()
        if forward is None or not self._watch.switch.training or not grad_enabled:
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

"""Which passes of the model are observed, and what the forward passes among them show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from telemetry import images
from telemetry.capture.backward import BackwardPasses, GradHook
from telemetry.capture.hooks import ForwardHook, ModuleHook, tensors_in
from telemetry.capture.parameters import described, local
from telemetry.capture.reader import StepReader
from telemetry.capture.watch import Watch
from telemetry.capture.window import Window
from telemetry.measure import fingerprint
from telemetry.records import Output
from telemetry.torch_private import NO_TASK, backward_task, in_function_mode, is_being_traced
from telemetry.torch_private.compiler import backward_is_compiled
from telemetry.torch_private.host_copy import HostCopy
from telemetry.torch_private.ranks import calling_stage

_FINGERPRINTS = 64
"""Tensors of one step that have a fingerprint; the step may have very many micro-batches."""


class Passes:
    """Keeps the passes of training apart from everything else.

    Training is what runs with gradients enabled while the model or the module itself is in training
    mode, on one thread; and also in evaluation mode if the last optimizer step was taken in it. In
    a :meth:`phase` every forward pass of its thread is observed.

    Attributes:
        eval_mode: Whether the model was in evaluation mode at the last step, or at the beginning.
        forward: Those of the step in progress; None if that is not measured in full.
        backward: Likewise.
    """

    def __init__(self, watch: Watch, reader: StepReader) -> None:
        self.forward: ForwardPasses | None = None
        self.backward: BackwardPasses | None = None
        self._phase: ForwardPasses | None = None
        self._watch = watch
        self._reader = reader
        model = watch.model()
        self.eval_mode = model is not None and not model.training

    def begin(self, window: Window, pictured: frozenset[str]) -> None:
        """Observe training; what is seen goes to ``window``."""
        watch, model = self._watch, self._watch.model()
        compiled = backward_is_compiled()
        watch.switch.output_grads = watch.content.activation_gradients and not compiled
        if compiled:
            watch.failures.log_once(
                "activation gradients are not measured: compiled autograd is on, which does not "
                "work with hooks on them"
            )
        parameters = () if compiled or model is None else model.parameters()
        self.backward = BackwardPasses(window, watch, self._reader, parameters)
        takes_grads = self.backward if watch.switch.output_grads else None
        self.forward = ForwardPasses(window, watch, pictured, takes_grads)
        watch.switch.turn(training=True)

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

    def of_call(self, hook: ModuleHook, grad_enabled: bool) -> ForwardPasses | None:
        """Where a module's call belongs; None if it is neither training nor in a phase."""
        thread = threading.get_ident()
        if self._phase is not None and self._phase.window.thread == thread:
            return self._phase
        forward, model, module = self.forward, self._watch.model(), hook.module()
        if forward is None or not self._watch.switch.training or not grad_enabled:
            return None
        if model is None or module is None:
            return None
        if not (model.training or module.training or self.eval_mode):
            return None
        stage = calling_stage()
        if stage is not None and stage.probes:
            return None
        if backward_task() != NO_TASK:  # checkpointing runs the forward pass again
            return None if hook in forward.ran else forward
        if forward.window.thread is None:
            forward.window.thread = thread
        if forward.window.thread != thread:
            return None
        forward.ran.add(hook)
        return forward


class ForwardPasses:
    """Observes what the model is given and what its watched modules return.

    A module's backward hook would replace its outputs and fail where they are changed in place
    afterwards. A hook on the output tensor itself does neither, and sees the gradient of the value
    that the module returned.

    Its methods are to be called where nothing of the caller's is disturbed.

    Args:
        pictured: Names of the modules whose feature maps are drawn.
        backward: Takes the gradients of the outputs; None if they are not measured.

    Attributes:
        ran: Hooks that were called outside of a backward pass.
        begun: Whether the model is known to be as when the step began.
    """

    def __init__(
        self,
        window: Window,
        watch: Watch,
        pictured: frozenset[str],
        backward: BackwardPasses | None = None,
    ) -> None:
        self.window = window
        self.ran: set[object] = set()
        self.begun = False
        self._watch = watch
        self._content = watch.content
        self._failures = watch.failures
        self._pictured = pictured
        self._backward = backward
        self._model = watch.model
        # Whether what the next watched module is given comes from outside.
        self._awaits_input = True
        # Identities of the tensors that the model was given in the pass in progress.
        self._given: set[int] = set()
        self._unit_axes: dict[tuple[int, ...], int] = {}

    def on_input(self, given: Any) -> None:
        """The model is called with ``given``."""
        self._awaits_input = True
        self._given.clear()
        known = (tensor for tensor in tensors_in(given) if not is_being_traced(tensor))
        self.window.examples += next((t.size(0) for t in known if t.dim()), 0)
        self._observe_inputs("", given)

    def on_output(self, hook: ForwardHook, args: Any, output: Any) -> None:
        """A module was called with ``args`` and returned ``output``."""
        given = args if self._awaits_input else ()
        self._awaits_input = False
        if given:
            self._observe_inputs(hook.name, given)
        self.window.order.setdefault(hook.name)
        for place, tensor in enumerate(tensors_in(output)):
            if is_being_traced(tensor):
                self._failures.log_once(
                    "passes in which the model is traced or transformed, or is on the meta "
                    "device, have no values to measure"
                )
                return
            self._observe_output(hook, tensor, place)
            self._follow(hook, tensor, place)
        self._take_images(hook.name, given, output)

    def on_plain_output(self, hook: ForwardHook, output: Any) -> bool:
        """The same for most modules, and anywhere; False, and nothing done, if it cannot be."""
        if type(output) is not Tensor or self._awaits_input or hook.name in self._pictured:
            return False
        if self._watch.ranks is not None or not self._content.activations:
            return False
        if in_function_mode() or is_being_traced(output):
            return False
        self.window.order.setdefault(hook.name)
        observe = partial(self.window.observe, "outputs", hook.output, output, plain=True)
        if not observe(unit_axis=self._unit_axis(hook, output), repeats=hook.repeats()):
            return False
        self._follow(hook, output, 0)
        return True

    def _follow(self, hook: ForwardHook, tensor: Tensor, place: int) -> None:
        """See the gradient of an output."""
        # Without a grad_fn it is a leaf: a parameter would keep the hook beyond this step.
        if self._backward is not None and tensor.grad_fn is not None:
            tensor.register_hook(GradHook(self._backward, hook, place))

    def on_graph_output(self, hook: ForwardHook, tensor: Tensor, place: int) -> None:
        """A compiled graph shows one of the tensors that a module returned."""
        self._awaits_input = False
        self.window.order.setdefault(hook.name)
        self._observe_output(hook, tensor, place)
        self._take_images(hook.name, (), tensor if place == 0 else ())

    def _observe_inputs(self, name: str, given: Any) -> None:
        """Measure what comes from outside, each tensor once though it is handed on."""
        ranks, notes = self._watch.ranks, self.window.ranks
        taken = ranks is None or ranks.takes_inputs(notes, name, self._model())
        if self.window.phase or not self._content.activations or not taken:
            return
        for tensor in tensors_in(given):
            if id(tensor) in self._given or is_being_traced(tensor):
                continue
            self._given.add(id(tensor))
            values = local(tensor.detach())
            if len(self.window.fingerprints) < _FINGERPRINTS:
                self.window.fingerprints += map(HostCopy, fingerprint(values))
            if tensor.is_floating_point() or tensor.is_complex():
                self.window.observe("inputs", name, values)

    def _observe_output(self, hook: ForwardHook, tensor: Tensor, place: int) -> None:
        if not self._content.activations:
            return
        output, returned, tensor = Output(hook.name, place), tensor, local(tensor)
        axis = self._unit_axis(hook, tensor)
        ranks, notes = self._watch.ranks, self.window.ranks
        if ranks is not None and not ranks.takes_output(notes, output, returned, axis):
            return
        repeats = None if place else hook.repeats()
        if not self.window.observe("outputs", output, tensor, unit_axis=axis, repeats=repeats):
            what = described(tensor)
            self._failures.log_once(
                f"what {hook.called} returned is not measured: {what} cannot be", kind=what
            )

    def _unit_axis(self, hook: ForwardHook, tensor: Tensor) -> int | None:
        """Axis that counts units or channels; that of the layer before where shapes agree."""
        dim = tensor.dim()
        if dim < 2:
            return None
        if hook.units == "unknown":
            return self._unit_axes.get(tuple(tensor.shape), 1 if dim > 3 else dim - 1)
        axis = 1 if hook.units == "first" else dim - 1
        self._unit_axes[tuple(tensor.shape)] = axis
        return axis

    def _take_images(self, name: str, given: Any, output: Any) -> None:
        if name in self._pictured and name not in self.window.feature_maps:
            sample = next(map(images.sample_feature_maps, tensors_in(output)), None)
            if sample is not None:
                self.window.feature_maps[name] = HostCopy(sample)
        if self._content.images and self.window.input is None:
            sample = next(map(images.sample_inputs, tensors_in(given)), None)
            if sample is not None:
                self.window.input = HostCopy(sample)

"""Passes of a step: what the forward ones measure, and the gradients of the backward ones."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from telemetry.capture.context import Context, guarded
from telemetry.capture.experts import Loads, add_tokens
from telemetry.capture.hooks import ForwardHook, Inert, ResultHook, tensors_in
from telemetry.capture.observations import Observation, Observations
from telemetry.capture.parameters import PLAIN, Indexed, Norms, local, plain, take_norms
from telemetry.capture.scaler import PassEnd
from telemetry.measure import fingerprint, images
from telemetry.measure.attention import attention_figures
from telemetry.plain_text import called_all
from telemetry.ranks.topology import RankNotes
from telemetry.records import Output
from telemetry.torch_private import (
    NO_TASK,
    at_end_of_backward,
    backward_task,
    is_being_traced,
)
from telemetry.torch_private.host_copy import HostCopy
from telemetry.torch_private.ranks import calling_stage

# Tensors of one step that have a fingerprint; the step may have very many micro-batches.
_FINGERPRINTS = 64

# Calls of attention that are measured in one module and step.
_ATTENTION_CALLS = 64

# Types of indices, counts and masks, of which no statistics are taken; "q" is for quantized.
_DISCRETE = {
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and not (dtype.is_floating_point or dtype.is_complex or name.startswith(("q", "quint")))
}


# Channels of images that are measured one by one; of more, only all together.
_MOST_CHANNELS = 4


class ForwardPasses:
    """Forward passes of one step, or of a phase.

    Guarded methods call its methods.

    Args:
        backward: Receives the gradients of outputs; None in a phase.

    Attributes:
        examples: Length of the model's first input tensor, summed over its calls.
        order: Names of the watched modules in the order of their first call.
        loads: Numbers of tokens of each expert, by the names of routers.
        function: Function that computed what the model returned, named like its module; empty if
            it is not known, or a watched module did.
    """

    def __init__(
        self,
        context: Context,
        observations: Observations,
        notes: RankNotes,
        backward: BackwardPasses | None,
    ) -> None:
        self.examples = 0
        self.order: dict[str, None] = {}
        self.loads: dict[str, Loads] = {}
        self.function = ""
        self._context, self._content = context, context.content
        self._observations, self._notes = observations, notes
        self._backward = backward
        # Whether the next watched module receives its arguments from outside.
        self._awaits_input = True
        self._given: set[int] = set()  # identities of the tensors of the batch
        self._unit_axes: dict[tuple[int, ...], int] = {}  # of the latest output of each shape
        self._convolution: ForwardHook | None = None  # that ran first
        self._latest: weakref.ref[Tensor] | None = None  # the latest output of a module

    def on_input(self, given: Any) -> None:
        """Receive the arguments of the model."""
        self._awaits_input = True
        self._given.clear()
        tensors = tensors_in(given)
        for tensor in tensors:
            if tensor.dim() and not is_being_traced(tensor):
                self.examples += tensor.size(0)
                break
        self._add_inputs("", tensors)

    def on_output(self, hook: ForwardHook, args: Any, output: Any) -> None:
        """Receive the arguments and the output of a module.

        A module's backward hook would replace its outputs and fail where they are changed in place
        afterwards. A hook on the output tensor itself does neither, and receives the gradient of
        the value that the module returned.
        """
        if isinstance(hook, ResultHook):
            is_known = self._latest is not None and self._latest() is output
            if is_known or calling_stage() is not None:  # stages would have names in common
                return
            self.function = hook.function
        given = tensors_in(args) if self._awaits_input else []
        self._awaits_input = False
        if given:
            self._add_inputs(hook.name, given)
        self.order.setdefault(hook.name)
        outputs = tensors_in(output)
        for place, tensor in enumerate(outputs):
            if is_being_traced(tensor):
                self._context.guard.failures.log_once(
                    "passes in which the model is traced or transformed, or is on the meta "
                    "device, have no values to measure"
                )
                return
            self._add_output(hook, tensor, place)
            self._latest = weakref.ref(tensor)
            # Without a grad_fn it is a leaf: a parameter would keep the hook beyond this step.
            if tensor.grad_fn is not None and self._context.output_grads and self._backward:
                tensor.register_hook(_GradHook(self._backward, hook, place))
        if given or hook.convolves:
            self._take_images(hook, given, outputs)

    def on_graph_output(self, hook: ForwardHook, tensor: Tensor, place: int) -> None:
        """Receive one of a module's outputs from a compiled graph."""
        self._awaits_input = False
        self.order.setdefault(hook.name)
        self._add_output(hook, tensor, place)
        if hook.convolves and place == 0:
            self._take_images(hook, [], [tensor])

    def _add_inputs(self, name: str, given: list[Tensor]) -> None:
        """Measure tensors from outside, each once, though a module passes it on."""
        ranks, model = self._context.ranks, self._context.model()
        counts = ranks is None or ranks.takes_inputs(self._notes, name, model)
        if self._backward is None or not self._content.activations or not counts:
            return
        for tensor in given:
            if id(tensor) in self._given or is_being_traced(tensor):
                continue
            self._given.add(id(tensor))
            fingerprints = self._observations.copies("fingerprints")
            if len(fingerprints) < _FINGERPRINTS:
                fingerprints += map(HostCopy, fingerprint(local(tensor.detach())))
            if tensor.dtype in _DISCRETE:
                continue
            channels = () if name else _channels_of(tensor)
            for place, part in enumerate(channels or (tensor,)):
                observed = self._observations.add("inputs", name, part)
                if channels and observed is not None:  # measured once, for both
                    channel = observed._replace(kind="channels", name=str(place))
                    self._observations.all.append(channel)

    def _add_output(self, hook: ForwardHook, tensor: Tensor, place: int) -> None:
        if not self._content.activations:
            return
        if hook.router is not None:
            loads = self.loads.setdefault(hook.name, {})
            add_tokens(loads, hook.router, local(tensor), place)
        if tensor.dtype in _DISCRETE:
            return
        output, axis = Output(hook.name, place) if place else hook.output, None
        if not tensor.is_nested and (dim := tensor.dim()) >= 2:  # which axis has the units
            axis = 1 if hook.units == "first" else dim - 1
            if hook.units == "unknown":  # an activation function: as in what it was given
                axis = self._unit_axes.get(tensor.shape, 1 if dim > 3 else dim - 1)
            else:
                self._unit_axes[tensor.shape] = axis
        ranks = self._context.ranks
        if ranks is None or ranks.takes_output(self._notes, output, tensor, axis):
            self._observations.add("outputs", output, tensor, unit_axis=axis)

    def on_attention(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Measure a call of ``scaled_dot_product_attention`` by a module of this name."""
        calls = self._observations.copies("attention", name)
        if len(calls) >= _ATTENTION_CALLS or is_being_traced(query):
            return
        mask = None if attn_mask is None else local(attn_mask)
        dense = plain(enumerate((query, key)))
        if len(dense) < 2 or (mask is not None and type(mask) not in PLAIN):
            self._context.guard.failures.log_once(
                f"the attention of {called_all([name], 1)} is not measured: nested or sparse "
                f"tensors, or a mask of type {type(mask).__name__}"
            )
        elif all(values.numel() for _, values in dense):
            self.order.setdefault(name)
            (_, queries), (_, keys) = dense
            measured = attention_figures(queries, keys, mask, is_causal=is_causal, scale=scale)
            calls.append(HostCopy(measured))

    # --- pictures ---------------------------------------------------------------------------------

    def _take_images(self, hook: ForwardHook, given: list[Tensor], outputs: list[Tensor]) -> None:
        """Sample feature maps and the input, each once in a step."""
        if hook.convolves:
            self._convolution = self._convolution or hook
        if not self._content.images:
            return
        if hook.pictured:
            maps = map(images.sample_feature_maps, outputs)
            self._observations.take_picture("feature_maps", hook.name, maps)
        self._observations.take_picture("input", None, map(images.sample_inputs, given))

    def take_filters(self) -> None:
        """Sample the filters of the first convolution, before the optimizer changes them."""
        module = None if self._convolution is None else self._convolution.module()
        if self._convolution is not None and module is not None:
            weight: Any = module.weight
            filters = map(images.sample_filters, [local(weight.detach())])
            self._observations.take_picture("filters", self._convolution.name, filters)


def _channels_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return the channels of images ``[N, C, H, W]``; none if they have one or many."""
    if type(tensor) not in PLAIN or tensor.is_nested or tensor.layout is not torch.strided:
        return ()
    if tensor.dim() != 4 or not 1 < tensor.shape[1] <= _MOST_CHANNELS:
        return ()
    return tensor.detach().unbind(1)


class _GradHook(Inert):
    """Hook of a module's output, for its gradient.

    The user may keep the output for long, so the hook holds weak references only.
    """

    __slots__ = ("_backward", "_hook", "_place")

    __torch_unserializable__ = True
    """Keeps PyTorch from warning that it does not save the hook along with the output."""

    def __init__(self, backward: BackwardPasses, hook: ForwardHook, place: int) -> None:
        self._backward, self._hook, self._place = weakref.ref(backward), weakref.ref(hook), place

    def __call__(self, grad: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        backward, hook = self._backward(), self._hook()
        if backward is not None and hook is not None:
            backward.on_output_grad(hook, self._place, grad)


# --- backward passes ------------------------------------------------------------------------------

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
        ends: Of passes with a gradient that is not finite, or may be so.
        cleared: Indices of the parameters that had no gradient at the begin of a pass.
        left: Norms of the other parameters' gradients at the begin of each pass.
    """

    def __init__(self, context: Context, observations: Observations, notes: RankNotes) -> None:
        self.guard = context.guard
        self.over = False
        self.passes = 0
        self.before_clipping: dict[int, tuple[Norms, int]] = {}
        self.ends: list[PassEnd] = []
        self.cleared: set[int] = set()
        self.left: list[Norms] = []
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
        self._read_left()
        return self._running[task]

    @guarded("to read the gradients before a backward pass")
    def _read_left(self) -> None:
        """Read the gradients to which a pass adds; of those that no pass has found cleared."""
        grads = [(i, p.grad) for i, p in self._context.table.all() if i not in self.cleared]
        self.cleared.update(i for i, grad in grads if grad is None)
        self.left += take_norms((i, grad) for i, grad in grads if grad is not None)

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
                self.ends.append(PassEnd(is_nonfinite, len(self._observations.all)))
            for place, index in enumerate(group.indices):
                self.before_clipping[int(index)] = group, place
        # Many passes without a step: nothing more is observed.
        message = self._context.missed.after_pass(
            self.passes, next(iter(parameters)), self.ends, is_alone=self._context.ranks is None
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

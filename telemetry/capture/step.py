"""The step in progress: gathers what hooks and optimizers report, in the order of time."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from telemetry.capture.captured_step import CapturedStep, read_scaler
from telemetry.capture.experts import ExpertLoads, Router
from telemetry.capture.hooks import ForwardHook, Inert
from telemetry.capture.nested import tensors_in
from telemetry.capture.observations import Kind, Observation
from telemetry.capture.optimizers import Optimizers
from telemetry.capture.parameters import PLAIN, Indexed, Updates, local, plain, take_norms
from telemetry.capture.state import State, Target, guarded
from telemetry.measure import fingerprint, images
from telemetry.measure.attention import attention_figures
from telemetry.plain_text import called_all
from telemetry.records import Output, Parameter
from telemetry.selection import cleaned
from telemetry.torch_private import (
    NO_TASK,
    at_end_of_backward,
    backward_task,
    calling_scaler,
    is_being_traced,
)
from telemetry.torch_private.host_copy import HostCopy

_NAMES_IN_MESSAGE = 8

# Tensors of one step that have a fingerprint; the step may have very many micro-batches.
_FINGERPRINTS = 64

# Calls of attention that are measured in one module and step.
_ATTENTION_CALLS = 64

# Instead of an optimizer's identity, in a loop without optimizers.
_BY_HAND = 0


class PassObserver(Protocol):
    """Receiver of the backward passes of training."""

    def after_pass(self, passes: int, accumulated: Mapping[int, Tensor]) -> None:
        """Receive the number of passes, and the parameters that the last one has reached."""


class _Pass(NamedTuple):
    """One run of the autograd engine: its observations, and the parameters that it reached."""

    observations: list[Observation]
    accumulated: dict[int, Tensor]  # by identity; ``autograd.grad`` reaches none


class Step:
    """One step of training, or a phase apart from it.

    Methods without a guard are called by guarded ones.

    Attributes:
        captured: The values gathered in the step.
        over: Whether nothing is observed any more.
        unchanged: Whether the model is known to have the same modules as at the beginning.
        ran: Hooks that were called outside of a backward pass.
        order: Names of the watched modules in the order of their first call.
        parameters: Descriptions of the parameters that have an index in this step.
    """

    def __init__(
        self,
        target: Target,
        state: State,
        optimizers: Optimizers,
        observer: PassObserver,
        *,
        full: bool,
        phase: str = "",
    ) -> None:
        self.guard = target.guard
        self.captured = CapturedStep(
            step=state.step,
            totals=target.totals,
            failures=self.guard.failures,
            full=full,
            phase=phase,
        )
        self.full, self.over = full, not full
        self.unchanged = False
        self.ran: set[object] = set()
        self.order: dict[str, None] = {}
        self.parameters: tuple[Parameter, ...] = ()
        self._target, self._state, self._content = target, state, target.content
        self._optimizers, self._observer = optimizers, observer
        self._detail = self.captured.detail
        self._tensors = self._detail.observations
        # Whether the next watched module receives its arguments from outside.
        self._awaits_input = True
        self._given: set[int] = set()  # identities of the tensors of the batch
        self._loads = ExpertLoads()
        self._unit_axes: dict[tuple[int, ...], int] = {}  # of the latest output of each shape
        self._convolution: ForwardHook | None = None  # that ran first
        # Backward passes by task; there are several at a time if one starts another.
        self._running: dict[int, _Pass] = {}
        self._probed: list[Observation] = []  # of passes that reached no parameter
        self._handles: list[Any] = []
        self._versions: dict[int, int] = {}  # of the parameters, after the step before
        self._stepped: set[int] = set()  # identities of optimizers
        self._held: set[int] = set()  # indices of the parameters that they have
        self._moments: set[int] = set()
        self._updates: dict[int, Updates] = {}

    # --- begin ------------------------------------------------------------------------------------

    def begin(self, *, follows: bool, by_hand: bool, compiled: bool) -> None:
        """Observe backward passes and parameters from here on.

        Args:
            follows: Whether another step has just ended.
            by_hand: Whether the loop has no optimizer, which would announce its step.
            compiled: Whether compiled autograd is on, so that hooks on parameters are not called.
        """
        table = self._target.table
        table.refresh()
        found = table.all()
        if follows:
            self._versions = {
                i: p._version for i, p in found if p.requires_grad and not p.is_inference()
            }
        self._detail.random_states = _random_states()
        if by_hand and self._content.weights:
            self._updates[_BY_HAND] = Updates(self._counting(found))
        if not compiled:
            self._handles += [
                parameter.register_post_accumulate_grad_hook(self.on_accumulated)
                for _, parameter in found
                if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf
            ]

    # --- forward passes ---------------------------------------------------------------------------

    def on_input(self, given: Any) -> None:
        """Receive the arguments of the model."""
        self._awaits_input = True
        self._given.clear()
        tensors = tensors_in(given)
        sizes = [t.size(0) for t in tensors if t.dim() and not is_being_traced(t)]
        self._detail.examples += sizes[0] if sizes else 0
        self._add_inputs("", tensors)

    def on_output(self, hook: ForwardHook, args: Any, output: Any) -> None:
        """Receive the arguments and the output of a module.

        A module's backward hook would replace its outputs and fail where they are changed in place
        afterwards. A hook on the output tensor itself does neither, and receives the gradient of
        the value that the module returned.
        """
        given = args if self._awaits_input else ()
        self._awaits_input = False
        if given:
            self._add_inputs(hook.name, tensors_in(given))
        self.order.setdefault(hook.name)
        for place, tensor in enumerate(tensors_in(output)):
            if is_being_traced(tensor):
                self.guard.failures.log_once(
                    "passes in which the model is traced or transformed, or is on the meta "
                    "device, have no values to measure"
                )
                return
            self._add_output(hook, tensor, place)
            if hook.router is not None:
                self._add_load(hook, hook.router, tensor, place)
            # Without a grad_fn it is a leaf: a parameter would keep the hook beyond this step.
            if tensor.grad_fn is not None and self._state.output_grads and not self.captured.phase:
                tensor.register_hook(_GradHook(self, hook, place))
        if given or hook.convolves:
            self._take_images(hook, given, output)

    def on_graph_output(self, hook: ForwardHook, tensor: Tensor, place: int) -> None:
        """Receive one of a module's outputs from a compiled graph."""
        self._awaits_input = False
        self.order.setdefault(hook.name)
        observation = self._add_output(hook, tensor, place)
        if hook.router is not None:
            self._add_load(hook, hook.router, tensor, place)
        self._check(observation, tensor)
        if hook.convolves and place == 0:
            self._take_images(hook, (), tensor)

    def _add_inputs(self, name: str, given: list[Tensor]) -> None:
        """Measure tensors from outside, each once, though a module passes it on."""
        target, ranks, captured = self._target, self._state.ranks, self.captured
        counts = ranks is None or ranks.takes_inputs(captured.ranks, name, target.model())
        if captured.phase or not self._content.activations or not counts:
            return
        for tensor in given:
            if id(tensor) in self._given or is_being_traced(tensor):
                continue
            self._given.add(id(tensor))
            values = local(tensor.detach())
            if len(self._detail.fingerprints) < _FINGERPRINTS:
                self._detail.fingerprints += map(HostCopy, fingerprint(values))
            if not _is_discrete(tensor):
                self._tensors.add("inputs", name, values, self._tensors.all)

    def _add_output(self, hook: ForwardHook, tensor: Tensor, place: int) -> Observation | None:
        if not self._content.activations or _is_discrete(tensor):
            return None
        output = Output(hook.name, place) if place else hook.output
        values = local(tensor)
        axis = self._unit_axis(hook, values)
        ranks, notes = self._state.ranks, self.captured.ranks
        if ranks is not None and not ranks.takes_output(notes, output, tensor, axis):
            return None
        return self._tensors.add("outputs", output, values, self._tensors.all, unit_axis=axis)

    def _add_load(self, hook: ForwardHook, router: Router, tensor: Tensor, place: int) -> None:
        """Count the tokens of each expert."""
        if self._content.activations:
            self._loads.add(hook.name, router, local(tensor), place)

    def _unit_axis(self, hook: ForwardHook, tensor: Tensor) -> int | None:
        """Return the axis that counts units or channels.

        An activation function has the axis of the latest output of the same shape.
        """
        if tensor.is_nested or (dim := tensor.dim()) < 2:
            return None
        if hook.units == "unknown":
            return self._unit_axes.get(tensor.shape, 1 if dim > 3 else dim - 1)
        self._unit_axes[tensor.shape] = axis = 1 if hook.units == "first" else dim - 1
        return axis

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
        calls = self._detail.attention.setdefault(name, [])
        if len(calls) >= _ATTENTION_CALLS or is_being_traced(query):
            return
        queries, keys, mask = plain(query), plain(key), attn_mask
        if mask is not None:
            mask = local(mask)
        if queries is None or keys is None or (mask is not None and type(mask) not in PLAIN):
            self.guard.failures.log_once(
                f"the attention of {called_all([name], 1)} is not measured: nested or sparse "
                f"tensors, or a mask of type {type(mask).__name__}"
            )
        elif queries.numel() and keys.numel():
            self.order.setdefault(name)
            measured = attention_figures(queries, keys, mask, is_causal=is_causal, scale=scale)
            calls.append(HostCopy(measured))

    def _check(self, observation: Observation | None, tensor: Tensor) -> None:
        """Have some tensors of compiled graphs reduced by PyTorch, too."""
        if observation is None or not tensor.numel():
            return
        left = self._target.totals.checks_left
        if left[observation.kind] and tensor.dtype in (torch.float32, torch.bfloat16):
            left[observation.kind] -= 1
            self._tensors.check(observation, tensor)

    # --- pictures ---------------------------------------------------------------------------------

    def _take_images(self, hook: ForwardHook, given: Any, output: Any) -> None:
        """Sample feature maps and the input, each once in a step."""
        detail, of_sample = self._detail, self._target.has_sample and not self.captured.phase
        if hook.convolves:
            self._convolution = self._convolution or hook
        if of_sample or not self._content.images:
            return
        if hook.pictured and hook.name not in detail.feature_maps:
            sample = next(map(images.sample_feature_maps, tensors_in(output)), None)
            if sample is not None:
                detail.feature_maps[hook.name] = HostCopy(sample)
        if given and detail.input is None:
            sample = next(map(images.sample_inputs, tensors_in(given)), None)
            if sample is not None:
                detail.input = HostCopy(sample)

    def _take_filters(self) -> None:
        """Sample the filters of the first convolution, before the optimizer changes them."""
        if self._convolution is None or self._detail.filters:
            return
        module = self._convolution.module()
        weight: Any = None if module is None else module.weight
        sample = None if weight is None else images.sample_filters(local(weight.detach()))
        if sample is not None:
            self._detail.filters[self._convolution.name] = HostCopy(sample)

    # --- backward passes --------------------------------------------------------------------------

    @guarded("to observe the gradient of {1.called}")
    def on_output_grad(
        self, hook: ForwardHook, place: int, grad: Tensor | None, in_graph: bool = False
    ) -> None:
        """Receive the gradient of an output of this step."""
        if self.over or grad is None:
            return  # a graph kept from an earlier step; an output that got no gradient
        running = self._current_pass()
        into = self._tensors.all if running is None else running.observations
        output = Output(hook.name, place) if place else hook.output
        ranks, notes = self._state.ranks, self.captured.ranks
        if ranks is None or ranks.takes_output_grad(notes, output, grad):
            observed = self._tensors.add("output_grads", output, local(grad), into, scaled=True)
            if in_graph:
                self._check(observed, grad)

    def on_accumulated(self, parameter: Tensor) -> None:
        """Note that a gradient has accumulated, so that this backward pass is one of training."""
        if not torch.compiler.is_compiling():
            self._on_accumulated(parameter)

    @guarded("to follow a backward pass", reads=False)
    def _on_accumulated(self, parameter: Tensor) -> None:
        running = None if self.over else self._current_pass()
        if running is not None:
            running.accumulated[id(parameter)] = parameter

    def _current_pass(self) -> _Pass | None:
        """Return this thread's backward pass; None where its end cannot be observed."""
        task = backward_task()
        running = self._running.get(task)
        if running is None and task != NO_TASK:
            # Deferred, to come after the callback by which DDP ends its reduction.
            if not at_end_of_backward(lambda: self.on_backward_end(task), deferred=1):
                return None
            running = self._running[task] = _Pass([], {})
        return running

    @guarded("to end a backward pass")
    def on_backward_end(self, task: int) -> None:
        """Read the gradients after a pass: they are reduced over ranks and not clipped yet."""
        ended = self._running.pop(task)
        captured, observations = self.captured, self._tensors.all
        if self.over or not self._state.training:
            return  # its step is over, or only repeated
        if not ended.accumulated:
            if captured.passes == 0:
                self._probed += ended.observations
            return
        captured.passes += 1
        observations += ended.observations
        parameters = ended.accumulated.values()
        for group in take_norms(self._target.table.grads_of(parameters)):
            nonfinite = group.nonfinite()
            if nonfinite is not None:
                captured.overflow_ends.append((HostCopy(nonfinite), len(observations)))
            for place, index in enumerate(group.indices):
                captured.before_clipping[index] = group, place
        self._observer.after_pass(captured.passes, ended.accumulated)

    # --- optimizer steps --------------------------------------------------------------------------

    @guarded("to read the gradients")
    def before_step(self, optimizer: Optimizer) -> None:
        """Read gradients and parameters at the first step of an optimizer in this one."""
        key, table = id(optimizer), self._target.table
        if key in self._stepped:
            return
        # Parameters may have been replaced. Those of a step are known by their indices.
        check = not self._stepped and (self.full or table.lacks(optimizer))
        if check and table.refresh():
            self.captured.before_clipping.clear()
        self.parameters = self.parameters or table.parameters
        # Each counts once, though an optimizer may call another one that has it, too.
        parameters = [(i, p) for i, p in dict(table.of(optimizer)).items() if i not in self._held]
        if not parameters:
            return
        scaler = calling_scaler()
        if scaler is not None:
            self.captured.scaler = read_scaler(scaler, optimizer, self._state.step)
        # Of all optimizers, so that each keeps its place where one steps more rarely. The rates of
        # one that has stepped stay as they were: a schedule may have changed them since.
        for known in self._optimizers.met(optimizer):
            if id(known) not in self._stepped:
                rates = [_rate(group.get("lr")) for group in known.param_groups]
                self.captured.learning_rates[id(known)] = rates
        versions = self._versions
        if versions and all(i in versions and p._version != versions[i] for i, p in parameters):
            stepped = f"{type(optimizer).__name__}.step()"
            self.guard.failures.log_once(
                f"parameters change between steps of {type(optimizer).__name__}, too: by a wrapper "
                "that is no torch.optim.Optimizer, an average of weights, or clamping. Update "
                f"ratios are those of {stepped} alone"
            )
        # A fused optimizer divides by this itself.
        self._read(key, parameters, scaled=getattr(optimizer, "grad_scale", None) is not None)
        if self.full:
            self._detail.groups[key] = table.groups_of(optimizer)
        if self.full and self._content.weights:
            self._updates[key] = Updates(self._counting(parameters))

    @guarded("to measure the update")
    def after_step(self, optimizer: Optimizer) -> None:
        """Read parameters and second moments after the first step of an optimizer in this one."""
        self._read_update(id(optimizer))
        if self.full and self._content.weights:
            # Not by its brackets: the optimizer's state is a defaultdict.
            of = self._target.table.of(optimizer)
            states = {i: optimizer.state.get(p, {}) for i, p in of if i not in self._moments}
            moments = [(i, s["exp_avg_sq"]) for i, s in states.items() if "exp_avg_sq" in s]
            self._moments.update(i for i, _ in moments)
            self._observe_parameters("second_moments", self._counting(moments))

    @guarded("to read the gradients")
    def step_by_hand(self) -> None:
        """Read gradients and parameters after a step without an optimizer."""
        table = self._target.table
        if self.full and table.refresh():
            self.captured.before_clipping.clear()
        self.parameters = table.parameters
        self._read(_BY_HAND, table.all(), scaled=False)
        self._read_update(_BY_HAND)

    def _read(self, optimizer: int, parameters: Indexed, *, scaled: bool) -> None:
        """Take norms of all gradients; on full steps measure gradients and parameters."""
        full, captured, ranks = self.full, self.captured, self._state.ranks
        table, content = self._target.table, self._content
        first, every = not self._stepped, table.all() if full else []
        self._stepped.add(optimizer)
        self._held |= {i for i, _ in parameters}
        grads = [(i, grad) for i, p in parameters if (grad := p.grad) is not None]
        norms = take_norms(grads)
        captured.norms += [(group, scaled) for group in norms]
        captured.square += sum([group.known_square or 0.0 for group in norms])
        weights = [(i, p) for i, p in parameters if p.requires_grad]
        if first:  # no optimizer may have the frozen ones
            weights += [(i, p) for i, p in every if not p.requires_grad]
        if ranks is not None:
            ranks.note_grads(captured.ranks, grads)
            if full and content.weights:
                ranks.note_parameters(captured.ranks, weights)
        # After the step all is NaN; only now does a broken parameter differ from a bad batch.
        check = full or not math.isfinite(captured.square)
        if check and not (full and content.weights):
            captured.parameter_norms += take_norms(parameters)
        model = self._target.model()
        if check and model is not None and not captured.buffer_names:
            buffers = cleaned(model.named_buffers())
            captured.buffer_names = tuple(buffers)
            captured.buffer_norms = take_norms(enumerate(buffers.values()))
        if not full:
            return
        self._detail.held = self._held
        self._detail.trainable |= {i for i, p in every if p.requires_grad}
        self._detail.reached |= {i for i, p in every if p.requires_grad and p.grad is not None}
        if content.gradients:
            self._observe_parameters("grads", self._counting(grads), scaled=scaled)
        if content.weights:
            self._observe_parameters("weights", self._counting(weights))
        if content.images:
            self._take_filters()

    def _counting(self, tensors: Indexed) -> Indexed:
        """Select the parameters that this rank measures."""
        ranks = self._state.ranks
        return tensors if ranks is None else ranks.counting(tensors)

    def _observe_parameters(self, kind: Kind, tensors: Indexed, *, scaled: bool = False) -> None:
        self._tensors.add_parameters(kind, tensors, self.parameters, scaled=scaled)

    def _read_update(self, optimizer: int) -> None:
        updates = self._updates.pop(optimizer, None)
        if updates is not None:
            updates.compare()
            self._detail.updates.append(updates)

    # --- end --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Observe nothing any more, even where a graph holds a hook of ours."""
        if self.captured.passes == 0:
            # They were all training: loops that use ``autograd.grad`` have no others.
            self._tensors.all += self._probed
            self._probed = []
        self.over = True
        self._updates.clear()
        while self._handles:
            self._handles.pop().remove()

    def end(self) -> None:
        """Finish the measurements; nothing is added any more."""
        self.captured.wall_time = time.time()
        if self.full:
            self._log_adjoints()
            loads = self._loads.best().items()
            self._detail.expert_loads = {name: HostCopy(load) for name, load in loads}
            self._tensors.finish()

    def _log_adjoints(self) -> None:
        """Log the modules without gradients because they ran inside of a backward pass only."""
        outside = {hook.name for hook in self.ran if isinstance(hook, ForwardHook)}
        probed = {o.name.module_name for o in self._probed if isinstance(o.name, Output)}
        names = [name for name in self.order if name in probed - outside]
        if names:
            self.guard.failures.log_once(
                f"activation gradients of {called_all(names, _NAMES_IN_MESSAGE)} are not measured: "
                "these modules run inside of the backward pass, in separate passes that reach "
                "no parameter, as those of torchdiffeq.odeint_adjoint",
                kind="adjoint",
            )


class _GradHook(Inert):
    """Hook of a module's output, for its gradient.

    The user may keep the output for long, so the hook holds weak references only.
    """

    __slots__ = ("_hook", "_place", "_step")

    __torch_unserializable__ = True
    """Keeps PyTorch from warning that it does not save the hook along with the output."""

    def __init__(self, step: Step, hook: ForwardHook, place: int) -> None:
        self._step = weakref.ref(step)
        self._hook = weakref.ref(hook)
        self._place = place

    def __call__(self, grad: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        step, hook = self._step(), self._hook()
        if step is not None and hook is not None:
            step.on_output_grad(hook, self._place, grad)


def _is_discrete(tensor: Tensor) -> bool:
    """Whether the elements are indices, counts or masks, of which no statistics are taken."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def _rate(value: object) -> float | HostCopy:
    """Return a learning rate; NaN where the optimizer has none, or computes it itself."""
    if isinstance(value, Tensor):
        return HostCopy(value)
    return float(value) if isinstance(value, Real) else math.nan


def _random_states() -> dict[str, bytes]:
    """Return the states of torch's default generators: of the CPU and of each GPU in use.

    5 kB for the CPU and 16 bytes for a GPU, without waiting: its generator counts on the host.
    ``torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))`` restores one.
    """
    states = {"cpu": torch.get_rng_state()}
    # While a CUDA graph is recorded, its generator's state is not known.
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states |= {
            f"cuda:{index}": torch.cuda.get_rng_state(index)
            for index in range(torch.cuda.device_count())
        }
    return {device: state.numpy().tobytes() for device, state in states.items()}

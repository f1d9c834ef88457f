"""The step in progress: what the hooks call, in the order of time."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from telemetry.capture.captured import CapturedStep, Kind, Name, Observation, read_scaler
from telemetry.capture.hooks import ForwardHook, Inert, guarded
from telemetry.capture.nested import tensors_in
from telemetry.capture.parameters import (
    PLAIN,
    Indexed,
    Updates,
    described,
    local,
    take_norms,
)
from telemetry.capture.unseen import StepsUnseen
from telemetry.measure import Measurer, fingerprint, images
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
from telemetry.torch_private.compiler import backward_is_compiled, backwards_compiled
from telemetry.torch_private.host_copy import HostCopy

if TYPE_CHECKING:
    from telemetry.capture.capture import Capture

# Bounds of one step: after so many observations only the first calls of each tensor are measured,
# the others counted.
MANY_OBSERVATIONS = 8192
FEW_CALLS = 4

# Tensors of one step that have a fingerprint; the step may have very many micro-batches.
_FINGERPRINTS = 64

# So many outputs of compiled graphs, and of their gradients, are reduced by PyTorch, too: what is
# measured depends on the compiler.
CHECKS = 32

# Of how many powers there are sums: of four where the kurtosis is shown, elsewhere of two.
_POWERS: Mapping[Kind, int] = {"outputs": 4}

# Modules that a log line names.
_NAMED_AT_MOST = 8

# Stands for the optimizer in a loop that has none.
_BY_HAND = 0


class _Pass(NamedTuple):
    """What one run of the autograd engine brought; whose gradients it changed, by identity."""

    observations: list[Observation]
    accumulated: dict[int, Tensor]  # ``autograd.grad`` changes none


class Step:
    """One step of training, or a phase apart from it, from its begin to what it leaves behind.

    Methods without a guard are called by guarded ones. ``norms``: whether at least norms of
    gradients are taken; the other arguments are those of :class:`CapturedStep`.
    """

    def __init__(
        self, capture: Capture, number: int, full: bool = False, norms: bool = True, phase: str = ""
    ) -> None:
        self.guard = capture.guard
        self.number, self.full, self.norms = number, full, norms
        self.captured = CapturedStep(
            step=number, totals=capture.totals, failures=self.guard.failures, full=full, phase=phase
        )
        self.light = False  # read by a LightReader: then all else here stays empty
        self.begun = False  # the model is known to be as when the step began
        self.over = not full  # nothing is observed any more
        self.thread = capture.thread  # whose forward passes are observed
        self.ran: set[object] = set()  # hooks that were called outside of a backward pass
        self.order: dict[str, None] = {}  # watched modules in the order of their first call
        self.parameters: tuple[Parameter, ...] = ()  # what the indices of this step count
        self.unseen = StepsUnseen()
        self._capture = capture
        self._detail = self.captured.detail
        self._measurer = Measurer()
        self._seen: dict[tuple[Kind, Name], int] = {}
        self._measured = 0
        # Whether what the next watched module is given comes from outside; identities of the
        # tensors that the model was given in the pass in progress.
        self._awaits_input = True
        self._given: set[int] = set()
        self._convolution: ForwardHook | None = None  # that ran first
        self._unit_axes: dict[tuple[int, ...], int] = {}
        # The backward passes; there are several at a time if one starts another.
        self._running: dict[int, _Pass] = {}
        self._probed: list[Observation] = []
        self._handles: list[Any] = []
        self._left: dict[int, int] = {}  # versions of the parameters as the step before left them
        self._optimizers: set[int] = set()
        self._held: set[int] = set()  # indices of the parameters that they have
        self._moments: set[int] = set()
        self._updates: dict[int, Updates] = {}

    # --- begin ------------------------------------------------------------------------------------

    def begins(self, *, follows: bool) -> None:
        """Observe training from here on, in full; ``follows``: where a step has just ended."""
        capture = self._capture
        capture.table.refresh()
        found = capture.table.all()
        if follows:
            self._left = {
                i: p._version for i, p in found if p.requires_grad and not p.is_inference()
            }
        self._detail.random_states = _random_states()
        if capture.by_hand and capture.content.weights:
            # No optimizer will say when it is about to change them.
            self._updates[_BY_HAND] = Updates(self._counting(found))
        compiled = self._backward_is_compiled()
        if not compiled:
            self._handles += [
                parameter.register_post_accumulate_grad_hook(self.on_accumulated)
                for _, parameter in found
                if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf
            ]
        capture.output_grads = capture.content.activation_gradients and not compiled
        capture.observe(training=True)

    def _backward_is_compiled(self) -> bool:
        """Whether compiled autograd is on, or has been since training began; then says so, once."""
        capture = self._capture
        compiled = backward_is_compiled() or backwards_compiled() != capture.backwards_before
        if compiled:
            self.guard.failures.log_once(
                "activation gradients are not measured: compiled autograd is on, which does not "
                "work with hooks on them"
            )
        return compiled

    # --- forward passes ---------------------------------------------------------------------------

    def on_input(self, given: Any) -> None:
        """The model is called with ``given``."""
        self._awaits_input = True
        self._given.clear()
        tensors = tensors_in(given)
        sizes = [t.size(0) for t in tensors if t.dim() and not is_being_traced(t)]
        self._detail.examples += sizes[0] if sizes else 0
        self._observe_inputs("", tensors)

    def on_output(self, hook: ForwardHook, args: Any, output: Any) -> None:
        """A module was called with ``args`` and returned ``output``.

        A module's backward hook would replace its outputs and fail where they are changed in place
        afterwards. A hook on the output tensor itself does neither, and sees the gradient of the
        value that the module returned.
        """
        given = args if self._awaits_input else ()
        self._awaits_input = False
        if given:
            self._observe_inputs(hook.name, tensors_in(given))
        self.order.setdefault(hook.name)
        for place, tensor in enumerate(tensors_in(output)):
            if is_being_traced(tensor):
                self.guard.failures.log_once(
                    "passes in which the model is traced or transformed, or is on the meta "
                    "device, have no values to measure"
                )
                return
            self._observe_output(hook, tensor, place)
            # Without a grad_fn it is a leaf: a parameter would keep the hook beyond this step.
            if (
                tensor.grad_fn is not None
                and self._capture.output_grads
                and not self.captured.phase
            ):
                tensor.register_hook(_GradHook(self, hook, place))
        if given or hook.convolves:
            self._take_images(hook, given, output)

    def on_graph_output(self, hook: ForwardHook, tensor: Tensor, place: int) -> None:
        """A compiled graph shows one of the tensors that a module returned."""
        self._awaits_input = False
        self.order.setdefault(hook.name)
        observation = self._observe_output(hook, tensor, place)
        self._check(observation, tensor)
        if hook.convolves and place == 0:
            self._take_images(hook, (), tensor)

    def _observe_inputs(self, name: str, given: list[Tensor]) -> None:
        """Measure what comes from outside, each tensor once though it is handed on."""
        capture, captured = self._capture, self.captured
        ranks = capture.ranks
        taken = ranks is None or ranks.takes_inputs(captured.ranks, name, capture.model())
        if captured.phase or not capture.content.activations or not taken:
            return
        for tensor in given:
            if id(tensor) in self._given or is_being_traced(tensor):
                continue
            self._given.add(id(tensor))
            values = local(tensor.detach())
            if len(self._detail.fingerprints) < _FINGERPRINTS:
                self._detail.fingerprints += map(HostCopy, fingerprint(values))
            if not _is_discrete(tensor):
                self._observe("inputs", name, values, self._detail.observations)

    def _observe_output(self, hook: ForwardHook, tensor: Tensor, place: int) -> Observation | None:
        if not self._capture.content.activations or _is_discrete(tensor):
            return None
        output = Output(hook.name, place) if place else hook.output
        values = local(tensor)
        axis = self._unit_axis(hook, values)
        ranks, notes = self._capture.ranks, self.captured.ranks
        if ranks is not None and not ranks.takes_output(notes, output, tensor, axis):
            return None
        observations = self._detail.observations
        return self._observe("outputs", output, values, observations, unit_axis=axis)

    def _unit_axis(self, hook: ForwardHook, tensor: Tensor) -> int | None:
        """Axis that counts units or channels; that of the layer before where shapes agree."""
        dim = tensor.dim()
        if dim < 2 or tensor.is_nested:
            return None
        if hook.units == "unknown":
            return self._unit_axes.get(tuple(tensor.shape), 1 if dim > 3 else dim - 1)
        axis = 1 if hook.units == "first" else dim - 1
        self._unit_axes[tuple(tensor.shape)] = axis
        return axis

    def _observe(
        self,
        kind: Kind,
        name: Name,
        tensor: Tensor,
        into: list[Observation],
        *,
        unit_axis: int | None = None,
        scaled: bool = False,
    ) -> Observation | None:
        """Measure ``tensor`` as it is now; None if it is only counted, or cannot be measured."""
        key = kind, name
        seen = self._seen.get(key, 0)
        if self._measured >= MANY_OBSERVATIONS and seen >= FEW_CALLS:
            self._detail.counted[key] += 1
            return None
        measured = self._measurer.add(tensor, unit_axis=unit_axis, powers=_POWERS.get(kind, 2))
        if measured is None:
            self._log_unsupported(kind, name, tensor)
            return None
        self._seen[key] = seen + 1
        self._measured += 1
        observation = Observation(kind, name, measured, scaled)
        into.append(observation)
        return observation

    def _log_unsupported(self, kind: Kind, name: Name, tensor: Tensor) -> None:
        """Log, once for each kind of tensor, that it cannot be measured."""
        what = described(tensor)
        self.guard.failures.log_once(
            f"{kind} of {str(name) or 'the model'} are not measured: {what} is not supported",
            kind=what,
        )

    def _check(self, observation: Observation | None, tensor: Tensor) -> None:
        """Have PyTorch reduce what a compiled graph has shown, too; the record compares."""
        if observation is None or not tensor.numel():
            return
        left = self._capture.to_check
        if left[observation.kind] and tensor.dtype in (torch.float32, torch.bfloat16):
            left[observation.kind] -= 1
            extremes = torch.stack(torch.aminmax(tensor.detach())).to(torch.float64)
            norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
            self._detail.checks.append((observation, HostCopy(torch.cat([extremes, norm[None]]))))

    def _take_images(self, hook: ForwardHook, given: Any, output: Any) -> None:
        detail, name = self._detail, hook.name
        if hook.convolves:
            self._convolution = self._convolution or hook
        if self._capture.sample is not None and not self.captured.phase:
            return
        if name in self._capture.modules.pictured and name not in detail.feature_maps:
            sample = next(map(images.sample_feature_maps, tensors_in(output)), None)
            if sample is not None:
                detail.feature_maps[name] = HostCopy(sample)
        if given and self._capture.content.images and detail.input is None:
            sample = next(map(images.sample_inputs, tensors_in(given)), None)
            if sample is not None:
                detail.input = HostCopy(sample)

    # --- backward passes --------------------------------------------------------------------------

    @guarded("to observe the gradient of {1.called}")
    def on_output_grad(
        self, hook: ForwardHook, place: int, grad: Tensor | None, in_graph: bool = False
    ) -> None:
        """The gradient of an output that was returned in this step."""
        if self.over or grad is None:
            return  # a graph kept from an earlier step; an output that got no gradient
        running = self._current_pass()
        into = self._detail.observations if running is None else running.observations
        output = Output(hook.name, place) if place else hook.output
        ranks, notes = self._capture.ranks, self.captured.ranks
        if ranks is None or ranks.takes_output_grad(notes, output, grad):
            observed = self._observe("output_grads", output, local(grad), into, scaled=True)
            if in_graph:
                self._check(observed, grad)

    def on_accumulated(self, parameter: Tensor) -> None:
        """A gradient has accumulated, so this backward pass is one of training."""
        if not torch.compiler.is_compiling():
            self._on_accumulated(parameter)

    @guarded("to follow a backward pass", reads=False)
    def _on_accumulated(self, parameter: Tensor) -> None:
        running = None if self.over else self._current_pass()
        if running is not None:
            running.accumulated[id(parameter)] = parameter

    def _current_pass(self) -> _Pass | None:
        """The pass that this thread is in; None where passes cannot be followed to their end."""
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
        """A pass has ended: its gradients are reduced over ranks and not clipped yet."""
        ended = self._running.pop(task)
        captured, capture, observations = self.captured, self._capture, self._detail.observations
        if self.over or not capture.training:
            return  # its step is over, or only repeated
        if not ended.accumulated:
            if captured.passes == 0:
                self._probed += ended.observations
            return
        captured.passes += 1
        observations += ended.observations
        parameters = ended.accumulated.values()
        for group in take_norms(capture.table.grads_of(parameters)):
            nonfinite = group.nonfinite()
            if nonfinite is not None:
                captured.overflow_ends.append((HostCopy(nonfinite), len(observations)))
            for place, index in enumerate(group.indices):
                captured.before_clipping[index] = group, place
        message = self.unseen.after_pass(captured.passes, ended.accumulated)
        if message is not None:
            self.guard.failures.log_once(message)
            capture.observe(training=False)

    # --- optimizer steps --------------------------------------------------------------------------

    @guarded("to read the gradients")
    def before_step(self, optimizer: Optimizer) -> None:
        """Read what an optimizer is about to use and to change, at its first step in this one."""
        key, table = id(optimizer), self._capture.table
        if key in self._optimizers:
            return
        # Parameters may have been replaced. Those of a step are known by their indices.
        look = not self._optimizers and (self.full or table.lacks(optimizer))
        if look and table.refresh():
            self.captured.before_clipping.clear()
        self.parameters = self.parameters or table.parameters
        # Each counts once, though an optimizer may call another one that has it, too.
        parameters = [(i, p) for i, p in dict(table.of(optimizer)).items() if i not in self._held]
        if not parameters:
            return
        scaler = calling_scaler()
        if scaler is not None:
            self.captured.scaler = read_scaler(scaler, optimizer, self.number)
        # Of all optimizers, so that each keeps its place where one steps more rarely. Of one that
        # has stepped they stay as they were: a schedule may have changed them since.
        for known in self._capture.optimizers.met(optimizer):
            if id(known) not in self._optimizers:
                rates = [_rate(group.get("lr")) for group in known.param_groups]
                self.captured.learning_rates[id(known)] = rates
        left = self._left
        if left and all(i in left and p._version != left[i] for i, p in parameters):
            stepped = f"{type(optimizer).__name__}.step()"
            self.guard.failures.log_once(
                f"something else than {stepped} changes parameters between steps, such as a "
                f"wrapper that is no torch.optim.Optimizer, an average of weights, or clamping: "
                f"update ratios are those of {stepped} alone"
            )
        # A fused optimizer divides by this itself.
        self._read(key, parameters, scaled=getattr(optimizer, "grad_scale", None) is not None)
        if self.full:
            self._detail.groups[key] = table.groups_of(optimizer)
        if self.full and self._capture.content.weights:
            self._updates[key] = Updates(self._counting(parameters))

    @guarded("to measure the update")
    def after_step(self, optimizer: Optimizer) -> None:
        """Read what an optimizer's first step in this one has changed."""
        self._read_update(id(optimizer))
        if self.full and self._capture.content.weights:
            # Not by its brackets: the optimizer's state is a defaultdict.
            of = self._capture.table.of(optimizer)
            states = {i: optimizer.state.get(p, {}) for i, p in of if i not in self._moments}
            moments = [(i, s["exp_avg_sq"]) for i, s in states.items() if "exp_avg_sq" in s]
            self._moments.update(i for i, _ in moments)
            self._observe_parameters("second_moments", self._counting(moments))

    @guarded("to read the gradients")
    def step_by_hand(self) -> None:
        """Read everything after a step that no optimizer took."""
        table = self._capture.table
        if self.full and table.refresh():
            self.captured.before_clipping.clear()
        self.parameters = table.parameters
        self._read(_BY_HAND, table.all(), scaled=False)
        self._read_update(_BY_HAND)

    def _read(self, optimizer: int, parameters: Indexed, *, scaled: bool) -> None:
        """Norms of all gradients; on full steps the gradients and parameters themselves."""
        full, captured, capture = self.full, self.captured, self._capture
        table, ranks, content = capture.table, capture.ranks, capture.content
        first, every = not self._optimizers, table.all() if full else []
        self._optimizers.add(optimizer)
        self._held.update(i for i, _ in parameters)
        grads = [(i, grad) for i, p in parameters if (grad := p.grad) is not None]
        norms = take_norms(grads)
        captured.norms += [(group, scaled) for group in norms]
        captured.square += sum([group.known_square or 0.0 for group in norms])
        weights = [(i, p) for i, p in parameters if p.requires_grad]
        if first:  # none may hold those that are frozen
            weights += [(i, p) for i, p in every if not p.requires_grad]
        if ranks is not None:
            ranks.note_grads(captured.ranks, grads)
            if full and content.weights:
                ranks.note_parameters(captured.ranks, weights)
        # After the step all is NaN; only now does a broken parameter differ from a bad batch.
        look = full or not math.isfinite(captured.square)
        if look and not (full and content.weights):
            captured.parameter_norms += take_norms(parameters)
        model = capture.model()
        if look and model is not None and not captured.buffer_names:
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
        convolution = self._convolution if content.images else None
        if convolution is not None and not self._detail.filters:
            module = convolution.module()
            weight: Any = None if module is None else module.weight
            sample = None if weight is None else images.sample_filters(local(weight.detach()))
            if sample is not None:
                self._detail.filters[convolution.name] = HostCopy(sample)

    def _counting(self, tensors: Indexed) -> Indexed:
        """Those of the parameters that this rank measures."""
        ranks = self._capture.ranks
        return tensors if ranks is None else ranks.counting(tensors)

    def _observe_parameters(self, kind: Kind, tensors: Indexed, *, scaled: bool = False) -> None:
        values = [t if type(t) in PLAIN else local(t) for _, t in tensors]
        measured = self._measurer.add_all(values, powers=_POWERS.get(kind, 2))
        for (index, _), value, measurement in zip(tensors, values, measured, strict=True):
            name = self.parameters[index].name
            if measurement is not None:
                self._measured += 1
                self._detail.observations.append(Observation(kind, name, measurement, scaled))
                continue
            self._log_unsupported(kind, name, value)

    def _read_update(self, optimizer: int) -> None:
        """How far the parameters have moved, if that is waited for."""
        updates = self._updates.pop(optimizer, None)
        if updates is not None:
            updates.compare()
            self._detail.updates.append(updates)

    # --- end --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Observe nothing any more, even where a graph holds a hook of ours."""
        if self.captured.passes == 0:
            # They were all training: loops that use ``autograd.grad`` have no others.
            self._detail.observations += self._probed
            self._probed = []
        self.over = True
        self._updates.clear()
        while self._handles:
            self._handles.pop().remove()

    def _log_adjoints(self) -> None:
        """Log which modules have no gradients because they ran inside of a backward pass only."""
        outside = {hook.name for hook in self.ran if isinstance(hook, ForwardHook)}
        probed = {o.name.module_name for o in self._probed if isinstance(o.name, Output)}
        names = [name for name in self.order if name in probed - outside]
        if names:
            self.guard.failures.log_once(
                f"activation gradients of {called_all(names, _NAMED_AT_MOST)} are not measured: "
                "these modules run inside of the backward pass, in passes of their own that reach "
                "no parameter, as those of torchdiffeq.odeint_adjoint",
                kind="adjoint",
            )

    def ends(self) -> CapturedStep:
        """What it leaves behind; nothing is added any more."""
        if self.full:
            self._backward_is_compiled()
            self._log_adjoints()
        captured = self.captured
        captured.step, captured.wall_time = self.number, time.time()
        captured.layout = self._capture.modules.layout(self.order, self.parameters)
        if self.full:
            self._detail.measurements = self._measurer.finish()
        return captured


class _GradHook(Inert):
    """The hook of a module's output, for its gradient.

    The user may keep the output for long, so all that is kept with it are weak references.
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
    """Whether its elements are indices, counts or masks, which no layer's figures hold."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def _rate(value: object) -> float | HostCopy:
    """A learning rate; NaN where the optimizer has none, or works it out itself."""
    if isinstance(value, Tensor):
        return HostCopy(value)
    return float(value) if isinstance(value, Real) else math.nan


def _random_states() -> dict[str, bytes]:
    """States of torch's default generators: the CPU's and that of each GPU that is in use.

    5 kB for the CPU and 16 bytes for a GPU, which need not be waited for: its generator counts on
    the host. ``torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))`` puts
    one back.
    """
    states = {"cpu": torch.get_rng_state()}
    # While a CUDA graph is recorded, its generator's state is not known.
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states |= {
            f"cuda:{index}": torch.cuda.get_rng_state(index)
            for index in range(torch.cuda.device_count())
        }
    return {device: state.numpy().tobytes() for device, state in states.items()}

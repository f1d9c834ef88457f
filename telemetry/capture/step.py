"""The step in progress: gathers what hooks and optimizers report, in the order of time."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from telemetry.capture.captured_step import CapturedStep, read_scaler
from telemetry.capture.forward import ForwardPasses
from telemetry.capture.hooks import ForwardHook
from telemetry.capture.observations import Kind, Observation
from telemetry.capture.optimizers import Optimizers
from telemetry.capture.parameters import Indexed, Updates, take_norms
from telemetry.capture.state import State, Target, guarded
from telemetry.plain_text import called_all
from telemetry.records import Output, Parameter
from telemetry.selection import cleaned
from telemetry.torch_private import (
    NO_TASK,
    at_end_of_backward,
    backward_task,
    calling_scaler,
    undisturbed,
)
from telemetry.torch_private.host_copy import HostCopy

_NAMES_IN_MESSAGE = 8

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
        forward: Its forward passes.
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
        self.parameters: tuple[Parameter, ...] = ()
        self._target, self._state, self._content = target, state, target.content
        self._optimizers, self._observer = optimizers, observer
        self.forward = ForwardPasses(target, state, self.captured, self)
        self._detail = self.captured.detail
        self._tensors = self._detail.observations
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

    @undisturbed(always=True)
    def begin(self, *, follows: bool, by_hand: bool) -> bool:
        """Observe backward passes and parameters from here on; whether outputs' gradients, too.

        Args:
            follows: Whether another step has just ended.
            by_hand: Whether the loop has no optimizer, which would announce its step.
        """
        table, compiled = self._target.table, self._target.compiled_autograd.was_on()
        table.refresh()
        found = table.all()
        if follows:
            self._versions = {
                i: p._version for i, p in found if p.requires_grad and not p.is_inference()
            }
        self._detail.random_states = _random_states()
        if by_hand and self._content.weights:
            self._updates[_BY_HAND] = Updates(self._counting(found))
        if not compiled:  # compiled autograd does not call hooks on parameters
            self._handles += [
                parameter.register_post_accumulate_grad_hook(self.on_accumulated)
                for _, parameter in found
                if not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf
            ]
        return self._content.activation_gradients and not compiled

    # --- backward passes --------------------------------------------------------------------------

    @guarded("to observe the gradient of {1.called}")
    def on_output_grad(
        self, hook: ForwardHook, place: int, grad: Tensor | None, in_graph: bool = False
    ) -> None:
        """Receive the gradient of an output of this step."""
        if self.over or grad is None:
            return  # a graph kept from an earlier step; an output that got no gradient
        running = self._running.get(backward_task()) or self._begin_pass()
        into = self._tensors.all if running is None else running.observations
        output = Output(hook.name, place) if place else hook.output
        ranks, notes = self._state.ranks, self.captured.ranks
        if ranks is None or ranks.takes_output_grad(notes, output, grad):
            observed = self._tensors.add("output_grads", output, grad, into, scaled=True)
            if in_graph:
                self._tensors.check(observed, grad, self._target.totals.checks_left)

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
        ends = functools.partial(self.on_backward_end, task)
        if task == NO_TASK or not at_end_of_backward(ends, deferred=1):
            return None
        self._running[task] = _Pass([], {})
        return self._running[task]

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
        parameters = [(i, p) for i, p in self._counted(optimizer) if i not in self._held]
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

    def _counted(self, optimizer: Optimizer) -> Indexed:
        """Return the optimizer's parameters, each once, without those of the one that ends steps.

        Of two optimizers with the same parameters, the steps of the latter count.
        """
        table, ends = self._target.table, self._optimizers.ends_later(optimizer)
        others = {i for i, _ in table.of(ends)} if ends is not None else ()
        return [(i, p) for i, p in dict(table.of(optimizer)).items() if i not in others]

    @guarded("to measure the update")
    def after_step(self, optimizer: Optimizer) -> None:
        """Read parameters and second moments after the first step of an optimizer in this one."""
        self._read_update(id(optimizer))
        if self.full and self._content.weights:
            # Not by its brackets: the optimizer's state is a defaultdict.
            of = self._counted(optimizer)
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
            self.forward.take_filters()

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
            self._target.compiled_autograd.was_on()  # since it began; logged
            self._log_adjoints()
            loads = self.forward.loads.best().items()
            self._detail.expert_loads = {name: HostCopy(load) for name, load in loads}
            self._tensors.finish()

    def _log_adjoints(self) -> None:
        """Log the modules without gradients because they ran inside of a backward pass only."""
        if not self._probed:
            return
        outside = {hook.name for hook in self.ran if isinstance(hook, ForwardHook)}
        probed = {o.name.module_name for o in self._probed if isinstance(o.name, Output)}
        names = [name for name in self.forward.order if name in probed - outside]
        if names:
            self.guard.failures.log_once(
                f"activation gradients of {called_all(names, _NAMES_IN_MESSAGE)} are not measured: "
                "these modules run inside of the backward pass, in separate passes that reach "
                "no parameter, as those of torchdiffeq.odeint_adjoint",
                kind="adjoint",
            )


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

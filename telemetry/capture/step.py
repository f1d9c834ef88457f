"""The step in progress: gathers what hooks and optimizers report, in the order of time."""

from __future__ import annotations

import math
import time
from numbers import Real

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from telemetry.capture.backward import BackwardPasses
from telemetry.capture.forward import ForwardPasses
from telemetry.capture.hooks import ForwardHook
from telemetry.capture.observations import Kind
from telemetry.capture.optimizers import Turns
from telemetry.capture.parameters import Indexed, Updates, take_norms
from telemetry.capture.pending import PendingStep, begun
from telemetry.capture.scaler import read_scaler
from telemetry.capture.state import State, Target, guarded
from telemetry.records import Parameter
from telemetry.selection import cleaned
from telemetry.torch_private import calling_scaler, undisturbed
from telemetry.torch_private.host_copy import HostCopy

# Instead of an optimizer's identity, in a loop without optimizers.
_BY_HAND = 0


class Step:
    """One step of training, or a phase apart from it.

    Methods without a guard are called by guarded ones.

    Attributes:
        record: Its record, and the values gathered for it.
        unchanged: Whether the model is known to have the same modules as at the beginning.
        ran: Hooks that were called outside of a backward pass.
        backward, forward: Its passes.
        parameters: Descriptions of the parameters that have an index in this step.
    """

    def __init__(
        self,
        target: Target,
        state: State,
        turns: Turns,
        *,
        full: bool,
        phase: str = "",
    ) -> None:
        self.guard = target.guard
        self.record = begun(state.step, full=full, phase=phase)
        self.pending = PendingStep(
            record=self.record, totals=target.totals, failures=self.guard.failures
        )
        self.full = full
        self.unchanged = False
        self.ran: set[object] = set()
        self.parameters: tuple[Parameter, ...] = ()
        self._target, self._state, self._content = target, state, target.content
        self._turns = turns
        self.backward = BackwardPasses(target, state, self.pending, over=not full)
        self.forward = ForwardPasses(target, state, self.pending, self.backward)
        self._tensors = self.pending.observations
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
        parameters = table.all()
        if follows:
            self._versions = {
                i: p._version for i, p in parameters if p.requires_grad and not p.is_inference()
            }
        self.record.random_states = _random_states()
        if by_hand and self._content.weights:
            self._updates[_BY_HAND] = Updates(self._counting(parameters))
        if not compiled:  # compiled autograd does not call hooks on parameters
            self.backward.begin(parameters)
        return self._content.activation_gradients and not compiled

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
            self.pending.before_clipping.clear()
        self.parameters = self.parameters or table.parameters
        # Each counts once, though an optimizer may call another one that has it, too.
        parameters = [(i, p) for i, p in self._turns.counted(optimizer) if i not in self._held]
        if not parameters:
            return
        scaler = calling_scaler()
        if scaler is not None:
            self.pending.scaler = read_scaler(scaler, optimizer, self._state.step)
        # Of all optimizers, so that each keeps its place where one steps more rarely. The rates of
        # one that has stepped stay as they were: a schedule may have changed them since.
        for known in self._turns.met(optimizer):
            if id(known) not in self._stepped:
                rates = [_rate(group.get("lr")) for group in known.param_groups]
                self.pending.learning_rates[id(known)] = rates
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
            self.pending.groups[key] = table.groups_of(optimizer)
        if self.full and self._content.weights:
            self._updates[key] = Updates(self._counting(parameters))

    @guarded("to measure the update")
    def after_step(self, optimizer: Optimizer) -> None:
        """Read parameters and second moments after the first step of an optimizer in this one."""
        self._read_update(id(optimizer))
        if self.full and self._content.weights:
            # Not by its brackets: the optimizer's state is a defaultdict.
            of = self._turns.counted(optimizer)
            states = {i: optimizer.state.get(p, {}) for i, p in of if i not in self._moments}
            moments = [(i, s["exp_avg_sq"]) for i, s in states.items() if "exp_avg_sq" in s]
            self._moments.update(i for i, _ in moments)
            self._observe_parameters("second_moments", self._counting(moments))

    @guarded("to read the gradients")
    def step_by_hand(self) -> None:
        """Read gradients and parameters after a step without an optimizer."""
        table = self._target.table
        if self.full and table.refresh():
            self.pending.before_clipping.clear()
        self.parameters = table.parameters
        self._read(_BY_HAND, table.all(), scaled=False)
        self._read_update(_BY_HAND)

    def _read(self, optimizer: int, parameters: Indexed, *, scaled: bool) -> None:
        """Take norms of all gradients; on full steps measure gradients and parameters."""
        full, pending, ranks = self.full, self.pending, self._state.ranks
        table, content = self._target.table, self._content
        first, every = not self._stepped, table.all() if full else []
        self._stepped.add(optimizer)
        self._held |= {i for i, _ in parameters}
        grads = [(i, grad) for i, p in parameters if (grad := p.grad) is not None]
        norms = take_norms(grads)
        pending.norms += [(group, scaled) for group in norms]
        pending.square += sum([group.known_square or 0.0 for group in norms])
        weights = [(i, p) for i, p in parameters if p.requires_grad]
        if first:  # no optimizer may have the frozen ones
            weights += [(i, p) for i, p in every if not p.requires_grad]
        if ranks is not None:
            ranks.note_grads(pending.notes, grads)
            if full and content.weights:
                ranks.note_parameters(pending.notes, weights)
        # After the step all is NaN; only now does a broken parameter differ from a bad batch.
        check = full or not math.isfinite(pending.square)
        if check and not (full and content.weights):
            pending.parameter_norms += take_norms(parameters)
        model = self._target.model()
        if check and model is not None and not pending.buffer_names:
            buffers = cleaned(model.named_buffers())
            pending.buffer_names = tuple(buffers)
            pending.buffer_norms = take_norms(enumerate(buffers.values()))
        if not full:
            return
        record = self.record
        if first:
            count = len(self.parameters)
            record.trainable, record.reached, record.held = np.zeros((3, count), bool)
        trainable = [(i, p) for i, p in every if p.requires_grad]
        record.trainable[[i for i, _ in trainable]] = True
        record.reached[[i for i, p in trainable if p.grad is not None]] = True
        record.held[[i for i, _ in parameters]] = True
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
            self.pending.updates.append(updates)

    # --- end --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Observe nothing any more."""
        self.backward.stop()
        self._updates.clear()

    def end(self) -> None:
        """Finish the measurements; nothing is added any more."""
        self.record.wall_time = time.time()
        if self.full:
            self._target.compiled_autograd.was_on()  # since it began; logged
            outside = {hook.name for hook in self.ran if isinstance(hook, ForwardHook)}
            self.backward.log_adjoints(self.forward.order, outside)
            loads = self.forward.loads.best().items()
            for name, load in loads:
                self.pending.copies_of("expert_loads", name).append(HostCopy(load))
            self._tensors.finish()


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

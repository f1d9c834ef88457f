"""The step in progress: what hooks and optimizers read; the worker makes its record of it.

Copies from an accelerator may still be on their way; only the worker waits for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from numbers import Real

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from telemetry.capture.clock import Laps, usage_of
from telemetry.capture.context import Context, guarded
from telemetry.capture.hooks import ForwardHook
from telemetry.capture.observations import Kind, Observations
from telemetry.capture.parameters import (
    OVERFLOW,
    Indexed,
    Norms,
    Updates,
    norms_at_once,
    take_norms,
    unscales_itself,
)
from telemetry.capture.passes import BackwardPasses, ForwardPasses
from telemetry.capture.scaler import ScalerReading, read_scaler
from telemetry.ranks.topology import RankNotes
from telemetry.records import Layout, Parameter, StepRecord
from telemetry.records.moments import nonfinite_of
from telemetry.records.step import NO_LAYOUT, RUNNING_STATISTICS
from telemetry.records.tensor import Tensors
from telemetry.selection import cleaned
from telemetry.torch_private import calling_scaler, undisturbed
from telemetry.torch_private.host_copy import HostCopy

_STEP_BYTES = 1024  # of the objects of a step
_FULL_STEP_BYTES = 5120  # of the other ones of a full step
_NORM_BYTES = 16  # of a norm and the index of its parameter

_SCALER_CHECK_STEPS = 8  # the call stack is searched for a ``GradScaler`` once in so many steps


class Step:
    """Gradient norms and learning rates of one training step.

    Hooks on the training thread fill it, then the worker calls :meth:`resolve`. Parameters are
    given by their indices. Methods without a guard are called by guarded ones.

    Attributes:
        step: Its number.
        phase: Name of a phase apart from training; empty for a training step.
        parameters: Descriptions of the parameters that have an index in this step.
        held: Indices of the parameters that its optimizers have.
        laps: Times of this step, and of steps before it that had no record.
        notes: Relation of the tensors to those of all ranks together.
    """

    full = False

    def __init__(self, context: Context) -> None:
        self.guard = context.guard
        self.step, self.phase = context.step, ""
        self.wall_time, self.eval_mode = 0.0, False
        self.layout: Layout = NO_LAYOUT
        self.parameters: tuple[Parameter, ...] = ()
        self.held: frozenset[int] = frozenset()
        self.laps: Laps | None = None
        self.notes = RankNotes()
        self._context = context
        self._stepped: set[int] = set()  # identities of optimizers
        # Norms that each optimizer used at its first step, and whether they have a scaler's factor
        # that the optimizer takes off.
        self._norms: list[tuple[Norms, bool]] = []
        self._square = 0.0  # of the norm of all gradients whose norms are known without waiting
        # For every optimizer known by then, the rate of each parameter group.
        self._rates: dict[int, Sequence[float | HostCopy]] = {}
        self._scaler: ScalerReading | None = None
        self._of_parameters: list[Norms] = []  # largest magnitudes, and those of buffers
        self._of_buffers: list[Norms] = []
        self._buffer_names: tuple[str, ...] = ()

    # --- on the training thread -------------------------------------------------------------------

    @guarded("to read the gradients", reads=False)
    def before_step(self, optimizer: Optimizer) -> None:
        """Read gradients and parameters at the first step of an optimizer in this one."""
        if id(optimizer) not in self._stepped and not self._read_at_once(optimizer):
            self._read_in_turn(optimizer)

    def _read_at_once(self, optimizer: Optimizer) -> bool:
        """Read the gradients of the only optimizer by one call of C; whether that is possible."""
        context, table = self._context, self._context.table
        if self.full or table.device.type != "cpu" or not self._context.turns.is_only(optimizer):
            return False
        # The search takes about the time of reading gradients. A scaler that is missed leaves them
        # unscaled, unless the optimizer is to divide by its factor.
        is_checked = self.step % _SCALER_CHECK_STEPS == 0
        if context.scales_loss or (is_checked and calling_scaler() is not None):
            return False
        held = table.held_by(optimizer)
        if (read := norms_at_once(optimizer, held)) is None:
            return False
        self._rates[id(optimizer)], norms = read
        self._norms.append((norms, False))
        self._stepped.add(id(optimizer))
        self.held = held.indices
        return True

    @undisturbed()
    def _read_in_turn(self, optimizer: Optimizer) -> None:
        table = self._context.table
        # Parameters may have been replaced. Those of a step are known by their indices.
        if not self._stepped:
            self._refresh(optimizer)
        self.parameters = self.parameters or table.parameters
        # Each counts once, though an optimizer may call another one that has it, too.
        parameters = [
            (i, p) for i, p in self._context.turns.counted(optimizer) if i not in self.held
        ]
        if not parameters:
            return
        if (scaler := calling_scaler()) is not None:
            self._context.scales_loss = True
            self._scaler = read_scaler(scaler, optimizer, self.step)
        # Of all optimizers, so that each keeps its place where one steps more rarely. The rates of
        # one that has stepped stay as they were: a schedule may have changed them since.
        for other in self._context.turns.met(optimizer):
            if id(other) not in self._stepped:
                self._rates[id(other)] = [_rate(group.get("lr")) for group in other.param_groups]
        self._read(optimizer, parameters)

    def after_step(self, optimizer: Optimizer) -> None:
        """Read what an optimizer has changed."""

    @guarded("to read the gradients")
    def step_by_hand(self) -> None:
        """Read gradients and parameters after a step without an optimizer."""
        self._refresh(None)
        self.parameters = self._context.table.parameters
        self._read(None, self._context.table.all())

    def _refresh(self, optimizer: Optimizer | None) -> None:
        """Read the model's parameters again: in a full step, or if the optimizer lacks some."""
        table = self._context.table
        if optimizer is not None:
            held = table.held_by(optimizer).indices
            if len(table.of(optimizer)) < len(held):
                table.refresh()

    def _read(self, optimizer: Optimizer | None, parameters: Indexed) -> None:
        """Take norms of all gradients; of parameters, too, if a gradient is not finite."""
        self._stepped.add(id(optimizer))
        self.held = self.held.union([i for i, _ in parameters])
        grads = [(i, grad) for i, p in parameters if (grad := p.grad) is not None]
        norms, scaled = take_norms(grads), unscales_itself(optimizer)
        self._norms += [(group, scaled) for group in norms]
        self._square += sum([group.square for group in norms])
        if (ranks := self._context.ranks) is not None:
            ranks.note_grads(self.notes, grads)
        if self.full or not math.isfinite(self._square):
            self._check(parameters)
        self._measure(optimizer, parameters, grads, scaled=scaled)

    def _measure(
        self, optimizer: Optimizer | None, parameters: Indexed, grads: Indexed, *, scaled: bool
    ) -> None:
        """Measure gradients and parameters, in a full step."""

    def _check(self, parameters: Indexed) -> None:
        """Find NaN and infinity: only before the step, a broken parameter is no bad batch."""
        self._of_parameters += take_norms(parameters, math.inf)
        model = self._context.model()
        if model is not None and not self._buffer_names:
            buffers = cleaned(model.named_buffers())
            self._buffer_names = tuple(buffers)
            self._of_buffers = take_norms(enumerate(buffers.values()), math.inf)

    def stop(self) -> None:
        """Observe nothing any more."""

    def end(self) -> None:
        """Finish the measurements; nothing is added any more."""
        self.wall_time = time.time()

    # --- for the queue ----------------------------------------------------------------------------

    @property
    def is_urgent(self) -> bool:
        """Whether the step is full, or a norm is not finite."""
        return self.full or not math.isfinite(self._square)

    @property
    def nbytes(self) -> int:
        """Host memory held until :meth:`resolve`, about."""
        return _STEP_BYTES + sum([len(norms.indices) for norms, _ in self._norms]) * _NORM_BYTES

    def without_tensors(self) -> Step:
        """Return the step with its norms alone, to save memory."""
        step = Step(self._context)
        vars(step).update({name: vars(self)[name] for name in vars(step)})
        return step

    # --- on the worker ----------------------------------------------------------------------------

    def resolve(self) -> StepRecord:
        """Return the record; waits for an accelerator. Called once per step, in their order."""
        record = self._make_record()
        self._count_skipped(record, overflown_passes=0)
        return record

    @property
    def _factor(self) -> float:
        """Factor of a ``GradScaler`` on the gradients."""
        factor = self._scaler.factor if self._scaler is not None else 1.0
        return factor if factor > 0 and math.isfinite(factor) else 1.0

    def _make_record(self) -> StepRecord:
        norms = np.full(len(self.layout.parameters), -1.0)
        for group, scaled in self._norms:
            values = group.read()
            norms[np.asarray(group.indices)] = self._as_used(values) if scaled else values
        names = [parameter.name for parameter in self.layout.parameters]
        rates = [rate for rates in self._rates.values() for rate in rates]
        usage, tokens = usage_of(self.laps)
        return StepRecord(
            step=self.step,
            wall_time=self.wall_time,
            layout=self.layout,
            phase=self.phase,
            grad_norms=np.maximum(norms, 0.0),
            grad_present=~(norms < 0),
            grad_finite=np.isfinite(norms),
            learning_rates=tuple(
                [float(r.wait() if isinstance(r, HostCopy) else r) for r in rates]
            ),
            eval_mode=self.eval_mode,
            usage=usage,
            tokens=tokens,
            nonfinite_parameters=tuple([names[i] for i, _ in _nonfinite(self._of_parameters)]),
            nan_buffers=tuple(self._nan_buffers()),
        )

    def _as_used(self, scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        """Divide norms by a scaler's factor, as a fused optimizer divides the gradients.

        Norms that have overflowed remain so. If the optimizer skips the step, they are infinite.
        """
        is_skipped = self._scaler is not None and self._scaler.skipped
        beyond = math.inf if is_skipped else OVERFLOW
        return np.where(scaled == OVERFLOW, beyond, scaled / self._factor)

    def _nan_buffers(self) -> Iterator[str]:
        for index, norm in _nonfinite(self._of_buffers):
            name = self._buffer_names[index]
            if math.isnan(norm) or name.endswith(RUNNING_STATISTICS):
                yield name

    def _count_skipped(self, record: StepRecord, *, overflown_passes: int) -> None:
        """Fill in the steps that a ``GradScaler`` has skipped."""
        if (scaler := self._scaler) is not None:
            skipped_steps = self._context.skipped_steps
            record.loss_scale, record.skipped = scaler.factor, scaler.skipped
            record.skipped_steps = skipped_steps.after(scaler, overflown_passes=overflown_passes)


class FullStep(Step):
    """One training step, or a phase apart from it, with its tensors.

    Attributes:
        backward, forward: Its passes.
        ran: Hooks that were called outside of a backward pass.
        elsewhere: Whether one was called on another thread than that of the steps.
        unchanged: Whether the model is known to have the same modules as at the beginning.
    """

    full = True

    def __init__(self, context: Context, phase: str = "") -> None:
        super().__init__(context)
        self.phase = phase
        self.ran: set[object] = set()
        self.elsewhere = self.unchanged = False
        self._observations = Observations(self.guard.failures)
        self.backward = BackwardPasses(context, self._observations, self.notes)
        self.forward = ForwardPasses(
            context, self._observations, self.notes, None if phase else self.backward
        )
        self._at_begin: tuple[Parameter, ...] = ()  # parameters of the model
        self._versions: dict[int, int] = {}  # of the parameters, after the step before
        self._random_states: dict[str, bytes] = {}
        # Flags of the parameters: trainable, reached by a backward pass, held by an optimizer.
        self._flags: NDArray[np.bool_] = np.zeros((3, 0), bool)
        self._groups: dict[int, Mapping[int, int]] = {}  # of parameters, as in ``_rates``
        self._moments: set[int] = set()
        self._running: dict[int, Updates] = {}  # of optimizers that have begun to step
        self._updates: list[Updates] = []

    @undisturbed(always=True)
    def begin(self, *, follows: bool, by_hand: bool) -> bool:
        """Observe backward passes and parameters from here on; whether outputs' gradients, too.

        Args:
            follows: Whether another step has just ended.
            by_hand: Whether the loop has no optimizer, which would announce its step.
        """
        context, compiled = self._context, self._context.compiled_autograd.was_on()
        context.table.refresh()
        self._at_begin = context.table.parameters
        parameters = context.table.all()
        if follows:
            self._versions = {
                i: p._version for i, p in parameters if p.requires_grad and not p.is_inference()
            }
        self._random_states = _random_states()
        if by_hand and context.content.weights:
            self._running[id(None)] = Updates(self._counting(parameters))
        if not compiled:  # compiled autograd does not call hooks on parameters
            self.backward.begin(parameters)
        return context.content.activation_gradients and not compiled

    @guarded("to measure the update")
    def after_step(self, optimizer: Optimizer) -> None:
        """Read parameters and second moments after the first step of an optimizer in this one."""
        self._read_update(optimizer)
        if self._context.content.weights:
            # Not by its brackets: the optimizer's state is a defaultdict.
            of = self._context.turns.counted(optimizer)
            states = {i: optimizer.state.get(p, {}) for i, p in of if i not in self._moments}
            moments = [(i, s["exp_avg_sq"]) for i, s in states.items() if "exp_avg_sq" in s]
            self._moments.update(i for i, _ in moments)
            self._observe("second_moments", moments)

    def _refresh(self, optimizer: Optimizer | None) -> None:
        table = self._context.table
        table.refresh()
        if table.parameters is not self._at_begin:
            self.backward.before_clipping.clear()
            self.backward.left.clear()
            self.backward.cleared.clear()

    def _measure(
        self, optimizer: Optimizer | None, parameters: Indexed, grads: Indexed, *, scaled: bool
    ) -> None:
        context, content = self._context, self._context.content
        if optimizer is not None:
            self._log_changes(optimizer, parameters)
        every = context.table.all()
        weights = [(i, p) for i, p in parameters if p.requires_grad]
        if not self._flags.size:  # no optimizer may have the frozen ones
            weights += [(i, p) for i, p in every if not p.requires_grad]
            self._flags = np.zeros((3, len(self.parameters)), bool)
        if content.weights and context.ranks is not None:
            context.ranks.note_parameters(self.notes, weights)
        trainable, reached, held = self._flags
        trainable[[i for i, p in every if p.requires_grad]] = True
        reached[[i for i, p in every if p.requires_grad and p.grad is not None]] = True
        held[[i for i, _ in parameters]] = True
        if content.gradients:
            self._observe("grads", grads, scaled=scaled)
        if content.weights:
            self._observe("weights", weights)
        if content.images:
            self.forward.take_filters()
        if optimizer is None:
            self._read_update(None)
            return
        self._groups[id(optimizer)] = context.table.groups_of(optimizer)
        if content.weights:
            self._running[id(optimizer)] = Updates(self._counting(parameters))

    def _log_changes(self, optimizer: Optimizer, parameters: Indexed) -> None:
        """Log once that something else than the optimizer changes parameters."""
        versions, name = self._versions, type(optimizer).__name__
        if versions and all(i in versions and p._version != versions[i] for i, p in parameters):
            self.guard.failures.log_once(
                f"parameters change between steps of {name}, too: by a wrapper that is no "
                "torch.optim.Optimizer, an average of weights, or clamping. Update ratios are "
                f"those of {name}.step() alone"
            )

    def _check(self, parameters: Indexed) -> None:
        # Measured parameters show it themselves.
        super()._check([] if self._context.content.weights else parameters)

    def _counting(self, tensors: Indexed) -> Indexed:
        """Select the parameters that this rank measures."""
        ranks = self._context.ranks
        return tensors if ranks is None else ranks.counting(tensors)

    def _observe(self, kind: Kind, tensors: Indexed, *, scaled: bool = False) -> None:
        counting = self._counting(tensors)
        self._observations.add_parameters(kind, counting, self.parameters, scaled=scaled)

    def _read_update(self, optimizer: Optimizer | None) -> None:
        if (updates := self._running.pop(id(optimizer), None)) is not None:
            updates.compare()
            self._updates.append(updates)

    def stop(self) -> None:
        """Observe nothing any more."""
        self.backward.stop()
        self._running.clear()

    @undisturbed(always=True)
    def end(self) -> None:
        """Finish the measurements; nothing is added any more."""
        super().end()
        self._context.compiled_autograd.was_on()  # since it began; logged
        outside = {hook.name for hook in self.ran if isinstance(hook, ForwardHook)}
        self.backward.log_adjoints(self.forward.order, outside)
        for name, loads in self.forward.loads.items():
            if loads:
                self._observations.copies("expert_loads", name).append(HostCopy(loads[min(loads)]))
        self._observations.finish()

    def with_gradients(self) -> set[str]:
        """Return the names of the parameters whose gradients optimizers used."""
        return {self.parameters[i].name for norms, _ in self._norms for i in norms.indices}

    @property
    def nbytes(self) -> int:
        """Host memory held until :meth:`resolve`, about."""
        return super().nbytes + _FULL_STEP_BYTES + self._observations.nbytes

    # --- on the worker ----------------------------------------------------------------------------

    def resolve(self) -> StepRecord:
        """Return the record; waits for an accelerator. Called once per step, in their order."""
        record = self._make_record()
        names = [parameter.name for parameter in self.layout.parameters]
        record.full, record.examples = True, self.forward.examples
        record.random_states = self._random_states
        if self._flags.size:
            record.trainable, record.reached, record.held = self._flags
            record.not_zeroed = self._not_zeroed()
        record.groups = self._group_of_each(len(names))
        self._fill_before_clipping(record)
        skipped = self._observations_of_skipped_steps(record)
        self._count_skipped(record, overflown_passes=self.backward.passes - 1 if skipped else 0)
        for kind, tensors in self._observations.tensors(first=skipped, factor=self._factor).items():
            setattr(record, kind, tensors)
        _correct_overflow(record, names)
        of_weights = compress(record.weights, nonfinite_of(Tensors.of(record.weights).rows))
        broken = {*record.nonfinite_parameters, *of_weights}
        record.nonfinite_parameters = tuple([name for name in names if name in broken])
        self.notes.moved = [one for update in self._updates for one in update.read()]
        record.update_ratios = {names[index]: ratio for index, _, _, ratio in self.notes.moved}
        for name, value in self._observations.copied().items():
            setattr(record, name, value)
        return record

    def _not_zeroed(self) -> NDArray[np.bool_]:
        """Mark parameters whose gradient was added to an earlier one by all passes."""
        left = np.zeros(len(self.parameters), bool)
        reached = self.backward.before_clipping  # ``autograd.grad`` adds to none
        left[[i for group in self.backward.left for i in group.indices if i in reached]] = True
        left[list(self.backward.cleared)] = False
        for group in self.backward.left:
            left[np.asarray(group.indices)[group.read() == 0]] = False
        return left

    def _group_of_each(self, count: int) -> NDArray[np.int64]:
        """Return the index of each parameter's learning rate; -1: unknown."""
        groups, before = np.full(count, -1), 0
        for optimizer, rates in self._rates.items():
            places = self._groups.get(optimizer, {})
            groups[list(places)] = before + np.array(list(places.values()), np.int64)
            before += len(rates)
        return groups

    def _fill_before_clipping(self, record: StepRecord) -> None:
        """Fill in the norms of used gradients, or else of all, at the end of the last pass."""
        passed, ranks = self.backward.before_clipping, self._context.ranks
        # The schedule of a pipeline divides gradients by the number of micro-batches later.
        if not passed or (ranks is not None and ranks.is_in_pipeline):
            return
        # One that no pass has reached has its norm as used.
        before, none = record.grad_norms.copy(), not record.grad_present.any()
        norms = {group: group.read() for group, _ in passed.values()}
        for index, (group, place) in passed.items():
            if none or record.grad_present[index]:
                before[index] = norms[group][place] / self._factor
        record.grad_norms_before_clipping = before

    def _observations_of_skipped_steps(self, record: StepRecord) -> int:
        """Return how many of the first observations belong to steps that a scaler skipped."""
        if self._scaler is None or not (record.grad_norms < OVERFLOW).all():
            return 0
        # A backward pass with a gradient that is not finite ended in a skipped step.
        return max((e.observations for e in self.backward.ends if e.is_overflown), default=0)


def _nonfinite(norms: Sequence[Norms]) -> list[tuple[int, float]]:
    """Return index and norm of each that is NaN or infinite."""
    return [
        (int(group.indices[place]), float(values[place]))
        for group in norms
        for values in [group.read()]
        for place in np.flatnonzero(~np.isfinite(values)).tolist()
    ]


def _correct_overflow(record: StepRecord, names: Sequence[str]) -> None:
    """Fill in the norms beyond float32's squares, of measured gradients."""
    for place in np.flatnonzero(record.grad_norms >= OVERFLOW).tolist():
        if (grad := record.grads.get(names[place])) is not None:
            is_finite = record.grad_finite[place] = not grad.sketch.nonfinite_count
            record.grad_norms[place] = grad.sketch.norm if is_finite else math.inf


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

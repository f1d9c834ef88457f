"""Values: what was measured at one training step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.sketch import Sketch


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of the model: its name in ``named_modules()`` and the name of its class."""

    name: str
    type_name: str


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: its name in ``named_parameters()``, the module that owns it, its shape."""

    name: str
    module_name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The model as the records see it. Records of one layout share one object.

    Attributes:
        modules: Modules that are watched or own a parameter, in forward order as far as known.
        parameters: In the order of ``named_parameters()``, which is that of
            :attr:`StepRecord.grad_norms`.
    """

    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Place of each module in the forward order, by name."""
        return {module.name: index for index, module in enumerate(self.modules)}

    @cached_property
    def owners(self) -> NDArray[np.intp]:
        """For each parameter the index of its module, shape ``[parameters]``."""
        positions = [self.position[parameter.module_name] for parameter in self.parameters]
        return np.array(positions, dtype=np.intp)

    @cached_property
    def owning(self) -> NDArray[np.intp]:
        """Indices of the modules that own parameters, ascending."""
        return np.unique(self.owners)

    @cached_property
    def depth_order(self) -> NDArray[np.intp]:
        """Indices into :attr:`parameters`, sorted by the forward position of their modules."""
        return np.argsort(self.owners, kind="stable")


class Output(NamedTuple):
    """Which of the tensors that a module returned.

    As a string it is ``rnn`` for the first and ``rnn[1]`` for the second. The string is for people,
    not for parsing, because a module may be called ``rnn[1]``, too.

    Attributes:
        module_name: As in ``named_modules()``.
        place: Index of the tensor among those returned, from 0.
    """

    module_name: str
    place: int = 0

    def __str__(self) -> str:
        return f"{self.module_name}[{self.place}]" if self.place else self.module_name


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorRecord:
    """What was in one tensor during one step, all its calls and micro-batches together.

    Attributes:
        sketch: Histogram and exact moments of all elements.
        calls: Number of tensors; of very many only the first few of each module are merged.
        unit_min: Smallest value of each unit or channel, float32, shape ``[units]``; None if the
            tensor has no units. NaN where the unit has one.
        unit_max: Largest value of each unit, likewise.
    """

    sketch: Sketch
    calls: int = 1
    unit_min: NDArray[np.float32] | None = None
    unit_max: NDArray[np.float32] | None = None

    @property
    def dead_fraction(self) -> float:
        """Share of units that were always zero; NaN if the tensor has no units."""
        if self.unit_min is None or self.unit_max is None or self.unit_min.size == 0:
            return math.nan
        dead = np.count_nonzero((self.unit_min == 0) & (self.unit_max == 0))
        return dead / self.unit_min.size

    def scaled(self, factor: float) -> TensorRecord:
        """As if all elements had been multiplied by a positive, finite factor."""
        return replace(
            self,
            sketch=self.sketch.scaled(factor),
            unit_min=None if self.unit_min is None else self.unit_min * np.float32(factor),
            unit_max=None if self.unit_max is None else self.unit_max * np.float32(factor),
        )

    @staticmethod
    def merge_all(records: Iterable[TensorRecord]) -> TensorRecord:
        """One record as if all tensors had been one; units only if every tensor has as many."""
        items = list(records)
        if len(items) == 1:
            return items[0]
        lows, highs = [r.unit_min for r in items], [r.unit_max for r in items]
        return TensorRecord(
            sketch=Sketch.merge_all(r.sketch for r in items),
            calls=sum(r.calls for r in items),
            unit_min=_merge_units(np.minimum, lows),
            unit_max=_merge_units(np.maximum, highs),
        )


def _merge_units(
    pick: np.ufunc, arrays: list[NDArray[np.float32] | None]
) -> NDArray[np.float32] | None:
    known = [array for array in arrays if array is not None]
    if len(known) < len(arrays) or len({array.shape for array in known}) != 1:
        return None
    merged: NDArray[np.float32] = pick.reduce(known)
    return merged


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The smallest and the largest of what the ranks have, and whose they are.

    Attributes:
        low: Smallest value other than NaN.
        low_rank: Which rank has it; of several the lowest.
        high: Largest value, likewise.
        high_rank: Which rank has that.
    """

    low: float
    low_rank: int
    high: float
    high_rank: int


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A parameter that should be equal on several ranks and is not.

    Attributes:
        parameter: Its name.
        rank: The lowest rank whose parameter differs from that of most.
        other: A rank that has what most have.
        declared: Whether a ``DTensor`` or DDP says that they are copies; else they may be anything
            of the same name.
    """

    parameter: str
    rank: int
    other: int
    declared: bool = True


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What only a record of several ranks shows.

    Attributes:
        size: How many ranks train together.
        held: Which of them this record holds.
        measured: Which of these measured the step in full.
        hosts: Names of the hosts of the ranks that are named here, as far as known.
        scalars: Of what the user logged.
        step_s: Of the seconds from the step before to this one; None if not known.
        activation_rms: Of the root mean square of what each module returned on each rank.
        activation_grad_rms: Of that of its gradient.
        diverged: Parameters that differ; at full steps.
        nonfinite: How many ranks hold NaN or infinity of their own: in their loss, their outputs or
            their parameters. What a collective has spread is not their own.
        first_nonfinite: The lowest of them, and where, in words.
        not_known: Tensors of which each rank holds an addend, so nothing is known of the sum.
    """

    size: int
    held: frozenset[int]
    measured: frozenset[int] = frozenset()
    hosts: Mapping[int, str] = field(default_factory=dict)
    scalars: Mapping[str, Spread] = field(default_factory=dict)
    step_s: Spread | None = None
    activation_rms: Mapping[Output, Spread] = field(default_factory=dict)
    activation_grad_rms: Mapping[Output, Spread] = field(default_factory=dict)
    diverged: tuple[Divergence, ...] = ()
    nonfinite: int = 0
    first_nonfinite: tuple[int, str] | None = None
    not_known: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose measurements are not in the record."""
        return tuple(sorted(set(range(self.size)) - self.held))

    def called(self, rank: int) -> str:
        """A rank with its host, for a message."""
        return f"rank {rank} ({self.hosts[rank]})" if rank in self.hosts else f"rank {rank}"


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRecord:
    """Everything that was measured at one optimizer step.

    Attributes:
        step: Optimizer steps completed before this one, from 0.
        wall_time: When the step ended, seconds since the epoch.
        layout: Names and order of what follows.
        grad_norms: L2 norm of each parameter's gradient as the optimizer used it, float64, shape
            ``[parameters]``; 0 where there was none.
        grad_present: Whether the parameter had a gradient, bool, shape ``[parameters]``.
        grad_finite: Whether all elements of the gradient were finite, bool, shape ``[parameters]``.
        phase: Name of a part of the run that is not training, such as ``validation``; then only
            activations and pictures were measured. Empty for a step of training.
        learning_rates: Of each parameter group; of several optimizers, in the order in which they
            first stepped.
        scalars: What the user logged for this step, by name.
        loss_scale: Factor of a ``GradScaler`` on the loss; all gradients here are without it.
        skipped_steps: Steps that a ``GradScaler`` has skipped so far.
        skipped: Whether this is one of them: a fused optimizer was called and did nothing, and the
            gradients are not finite by design.
        eval_mode: Whether the model was in evaluation mode when the optimizer stepped.
        full: Whether what follows was measured at this step.
        trainable: For each parameter whether it requires a gradient, bool, shape ``[parameters]``;
            like all that follows empty if the step is not full.
        reached: Whether it had one, even if no optimizer holds the parameter, likewise.
        fingerprints: A number for each tensor that the model was given, of any type and in their
            order; it is the same for the same values.
        left_out: Modules that were not measured, because ``max_overhead`` gave the turn to others.
        total_grad_norm_before_clipping: Norm of all gradients at the end of the backward pass.
        clipped_fraction: Share of all full steps so far at which clipping reduced it.
        nan_buffers: Buffers that hold a NaN, by their names in ``named_buffers()``.
        nonfinite_parameters: Parameters that held a NaN or Inf before the step. Also on steps that
            are not full, if a gradient is not finite and on the CPU.
        inputs: What the model was given, all its floating-point tensors together, by an empty name.
            If the first watched module was given something else, or the model itself was not
            called, also the input of that module, by its name.
        outputs: Every tensor that each watched module returned, in forward order.
        output_grads: Gradients with respect to those outputs.
        grads: Gradients by parameter name, accumulated and unscaled.
        weights: Parameters before the step, by parameter name.
        second_moments: Running means of squared gradients after the step, by parameter name:
            ``exp_avg_sq`` of Adam and of other optimizers that have it. Measured with the weights.
        update_ratios: ``||after - before|| / ||before||`` by parameter name.
        feature_maps: Pictures of convolutions' outputs, uint8 ``[height, width, 3]``, by module
            name.
        filters: Pictures of convolutions' weights, likewise.
        input: A picture of the batch that the model was given, likewise.
        random_states: States of torch's generators at the start of the step, by device, as
            ``torch.get_rng_state()`` gives them.
        ranks: What only several ranks show; None if this is the record of one.
    """

    step: int
    wall_time: float
    layout: Layout
    grad_norms: NDArray[np.float64]
    grad_present: NDArray[np.bool_]
    grad_finite: NDArray[np.bool_]
    phase: str = ""
    learning_rates: tuple[float, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None
    skipped_steps: int = 0
    skipped: bool = False
    eval_mode: bool = False
    full: bool = False
    trainable: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    reached: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    fingerprints: tuple[float, ...] = ()
    left_out: frozenset[str] = frozenset()
    total_grad_norm_before_clipping: float | None = None
    clipped_fraction: float | None = None
    nan_buffers: tuple[str, ...] = ()
    nonfinite_parameters: tuple[str, ...] = ()
    inputs: Mapping[str, TensorRecord] = field(default_factory=dict)
    outputs: Mapping[Output, TensorRecord] = field(default_factory=dict)
    output_grads: Mapping[Output, TensorRecord] = field(default_factory=dict)
    grads: Mapping[str, TensorRecord] = field(default_factory=dict)
    weights: Mapping[str, TensorRecord] = field(default_factory=dict)
    second_moments: Mapping[str, TensorRecord] = field(default_factory=dict)
    update_ratios: Mapping[str, float] = field(default_factory=dict)
    feature_maps: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    filters: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)
    input: NDArray[np.uint8] | None = None
    random_states: Mapping[str, bytes] = field(default_factory=dict)
    ranks: RankFacts | None = None

    @cached_property
    def activations(self) -> Mapping[str, TensorRecord]:
        """The first output of each watched module that ran, in forward order, by module name."""
        return _first_of_each(self.outputs)

    @cached_property
    def activation_grads(self) -> Mapping[str, TensorRecord]:
        """Gradients with respect to those first outputs."""
        return _first_of_each(self.output_grads)

    @cached_property
    def total_grad_norm(self) -> float:
        """L2 norm of all gradients together: the root of the sum of their squared norms."""
        return float(np.sqrt(np.square(self.grad_norms).sum()))

    @cached_property
    def all_grads_finite(self) -> bool:
        """Whether every element of every gradient was finite."""
        return bool(self.grad_finite.all())

    @cached_property
    def module_grad_norms(self) -> NDArray[np.float64]:
        """L2 norm of the gradients of each module's own parameters, shape ``[modules]``.

        0 where a module has none; NaN or infinite if one of them is.
        """
        by_module: NDArray[np.float64] = _by_module(self.grad_norms[np.newaxis], self.layout)[0]
        return by_module

    @property
    def loss(self) -> float | None:
        """What the user logged as ``loss``, if anything."""
        return self.scalars.get("loss")


@dataclass(frozen=True, kw_only=True, eq=False)
class LightSteps:
    """Successive steps of training that were not measured in full, of one layout.

    What each of them would be as a :class:`StepRecord`, as one array for all: what holds for many
    steps is seen by a few operations on these.

    Attributes:
        layout: As in the records, as is everything that is not explained here.
        steps: Numbers of the steps, ascending, ``n`` of them.
        wall_times: float64, shape ``[n]``.
        grad_norms: float64, shape ``[n, parameters]``.
        grad_present: bool, likewise.
        learning_rates: float64, shape ``[n, groups]``.
        scalars: What the user logged for each.
        ranks: As in each record; empty if these are the steps of one.
        loss_scale: The same at all of them, as are ``skipped`` and ``eval_mode``.
    """

    layout: Layout
    steps: Sequence[int]
    wall_times: NDArray[np.float64]
    grad_norms: NDArray[np.float64]
    grad_present: NDArray[np.bool_]
    learning_rates: NDArray[np.float64]
    scalars: Sequence[Mapping[str, float]]
    ranks: Sequence[RankFacts] = ()
    loss_scale: float | None = None
    skipped: bool = False
    eval_mode: bool = False

    @staticmethod
    def fit(first: StepRecord, other: StepRecord) -> bool:
        """Whether two records may be among the same steps."""
        return (
            first.layout is other.layout
            and len(first.learning_rates) == len(other.learning_rates)
            and first.loss_scale == other.loss_scale
            and first.skipped == other.skipped
            and first.eval_mode == other.eval_mode
        )

    @staticmethod
    def of(records: Sequence[StepRecord]) -> LightSteps:
        """Several records that :meth:`fit` each other, as one value."""
        return LightSteps(
            layout=records[0].layout,
            steps=[record.step for record in records],
            wall_times=np.array([record.wall_time for record in records]),
            grad_norms=np.stack([record.grad_norms for record in records]),
            grad_present=np.stack([record.grad_present for record in records]),
            learning_rates=np.array([record.learning_rates for record in records]),
            scalars=[record.scalars for record in records],
            ranks=[record.ranks for record in records if record.ranks is not None],
            loss_scale=records[0].loss_scale,
            skipped=records[0].skipped,
            eval_mode=records[0].eval_mode,
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, some: slice) -> LightSteps:
        """The same of some of the steps."""
        if range(len(self))[some] == range(len(self)):
            return self
        return replace(self, **{name: getattr(self, name)[some] for name in _OF_EACH_STEP})

    @cached_property
    def grad_finite(self) -> NDArray[np.bool_]:
        """Whether all elements of each gradient were finite, shape ``[n, parameters]``."""
        finite: NDArray[np.bool_] = np.isfinite(self.grad_norms)
        return finite

    @cached_property
    def total_grad_norms(self) -> NDArray[np.float64]:
        """L2 norm of all gradients together, shape ``[n]``."""
        totals: NDArray[np.float64] = np.sqrt(np.square(self.grad_norms).sum(axis=1))
        return totals

    @cached_property
    def module_grad_norms(self) -> NDArray[np.float64]:
        """As :attr:`StepRecord.module_grad_norms`, shape ``[n, modules]``."""
        return _by_module(self.grad_norms, self.layout)

    @cached_property
    def owner_grad_norms(self) -> NDArray[np.float64]:
        """Those of the modules that own parameters, shape ``[n, owners]``."""
        norms: NDArray[np.float64] = self.module_grad_norms[:, self.layout.owning]
        return norms

    @cached_property
    def highest_rates(self) -> Sequence[float]:
        """The highest learning rate of each step; 0 where there is none."""
        return [max(rates, default=0.0) for rates in self.learning_rates.tolist()]

    @cached_property
    def losses(self) -> NDArray[np.float64]:
        """What the user logged as ``loss``, shape ``[n]``; NaN where nothing was."""
        return np.array([scalars.get("loss", math.nan) for scalars in self.scalars])

    def record(self, index: int) -> StepRecord:
        """One of the steps as a record."""
        return StepRecord(
            step=self.steps[index],
            wall_time=float(self.wall_times[index]),
            layout=self.layout,
            grad_norms=self.grad_norms[index],
            grad_present=self.grad_present[index],
            grad_finite=self.grad_finite[index],
            learning_rates=tuple(self.learning_rates[index].tolist()),
            scalars=self.scalars[index],
            loss_scale=self.loss_scale,
            skipped=self.skipped,
            eval_mode=self.eval_mode,
            ranks=self.ranks[index] if self.ranks else None,
        )


_OF_EACH_STEP = (
    "steps",
    "wall_times",
    "grad_norms",
    "grad_present",
    "learning_rates",
    "scalars",
    "ranks",
)


def _by_module(norms: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
    """Norms of modules ``[n, modules]`` from those of their parameters ``[n, parameters]``."""
    shape = len(norms), len(layout.modules)
    largest = norms.max(axis=1, initial=0.0, keepdims=True)
    # Keeps 1e200 from overflowing.
    unit = np.where((largest > 0) & (largest < math.inf), largest, 1.0)
    with np.errstate(over="ignore"):  # where others are infinite
        squares = np.square(norms / unit)
    places = layout.owners + shape[1] * np.arange(shape[0])[:, np.newaxis]
    sums = np.bincount(places.ravel(), squares.ravel(), minlength=shape[0] * shape[1])
    by_module: NDArray[np.float64] = unit * np.sqrt(sums.reshape(shape))
    return by_module


def _first_of_each(outputs: Mapping[Output, TensorRecord]) -> Mapping[str, TensorRecord]:
    return {output.module_name: tensor for output, tensor in outputs.items() if not output.place}

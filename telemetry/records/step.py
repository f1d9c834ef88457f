"""Record of one training step, its layout (modules and parameters), and facts of its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Annotated, Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from telemetry.records.loss import loss_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import AttentionHeads, Output, TensorRecord, Tensors
from telemetry.tag_names import TIMES, numbered
from telemetry.threads import without_locks


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Smallest and largest value over ranks, without NaN, and the lowest rank with each."""

    low: float
    low_rank: int
    high: float
    high_rank: int


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A parameter that should be equal on several ranks and is not."""

    parameter: str
    rank: int  # lowest one whose parameter differs
    other: int  # a rank of the majority
    # Whether a ``DTensor`` or DDP declares them as copies; else only the name is equal.
    declared: bool = True


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts of a merged record of several ranks; each spread is over the ranks."""

    size: int  # number of ranks that train together
    held: frozenset[int]  # ranks that are merged in this record
    measured: frozenset[int] = frozenset()  # ranks for which it is a full step
    hosts: Mapping[int, str] = field(default_factory=dict)  # known names of the ranks' hosts
    scalars: Mapping[str, Spread] = field(default_factory=dict)  # logged by the user
    usage: Mapping[str, Spread] = field(default_factory=dict)  # as :attr:`StepRecord.usage`
    step_s: Spread | None = None  # seconds since the step before; None if unknown
    activation_rms: Mapping[Output, Spread] = field(default_factory=dict)
    diverged: tuple[Divergence, ...] = ()  # parameters that differ; at full steps
    # Largest group of ranks that received the same batch, though each should receive another one;
    # empty if unknown.
    same_batch: frozenset[int] = frozenset()
    # Number of ranks with NaN or infinity in their loss, outputs or parameters that no collective
    # has spread; the lowest of these ranks, and the location as a text.
    nonfinite: int = 0
    first_nonfinite: tuple[int, str] | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are not merged in this record."""
        return tuple(sorted(set(range(self.size)) - self.held))

    def called(self, rank: int) -> str:
        """Return a rank with its host, for a message."""
        return f"rank {rank} ({self.hosts[rank]})" if rank in self.hosts else f"rank {rank}"


@dataclass(frozen=True, kw_only=True)
class CodeLocation:
    """Line at which a class of the user defines its ``forward``.

    ``file`` is relative to the working directory where it is below that.
    """

    file: str
    line: int
    class_name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.class_name}.forward)"


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of the model: its name in ``named_modules()`` and the name of its class.

    Attributes:
        forward: File and line of its ``forward``, such as ``torch/nn/modules/linear.py:124``;
            relative below the working directory; empty if unknown.
        user_code: ``forward`` in the user's code, of this module or the nearest one around it.
        recorded: Whether it is watched, or one of its parameters is recorded.
    """

    name: str
    type_name: str
    forward: str = ""
    user_code: CodeLocation | None = None
    recorded: bool = True

    @property
    def code(self) -> str:
        """Source location in the user's code or another library; empty for PyTorch's own."""
        if self.user_code is not None:
            return str(self.user_code)
        return "" if self.forward.startswith("torch/") else self.forward


RUNNING_STATISTICS = ("running_mean", "running_var")
"""Last parts of the names of a batch norm's buffers."""


INPUT = "model input"
"""Name of the model's input among the modules that are written."""


def is_inside(name: str, module_name: str) -> bool:
    """Whether a name belongs to a module or to a part of it; all names belong to the root."""
    return not module_name or f"{name}.".startswith(f"{module_name}.")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: its name in ``named_parameters()``, its module, shape and dtype.

    ``recorded``: whether it is written; if not, only rules receive it.
    """

    name: str
    module_name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    recorded: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@without_locks
@dataclass(frozen=True, kw_only=True)
class Layout:
    """Modules and parameters of a model. Records of one layout share one object.

    Attributes:
        modules: Modules that are watched or own a parameter, in forward order if known.
        parameters: In the order of ``named_parameters()``, which is that of
            :attr:`StepRecord.grad_norms`.
    """

    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of each module in forward order, by name."""
        return {module.name: index for index, module in enumerate(self.modules)}

    @cached_property
    def input_count(self) -> int:
        """Number of the first modules that stand for the model's input, see :class:`InputRows`."""
        return sum([is_inside(module.name, INPUT) for module in self.modules])

    @cached_property
    def numbers(self) -> Sequence[int]:
        """Number of each module in tags: its place in forward order; 0 for the model's input."""
        return [max(0, index - self.input_count) for index in range(len(self.modules))]

    @cached_property
    def parameter_position(self) -> Mapping[str, int]:
        """Index of each parameter, by name."""
        return {parameter.name: index for index, parameter in enumerate(self.parameters)}

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Number of elements of each parameter, shape ``[parameters]``."""
        return np.array([parameter.size for parameter in self.parameters], np.int64)

    @cached_property
    def owners(self) -> NDArray[np.intp]:
        """Index of each parameter's module, shape ``[parameters]``."""
        positions = [self.position[parameter.module_name] for parameter in self.parameters]
        return np.array(positions, dtype=np.intp)

    @cached_property
    def owned(self) -> Sequence[Sequence[int]]:
        """Indices of each module's own parameters."""
        owned: list[list[int]] = [[] for _ in self.modules]
        for index, owner in enumerate(self.owners.tolist()):
            owned[owner].append(index)
        return owned

    @cached_property
    def owning(self) -> NDArray[np.intp]:
        """Indices of the modules that own parameters, ascending."""
        return np.unique(self.owners)

    @cached_property
    def owner_names(self) -> tuple[str, ...]:
        """Names of those modules."""
        return tuple([self.modules[index].name for index in self.owning.tolist()])

    @cached_property
    def matrices(self) -> Mapping[str, int]:
        """Index of each parameter with more than one dimension, by name."""
        return {p.name: i for i, p in enumerate(self.parameters) if len(p.shape) > 1}

    @cached_property
    def numbered_modules(self) -> Mapping[str, str]:
        """Name of each module in tags, by its name; the root has the name of its class."""
        pairs = zip(self.numbers, self.modules, strict=True)
        return {m.name: numbered(number, m.name or m.type_name) for number, m in pairs}

    @cached_property
    def numbered_parameters(self) -> Mapping[str, str]:
        """Name of each parameter in tags, by its name."""
        pairs = zip(self.owners.tolist(), self.parameters, strict=True)
        return {p.name: numbered(self.numbers[owner], p.name) for owner, p in pairs}

    @cached_property
    def depth_order(self) -> NDArray[np.intp]:
        """Indices into :attr:`parameters`, sorted by the forward position of their modules."""
        return np.argsort(self.owners, kind="stable")

    @cached_property
    def recorded(self) -> Layout:
        """Layout of the modules and parameters that are written; may be this object."""
        modules = tuple([module for module in self.modules if module.recorded])
        parameters = tuple([parameter for parameter in self.parameters if parameter.recorded])
        if (len(modules), len(parameters)) == (len(self.modules), len(self.parameters)):
            return self
        return Layout(modules=modules, parameters=parameters)


NO_LAYOUT = Layout(modules=(), parameters=())


# Arrays over parameters; the second ones are those that only full steps have.
OF_GRADIENTS = ("grad_norms", "grad_present", "grad_finite", "grad_norms_before_clipping")
OF_PARAMETERS = ("trainable", "reached", "held", "not_zeroed", "groups")


class By(Enum):
    """Reduction of the values that ranks have of a field."""

    # Of values by rank.
    RANK_0 = auto()
    LOWEST_RANK = auto()  # whose step ended
    LARGEST = auto()
    # Of mappings, for each key.
    MEAN = auto()
    # The same by names of modules, buffers or parameters.
    SUM = auto()
    HEADS = auto()
    UNION = auto()  # of names alone
    # Of the shards of each parameter; copies count once.
    NORM = auto()
    ANY = auto()
    ALL = auto()
    # Of the parts of each tensor; copies count once.
    TENSORS = auto()


_NO_NORMS, _NO_FLAGS, _NO_GROUPS = np.zeros(0), np.zeros(0, bool), np.zeros(0, np.int64)


@without_locks
@dataclass(kw_only=True, eq=False)
class StepRecord:
    """Measurements of one optimizer step.

    It is made when the step begins, filled by hooks and the worker, and changed no more when rules
    and writers receive it.

    Of several ranks, fields are merged :class:`By` their reduction; those without one are keys, or
    computed from the others.

    Attributes:
        step: Optimizer steps completed before this one, from 0.
        wall_time: End of the step, seconds since the epoch.
        layout: Names and order of modules and parameters.
        grad_norms: L2 norm of each parameter's gradient as the optimizer used it, float64, shape
            ``[parameters]``; 0 where there was none.
        grad_present: Whether the parameter had a gradient, bool, shape ``[parameters]``.
        grad_finite: Whether all elements of the gradient were finite, bool, shape ``[parameters]``.
        phase: Name of a part of the run that is not training, such as ``validation``, with
            activations and pictures only. Empty for a training step.
        learning_rates: Rate of each parameter group; optimizers in the order of their first steps.
        scalars: Scalars that the user logged for this step, by tag.
        loss_tag: Tag of the loss; None: see :func:`telemetry.records.loss.loss_among`.
        losses_between: Step and value of each logged loss of the steps without a record since the
            last one.
        loss_delay: Steps between a batch and its loss: 1 in a loop that logs the loss after the
            optimizer's step.
        usage: Seconds of the parts of a step, and bytes of memory, by tag: see
            :mod:`telemetry.tag_names`. Times are means over the measured steps since the last
            record. At full steps they include the time of measuring tensors. Of several ranks,
            means.
        tokens: Mean length of the model's input per step, if it is called with indices ``[batch,
            time]``, on one rank; else 0.
        loss_scale: Factor of a ``GradScaler`` on the loss; all gradients here are without it.
        skipped_steps: Number of steps that a ``GradScaler`` has skipped up to now.
        skipped: Whether this is one of them: a fused optimizer was called and did nothing, and the
            gradients are not finite by design.
        eval_mode: Whether the model was in evaluation mode when the optimizer stepped.
        full: Whether this is a full step. On other steps, all attributes below are empty.
        trainable: Whether each parameter requires a gradient, bool, shape ``[parameters]``.
        reached: Whether it had one, even without an optimizer, same dtype and shape.
        held: Whether an optimizer that stepped holds it, same dtype and shape.
        not_zeroed: Whether its gradient was added to one of an earlier step, same dtype and shape.
        groups: Index of each parameter's group in ``learning_rates``, int64, shape
            ``[parameters]``; -1 if unknown.
        fingerprints: Number that depends on the values, for each input tensor of the model.
        examples: Length of the model's first input tensor, summed over the forward passes of the
            step; 0 without one.
        expert_loads: Number of tokens of each expert, int64 ``[experts]``, by the module name of
            their router.
        grad_norms_before_clipping: ``grad_norms`` at the end of the backward pass; empty if
            unknown.
        clipped_fraction: Share of all full steps up to now at which clipping reduced it.
        nan_buffers: Buffers with a NaN, and running statistics with NaN or infinity, by their
            names in ``named_buffers()``. Also on other steps, if a gradient on the CPU is not
            finite.
        nonfinite_parameters: Parameters with NaN or infinity before the step. Also on other steps,
            if a gradient on the CPU is not finite.
        inputs: Floating-point input tensors of the model, merged, by an empty name. If the first
            watched module received another input, or the model was not called, also the input of
            that module, by its name.
        channels: Channels of the images among the model's inputs, if there are two to four, by
            their indices as texts. Each is a part of ``inputs[""]``.
        outputs: Tensors that each watched module returned, in forward order.
        output_grads: Gradients with respect to those outputs.
        grads: Gradients by parameter name, accumulated and unscaled.
        weights: Parameters before the step, by parameter name.
        second_moments: Running means of squared gradients after the step, by parameter name:
            ``exp_avg_sq`` of Adam and of other optimizers that have it. Measured with the weights.
        update_ratios: ``||after - before|| / ||before||`` by parameter name.
        attention: Heads of modules that call ``scaled_dot_product_attention``, by module name.
        feature_maps: Pictures of convolutions' outputs, uint8 ``[height, width, 3]``, by module
            name.
        filters: Pictures of convolutions' weights, same format.
        input: Picture of the model's input batch, same format.
        random_states: States of torch's generators at the start of the step, by device, as
            ``torch.get_rng_state()`` returns them.
        ranks: Facts of several ranks; None for a record of one rank.
    """

    step: int
    wall_time: Annotated[float, By.LARGEST] = 0.0
    layout: Layout = NO_LAYOUT
    grad_norms: Annotated[NDArray[np.float64], By.NORM] = field(default_factory=lambda: _NO_NORMS)
    grad_present: Annotated[NDArray[np.bool_], By.ANY] = field(default_factory=lambda: _NO_FLAGS)
    grad_finite: Annotated[NDArray[np.bool_], By.ALL] = field(default_factory=lambda: _NO_FLAGS)
    phase: str = ""
    learning_rates: Annotated[tuple[float, ...], By.LOWEST_RANK] = ()
    scalars: Annotated[Mapping[str, float], By.MEAN] = field(default_factory=dict)
    loss_tag: str | None = None
    losses_between: tuple[tuple[int, float], ...] = ()
    loss_delay: int = 0
    usage: Annotated[Mapping[str, float], By.MEAN] = field(default_factory=dict)
    tokens: float = 0.0
    loss_scale: Annotated[float | None, By.LOWEST_RANK] = None
    skipped_steps: Annotated[int, By.LOWEST_RANK] = 0
    skipped: Annotated[bool, By.LOWEST_RANK] = False
    eval_mode: Annotated[bool, By.LOWEST_RANK] = False
    full: Annotated[bool, By.LARGEST] = False
    trainable: Annotated[NDArray[np.bool_], By.RANK_0] = field(default_factory=lambda: _NO_FLAGS)
    reached: Annotated[NDArray[np.bool_], By.RANK_0] = field(default_factory=lambda: _NO_FLAGS)
    held: Annotated[NDArray[np.bool_], By.RANK_0] = field(default_factory=lambda: _NO_FLAGS)
    not_zeroed: Annotated[NDArray[np.bool_], By.RANK_0] = field(default_factory=lambda: _NO_FLAGS)
    groups: Annotated[NDArray[np.int64], By.RANK_0] = field(default_factory=lambda: _NO_GROUPS)
    fingerprints: Annotated[tuple[float, ...], By.RANK_0] = ()
    examples: int = 0
    expert_loads: Annotated[Mapping[str, NDArray[np.int64]], By.SUM] = field(default_factory=dict)
    grad_norms_before_clipping: Annotated[NDArray[np.float64], By.NORM] = field(
        default_factory=lambda: _NO_NORMS
    )
    clipped_fraction: float | None = None
    nan_buffers: Annotated[tuple[str, ...], By.UNION] = ()
    nonfinite_parameters: Annotated[tuple[str, ...], By.UNION] = ()
    inputs: Annotated[Mapping[str, TensorRecord], By.TENSORS] = field(default_factory=dict)
    channels: Annotated[Mapping[str, TensorRecord], By.TENSORS] = field(default_factory=dict)
    outputs: Annotated[Mapping[Output, TensorRecord], By.TENSORS] = field(default_factory=dict)
    output_grads: Annotated[Mapping[Output, TensorRecord], By.TENSORS] = field(default_factory=dict)
    grads: Annotated[Mapping[str, TensorRecord], By.TENSORS] = field(default_factory=dict)
    weights: Annotated[Mapping[str, TensorRecord], By.TENSORS] = field(default_factory=dict)
    second_moments: Annotated[Mapping[str, TensorRecord], By.TENSORS] = field(default_factory=dict)
    update_ratios: Mapping[str, float] = field(default_factory=dict)
    attention: Annotated[Mapping[str, AttentionHeads], By.HEADS] = field(default_factory=dict)
    feature_maps: Annotated[Mapping[str, NDArray[np.uint8]], By.RANK_0] = field(
        default_factory=dict
    )
    filters: Annotated[Mapping[str, NDArray[np.uint8]], By.RANK_0] = field(default_factory=dict)
    input: Annotated[NDArray[np.uint8] | None, By.RANK_0] = None
    random_states: Annotated[Mapping[str, bytes], By.RANK_0] = field(default_factory=dict)
    ranks: RankFacts | None = None

    def recorded(self) -> StepRecord:
        """Return the part that is written; totals are those of all parameters."""
        layout = self.layout.recorded
        if layout is self.layout:
            return self
        names, kept = layout.parameter_position, [p.recorded for p in self.layout.parameters]
        some: dict[str, Any] = {
            kind: Tensors.of(getattr(self, kind)).only(names)
            for kind in ("grads", "weights", "second_moments")
        }
        for name in (*OF_GRADIENTS, *OF_PARAMETERS):
            values = getattr(self, name)
            some[name] = values[kept] if values.size else values
        ratios = {name: ratio for name, ratio in self.update_ratios.items() if name in names}
        return self._copy(layout=layout, update_ratios=ratios, **some)

    def _copy(self, **fields: Any) -> StepRecord:
        """Return a copy with other fields and the same totals."""
        copy, totals = (
            replace(self, **fields),
            (self.total_grad_norm, self.total_grad_norm_before_clipping),
        )
        copy.total_grad_norm, copy.total_grad_norm_before_clipping = totals
        return copy

    @cached_property
    def activations(self) -> Tensors[str]:
        """First output of each watched module that ran, in forward order, by module name."""
        return _first_of_each(self.outputs)

    @cached_property
    def activation_grads(self) -> Tensors[str]:
        """Gradients with respect to those first outputs."""
        return _first_of_each(self.output_grads)

    @cached_property
    def total_grad_norm(self) -> float:
        """L2 norm of all gradients together: the root of the sum of their squared norms."""
        return math.sqrt(np.add.reduce(np.square(self.grad_norms)))

    @cached_property
    def total_grad_norm_before_clipping(self) -> float | None:
        """The same of :attr:`grad_norms_before_clipping`; None if they are unknown."""
        norms = self.grad_norms_before_clipping
        return float(np.linalg.norm(norms)) if norms.size else None

    @property
    def finite_loss(self) -> float | None:
        """:attr:`loss`; None if it is not finite, too."""
        return self.loss if math.isfinite(self.loss or 0.0) else None

    @cached_property
    def all_grads_finite(self) -> bool:
        """Whether every element of every gradient was finite."""
        return bool(self.grad_finite.all())

    @cached_property
    def module_grad_norms(self) -> NDArray[np.float64]:
        """L2 norm of the gradients of each module's own parameters, shape ``[modules]``.

        0 where a module has none; NaN or infinite if one of them is.
        """
        norms, layout = self.grad_norms, self.layout
        largest = float(norms[norms.argmax()]) if norms.size else 0.0
        unit = largest if 0 < largest < math.inf else 1.0  # keeps 1e200 from overflowing
        with np.errstate(over="ignore"):
            squares = np.square(norms / unit)
        sums = np.bincount(layout.owners, squares, minlength=len(layout.modules))
        by_module: NDArray[np.float64] = unit * np.sqrt(sums)
        return by_module

    @cached_property
    def owner_grad_norms(self) -> NDArray[np.float64]:
        """Gradient norms of the modules that own parameters, shape ``[owners]``."""
        norms: NDArray[np.float64] = self.module_grad_norms[self.layout.owning]
        return norms

    @cached_property
    def owner_grad_levels(self) -> NDArray[np.float64]:
        """log10 of :attr:`owner_grad_norms`; minus infinity without a gradient."""
        with np.errstate(divide="ignore"):
            return np.log10(self.owner_grad_norms)

    @property
    def parameter_rates(self) -> NDArray[np.float64]:
        """Learning rate of each parameter's group, shape ``[parameters]``; NaN without a group."""
        return np.array([*self.learning_rates, math.nan])[self.groups]  # of -1: the last

    @cached_property
    def bare_step_s(self) -> float:
        """Seconds of a step without the logger's own; 0 if unknown."""
        return sum([self.usage.get(tag, 0.0) for tag in TIMES])

    @cached_property
    def loss(self) -> float | None:
        """Loss among the scalars, if it was logged for this step."""
        return loss_of(self.scalars, self.loss_tag)


class InputRows:
    """Adds the model's input to written records as first modules, so that it is shown like a layer.

    Its name is :data:`INPUT`, which no attribute has, and ``model input.0`` that of its first
    channel. From the first record with an input on, all records have these modules. Rules receive
    records without them.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._layouts: tuple[Layout, Layout] | None = None  # the latest one without and with them

    def added(self, record: StepRecord) -> StepRecord:
        """Return the record with the input as the outputs of its first modules."""
        given = record.inputs.get("")
        channels = {f"{INPUT}.{index}": of for index, of in record.channels.items()}
        tensors = {} if given is None else {INPUT: given, **channels}
        names = (*dict.fromkeys([*self._names, *tensors]),)
        if not names:
            return record
        if self._layouts is None or self._layouts[0] is not record.layout or names != self._names:
            modules = tuple([Module(name=name, type_name="Input") for name in names])
            layout = replace(record.layout, modules=modules + record.layout.modules)
            self._names, self._layouts = names, (record.layout, layout)
        outputs = record.outputs
        if tensors:
            keys = [*map(Output, tensors), *outputs]
            rows = [Tensors.of(tensors).rows, Tensors.of(outputs).rows]
            outputs = Tensors(keys, Rows.concatenate(rows))
        return record._copy(layout=self._layouts[1], outputs=outputs)


def _reductions() -> Mapping[str, By]:
    kinds = get_type_hints(StepRecord, include_extras=True)
    of_fields = {name: getattr(kind, "__metadata__", (None,))[0] for name, kind in kinds.items()}
    return {name: by for name, by in of_fields.items() if isinstance(by, By)}


REDUCTIONS = _reductions()
"""Reduction of each field of :class:`StepRecord` that has one."""


class ClippedFraction:
    """Share of a run's full steps at which clipping reduced the gradients' norm."""

    def __init__(self) -> None:
        self._full = self._clipped = 0

    def after(self, record: StepRecord) -> float | None:
        """Add a step; return the share, None if its norm before clipping is unknown."""
        if (before := record.total_grad_norm_before_clipping) is None:
            return None
        self._full += 1
        # Clipping scales by at most 1, so less than a thousandth is rounding.
        self._clipped += record.total_grad_norm < before * (1 - 1e-3)
        return self._clipped / self._full


def _first_of_each(outputs: Mapping[Output, TensorRecord]) -> Tensors[str]:
    first: dict[str, int] = {}
    for row, output in enumerate(outputs):
        first.setdefault(output.module_name, row)
    return Tensors([*first], Tensors.of(outputs).rows.take(np.array([*first.values()], np.intp)))

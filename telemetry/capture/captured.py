"""A step as it left the training thread, and the record that the background thread makes of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from telemetry.capture.parameters import Norms, Updates
from telemetry.failures import Failures
from telemetry.measure import Measurements, images
from telemetry.ranks.topology import RankNotes
from telemetry.records import Layout, Output, StepRecord
from telemetry.records.moments import nonfinite_of, norm_of
from telemetry.records.rows import Rows
from telemetry.records.step import ClippedFraction
from telemetry.records.tensor import Tensors
from telemetry.torch_private import initial_scale, scaler_state
from telemetry.torch_private.host_copy import HostCopy

# What any step takes, its objects together.
_STEP_BYTES = 2560

# What one takes that a single call has read, besides its numbers.
_LIGHT_STEP_BYTES = 512

# A norm and the index of its parameter.
_NORM_BYTES = 16

_NO_LAYOUT = Layout(modules=(), parameters=())
_NO_TENSORS: Tensors[Any] = Tensors.of({})

Kind = Literal["inputs", "outputs", "output_grads", "grads", "weights", "second_moments"]
"""Named like the field of the :class:`StepRecord` that it becomes."""

Name: TypeAlias = str | Output
"""A parameter's or module's name, or which output."""


class Observation(NamedTuple):
    """One measured tensor; ``scaled``: with the factor of a ``GradScaler``, if there is one."""

    kind: Kind
    name: Name
    measurement: int
    scaled: bool


# --- GradScaler: the factor that is on the gradients, and the steps that it skipped ---------------

# No hook runs for a step that is skipped. But the scaler then shrinks its factor, so the factors at
# two steps that were taken show how many were skipped in between.


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalerReading:
    """A scaler at one optimizer step, perhaps still on its way to the host."""

    step: int
    scale: HostCopy
    growth_tracker: HostCopy
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    initial_scale: float | None
    found_inf: HostCopy | None  # of optimizers that skip steps by themselves, as fused ones do

    @property
    def factor(self) -> float:
        """On the loss, and so on all gradients of the step's backward passes."""
        return float(self.scale.wait())

    @property
    def skipped(self) -> bool:
        """Whether the optimizer was called but left the parameters as they are."""
        return self.found_inf is not None and bool(self.found_inf.wait())


def read_scaler(scaler: GradScaler, optimizer: Optimizer, step: int) -> ScalerReading | None:
    """The scaler that is calling ``optimizer.step()``; None where it cannot be read."""
    state = scaler_state(scaler)
    if state is None:
        return None
    scale, tracker = state
    found_inf = getattr(optimizer, "found_inf", None)
    return ScalerReading(
        step=step,
        scale=HostCopy(scale),
        growth_tracker=HostCopy(tracker),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        initial_scale=initial_scale(scaler),
        found_inf=HostCopy(found_inf) if found_inf is not None else None,
    )


class RunTotals:
    """What is counted over the whole run, in the order of the steps."""

    def __init__(self) -> None:
        self.clipped_fraction = ClippedFraction()
        self._skipped = 0
        self._expected: tuple[int, float] | None = None  # the next step, and its factor

    def skipped_steps(self, reading: ScalerReading, *, overflown_passes: int) -> int:
        """Steps skipped so far; none are counted where a reading between is missing.

        Args:
            reading: Of the step that was just taken.
            overflown_passes: For the first reading, the most that can have been skipped: backward
                passes before it that led to none.
        """
        scale, tracker = reading.factor, int(reading.growth_tracker.wait())
        if self._expected is None and reading.initial_scale is not None:
            self._skipped += min(overflown_passes, _times_shrunk(reading, reading.initial_scale))
        elif self._expected is not None and self._expected[0] == reading.step:
            self._skipped += _times_shrunk(reading, self._expected[1])
        if reading.skipped:
            after = scale * reading.backoff_factor
        elif tracker + 1 == reading.growth_interval:
            after = scale * reading.growth_factor
        else:
            after = scale
        # A step that a fused optimizer skipped was called, so it was counted as one.
        self._expected = reading.step + 1, after
        self._skipped += reading.skipped
        return self._skipped


def _times_shrunk(reading: ScalerReading, expected: float) -> int:
    """How often a scaler backed off to come from the expected factor to the one that was read."""
    shrunk = expected / reading.factor if reading.factor > 0 else math.inf
    if not 1 < shrunk < math.inf:
        return 0
    return round(math.log(shrunk, 1 / reading.backoff_factor))


# --- steps ----------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Detail:
    """What only steps that are measured in full hold; parameters go by their indices."""

    observations: list[Observation] = field(default_factory=list)
    # How often each tensor came by when too many had been measured.
    counted: Counter[tuple[Kind, Name]] = field(default_factory=Counter)
    measurements: Measurements | None = None
    # Of a few observations minimum, maximum and norm as PyTorch has them.
    checks: list[tuple[Observation, HostCopy]] = field(default_factory=list)
    # As in :class:`StepRecord`.
    trainable: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    # Of each optimizer, as in ``learning_rates``: which of its groups each parameter is in.
    groups: dict[int, Mapping[int, int]] = field(default_factory=dict)
    fingerprints: list[HostCopy] = field(default_factory=list)
    examples: int = 0
    updates: list[Updates] = field(default_factory=list)
    feature_maps: dict[str, HostCopy] = field(default_factory=dict)
    filters: dict[str, HostCopy] = field(default_factory=dict)
    input: HostCopy | None = None
    random_states: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class CapturedStep:
    """What one step leaves behind: gathered on the training thread, reduced by :meth:`record`.

    Attributes:
        totals: Shared by all steps of the run.
        full: Whether tensors are measured, not only norms of gradients.
        phase: Name of a part of the run that is not training; empty for a step.
        passes: How many backward passes of training have ended.
        norms: Of the gradients that each optimizer was given at its first step, and whether they
            have a scaler's factor that the optimizer takes off.
        square: Of the norm of all of them, as far as known at once.
        learning_rates: Of every optimizer known by then, of each parameter group.
        before_clipping: Of each parameter that a backward pass has reached, the norms that were
            taken at the end of the last one, and its place among them.
        overflow_ends: Of each backward pass whether a gradient was not finite, bool ``[]``, and how
            many observations there were at its end.
        ranks: How the tensors relate to those of all ranks together.
    """

    step: int
    totals: RunTotals
    failures: Failures
    full: bool = False
    phase: str = ""
    wall_time: float = 0.0
    layout: Layout = _NO_LAYOUT
    passes: int = 0
    norms: list[tuple[Norms, bool]] = field(default_factory=list)
    square: float = 0.0
    learning_rates: dict[int, Sequence[float | HostCopy]] = field(default_factory=dict)
    before_clipping: dict[int, tuple[Norms, int]] = field(default_factory=dict)
    overflow_ends: list[tuple[HostCopy, int]] = field(default_factory=list)
    eval_mode: bool = False
    parameter_norms: list[Norms] = field(default_factory=list)
    buffer_names: Sequence[str] = ()
    buffer_norms: Sequence[Norms] = ()
    scaler: ScalerReading | None = None
    ranks: RankNotes = field(default_factory=RankNotes)
    detail: Detail = field(default_factory=Detail)

    def without_detail(self) -> CapturedStep:
        """The same step with nothing but its norms: for where memory is short."""
        return replace(self, full=False, detail=Detail())

    @property
    def is_urgent(self) -> bool:
        """Whether it holds more than norms, or one that is not finite."""
        return self.full or not math.isfinite(self.square)

    def stepped(self) -> set[int]:
        """Indices of all parameters whose gradients optimizers were given."""
        return {index for norms, _ in self.norms for index in norms.indices}

    @cached_property
    def nbytes(self) -> int:
        """Host memory held until :meth:`record`, about."""
        detail = self.detail
        pictures = [*detail.feature_maps.values(), *detail.filters.values()]
        tensors = 0 if detail.measurements is None else detail.measurements.nbytes
        norms = sum([len(norms.indices) for norms, _ in self.norms]) * _NORM_BYTES
        return _STEP_BYTES + norms + tensors + sum([p.nbytes for p in pictures])

    def record(self, scalars: Mapping[str, float], loss_tag: str | None = None) -> StepRecord:
        """Reduce to numbers and pixels; waits for an accelerator, so not for the training thread.

        Called once for each step, in their order; ``loss_tag``: which of the scalars is the loss.
        """
        detail = self.detail
        norms, present, finite = self._grad_norms()
        each_before = self.norms_before_clipping(norms, present)
        before = None if each_before is None else float(np.linalg.norm(each_before))
        overflown = self._overflown(bool(finite.all()))
        tensors = self._tensors(overflown)
        names = [parameter.name for parameter in self.layout.parameters]
        scaler: dict[str, Any] = {}
        if self.scaler is not None:
            passes = self.passes - 1 if overflown else 0
            scaler["loss_scale"] = self.scaler.factor
            scaler["skipped_steps"] = self.totals.skipped_steps(
                self.scaler, overflown_passes=passes
            )
            scaler["skipped"] = self.scaler.skipped
        return StepRecord(
            step=self.step,
            wall_time=self.wall_time,
            layout=self.layout,
            grad_norms=norms,
            grad_present=present,
            grad_finite=finite,
            phase=self.phase,
            learning_rates=tuple(
                [
                    float(rate.wait()) if isinstance(rate, HostCopy) else rate
                    for rates in self.learning_rates.values()
                    for rate in rates
                ]
            ),
            scalars=scalars,
            loss_tag=loss_tag,
            eval_mode=self.eval_mode,
            full=self.full,
            trainable=self._marked(detail.trainable),
            reached=self._marked(detail.reached),
            held=self._marked(detail.held),
            groups=self._groups(),
            fingerprints=tuple([float(copy.wait()) for copy in detail.fingerprints]),
            examples=detail.examples,
            total_grad_norm_before_clipping=before,
            clipped_fraction=self.totals.clipped_fraction.after(
                before, float(np.linalg.norm(norms))
            ),
            nan_buffers=tuple(
                [
                    self.buffer_names[index]
                    for group in self.buffer_norms
                    for index, norm in zip(group.indices, group.read()[0], strict=True)
                    if math.isnan(norm)
                ]
            ),
            nonfinite_parameters=self._nonfinite_parameters(names, tensors["weights"]),
            update_ratios={
                names[index]: ratio
                for update in detail.updates
                for index, _, _, ratio in update.read()
            },
            random_states=detail.random_states,
            feature_maps=self._pictures(images.feature_map_grid, detail.feature_maps),
            filters=self._pictures(images.filter_grid, detail.filters),
            input=self._pictures(images.input_grid, {"": detail.input}).get(""),
            **tensors,
            **scaler,
        )

    def _pictures(
        self, draw: Callable[[Tensor], NDArray[np.uint8]], samples: Mapping[str, HostCopy | None]
    ) -> dict[str, NDArray[np.uint8]]:
        """Pictures of what there are samples of; the step's numbers do not depend on them."""
        pictures: dict[str, NDArray[np.uint8]] = {}
        for name, sample in samples.items():
            if sample is not None:
                with self.failures.contained("to draw a picture"):
                    pictures[name] = draw(sample.wait())
        return pictures

    @cached_property
    def _factor(self) -> float:
        """What scaled gradients have to be divided by."""
        factor = self.scaler.factor if self.scaler is not None else 1.0
        return factor if factor > 0 and math.isfinite(factor) else 1.0

    def _grad_norms(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Norms as the optimizers used them, which gradients there were, which were finite."""
        count = len(self.layout.parameters)
        norms = np.zeros(count)
        present, finite = np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
        for group, scaled in self.norms:
            at = np.array(group.indices, dtype=np.intp)
            values, finite[at] = group.read()
            norms[at] = values / self._factor if scaled else values
            present[at] = True
        return norms, present, finite

    def norms_before_clipping(
        self, norms: NDArray[np.float64], present: NDArray[np.bool_]
    ) -> NDArray[np.float64] | None:
        """As the last backward pass left the gradients that were used, or all if none was.

        Those that no backward pass reached are as they were used.
        """
        if not self.before_clipping:
            return None
        before, none = norms.copy(), not present.any()
        values = {group: group.read()[0] for group, _ in self.before_clipping.values()}
        for index, (group, place) in self.before_clipping.items():
            if none or present[index]:
                before[index] = values[group][place] / self._factor
        return before

    def _marked(self, indices: Collection[int]) -> NDArray[np.bool_]:
        """Which parameters these are; none where that was not looked at."""
        marked = np.zeros(len(self.layout.parameters) if self.full else 0, dtype=bool)
        marked[list(indices)] = True
        return marked

    def _groups(self) -> NDArray[np.int64]:
        """Which learning rate each parameter has, if the rates of its optimizer are known."""
        groups = np.full(len(self.layout.parameters) if self.full else 0, -1)
        before = 0
        for optimizer, rates in self.learning_rates.items():
            places = self.detail.groups.get(optimizer, {})
            groups[list(places)] = before + np.array(list(places.values()), np.int64)
            before += len(rates)
        return groups

    def _nonfinite_parameters(self, names: Sequence[str], weights: Tensors[str]) -> tuple[str, ...]:
        broken = {
            names[index]
            for group in self.parameter_norms
            for index, finite in zip(group.indices, group.read()[1], strict=True)
            if not finite
        }
        broken |= {
            name for name, bad in zip(weights, nonfinite_of(weights.rows), strict=True) if bad
        }
        return tuple([name for name in names if name in broken])

    def _overflown(self, finite: bool) -> int:
        """How many of the first observations belong to steps that a scaler skipped."""
        if self.scaler is None or not finite:
            return 0
        # A backward pass with a gradient that was not ended a step that did not happen.
        return max((end for found, end in self.overflow_ends if found.wait()), default=0)

    def _tensors(self, overflown: int) -> dict[str, Any]:
        """By kind and name the merged observations, without the first ``overflown`` of all."""
        kinds: dict[str, Tensors[Any]] = dict.fromkeys(get_args(Kind), _NO_TENSORS)
        detail = self.detail
        observations = detail.observations[overflown:]
        if detail.measurements is None:
            return kinds
        measured = detail.measurements.reduce().rows
        self._tell_wrong(measured)
        rows = measured.take(np.array([o.measurement for o in observations], np.intp))
        if self._factor != 1:
            scaled = np.array([o.scaled for o in observations])
            rows = rows.scaled(np.where(scaled, 1 / self._factor, 1.0))
        places: dict[tuple[Kind, Name], int] = {}
        of = [places.setdefault((o.kind, o.name), len(places)) for o in observations]
        rows = rows.merged(np.array(of, np.int64), len(places))
        rows = rows.having(calls=rows.calls + [detail.counted[key] for key in places])
        for kind in kinds:
            some = {name: place for (of_kind, name), place in places.items() if of_kind == kind}
            kinds[kind] = Tensors(tuple(some), rows.take(np.array([*some.values()], np.intp)))
        return kinds

    def _tell_wrong(self, measured: Rows) -> None:
        """Say so if PyTorch's own figures of what compiled graphs have shown are others."""
        wrong = []
        for (kind, name, measurement, _), copy in self.detail.checks:
            own, row = copy.wait().numpy(), measured.take(np.array([measurement]))
            recorded = np.concatenate([row.min, row.max, norm_of(row)])
            finite = bool(np.isfinite(own).all())
            if finite is not bool(nonfinite_of(row)[0] == 0) or (
                finite and not np.allclose(recorded, own, rtol=1e-3, atol=1e-30)
            ):
                wrong.append(f"{kind} of {name}: {recorded.tolist()} instead of {own.tolist()}")
        if wrong:
            self.failures.log_once(
                f"{len(wrong)} of {len(self.detail.checks)} tensors of compiled modules are "
                "recorded with another minimum, maximum or norm than PyTorch finds, the "
                f"first being {wrong[0]}. This is a fault of telemetry with PyTorch "
                f"{torch.__version__}, please report it; "
                'under torch.compiler.set_stance("force_eager") figures are right',
                kind="compiled",
            )


class LightStep(NamedTuple):
    """What one call has read of a step. A tuple, for between two steps of training each call costs.

    Attributes:
        groups: How many parameter groups there are.
        row: Their learning rates, and behind them the norm of each parameter's gradient, negative
            where there is none; float64 ``[groups + parameters]``.
    """

    step: int
    wall_time: float
    layout: Layout
    groups: int
    row: NDArray[np.float64]

    @property
    def nbytes(self) -> int:
        """Memory held until :meth:`record`, about."""
        return _LIGHT_STEP_BYTES + self.row.nbytes

    def record(self, scalars: Mapping[str, float], loss_tag: str | None = None) -> StepRecord:
        """As :meth:`CapturedStep.record`; what is not finite was not read by one call."""
        norms = self.row[self.groups :]
        return StepRecord(
            step=self.step,
            wall_time=self.wall_time,
            layout=self.layout,
            grad_norms=np.maximum(norms, 0.0),
            grad_present=norms >= 0,
            grad_finite=np.isfinite(norms),
            learning_rates=tuple(self.row[: self.groups].tolist()),
            scalars=scalars,
            loss_tag=loss_tag,
        )

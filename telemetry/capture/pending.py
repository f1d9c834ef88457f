"""Values that hooks have gathered in a step: the worker turns them into the numbers of its record.

Copies from an accelerator may still be on their way; only the worker waits for them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from telemetry.capture.observations import CHECKS, Observations
from telemetry.capture.parameters import Norms, Updates
from telemetry.capture.scaler import ScalerReading, SkippedSteps
from telemetry.capture.usage import Laps, usage_of
from telemetry.failures import Failures
from telemetry.measure import images
from telemetry.ranks.topology import RankNotes
from telemetry.records import AttentionHeads, Layout, StepRecord
from telemetry.records.moments import nonfinite_of
from telemetry.records.step import NO_LAYOUT, RUNNING_STATISTICS, ClippedFraction
from telemetry.records.tensor import Tensors
from telemetry.torch_private.host_copy import HostCopy

_STEP_BYTES = 4096  # of all objects of a step
_ROW_BYTES = 512  # of those of a step that one call has read, without its numbers
_NORM_BYTES = 16  # of a norm and the index of its parameter

_NO_NOTES = RankNotes()  # all shards are whole tensors, or plain parameters
_NOTHING: NDArray[Any] = np.empty(0)


def begun(step: int, *, full: bool = False, phase: str = "") -> StepRecord:
    """Return the record of a step that begins."""
    return StepRecord(
        step=step,
        wall_time=0.0,
        layout=NO_LAYOUT,
        grad_norms=_NOTHING,
        grad_present=_NOTHING,
        grad_finite=_NOTHING,
        phase=phase,
        full=full,
    )


class PendingNorms(NamedTuple):
    """Learning rates and gradient norms of one step that one call has read; quickly made.

    Attributes:
        groups: Number of parameter groups.
        row: The learning rates of the groups, then the norm of each parameter's gradient, negative
            where it is missing; float64 ``[groups + parameters]``.
        laps: Times of this step, and of steps before it that had no record.
    """

    step: int
    wall_time: float
    layout: Layout
    groups: int
    row: NDArray[np.float64]
    laps: Laps | None
    full: bool = False
    is_urgent: bool = False
    notes: RankNotes = _NO_NOTES

    @property
    def nbytes(self) -> int:
        """Host memory held until :meth:`resolve`, about."""
        return _ROW_BYTES + self.row.nbytes

    def without_tensors(self) -> PendingNorms:
        return self

    def resolve(self) -> StepRecord:
        """Return the record."""
        norms = self.row[self.groups :]
        usage, tokens = usage_of(self.laps)
        return StepRecord(
            step=self.step,
            wall_time=self.wall_time,
            layout=self.layout,
            grad_norms=np.maximum(norms, 0.0),
            grad_present=norms >= 0,
            grad_finite=np.isfinite(norms),
            learning_rates=tuple(self.row[: self.groups].tolist()),
            usage=usage,
            tokens=tokens,
        )


# Conversions of the copies of a field; of the others one array.
_CONVERTED: Mapping[str, Callable[[list[Tensor]], Any]] = {
    "attention": lambda calls: AttentionHeads.merged(
        [AttentionHeads(*call.double().numpy()) for call in calls]
    ),
    "feature_maps": lambda samples: images.feature_map_grid(samples[0]),
    "filters": lambda samples: images.filter_grid(samples[0]),
    "input": lambda samples: images.input_grid(samples[0]),
    "fingerprints": lambda numbers: tuple([float(number) for number in numbers]),
}


class RunTotals:
    """Counts over all steps of the run.

    Attributes:
        checks_left: Outputs of compiled graphs, and gradients of them, still to be checked. The
            training thread counts them, the worker the others.
    """

    def __init__(self) -> None:
        self.checks_left = {"outputs": CHECKS, "output_grads": CHECKS}
        self.clipped_fraction = ClippedFraction()
        self.skipped_steps = SkippedSteps()


@dataclass(kw_only=True, eq=False)
class PendingStep:
    """Record of one step, and values that hooks have read; parameters are given by their indices.

    Attributes:
        totals: Shared by all steps of the run.
        passes: Number of backward passes of training that have ended.
        norms: Norms of the gradients that each optimizer used at its first step, and whether they
            have a scaler's factor that the optimizer takes off.
        square: Square of the norm of all gradients whose norms are known without waiting.
        learning_rates: For every optimizer known by then, the rate of each parameter group.
        groups: For each optimizer, as in ``learning_rates``: the group of each parameter.
        before_clipping: For each parameter that a backward pass has reached: the norms at the end
            of the last pass, and its place among them.
        overflow_ends: For each backward pass: whether a gradient was not finite, bool ``[]``, and
            the number of observations at its end.
        notes: Relation of the tensors to those of all ranks together.
        laps: Times of this step, and of steps before it that had no record.
        copies: Copies for a field of the record, by its name and the key in it; None: the field
            itself.
    """

    record: StepRecord
    totals: RunTotals
    failures: Failures
    passes: int = 0
    norms: list[tuple[Norms, bool]] = field(default_factory=list)
    square: float = 0.0
    learning_rates: dict[int, Sequence[float | HostCopy]] = field(default_factory=dict)
    groups: dict[int, Mapping[int, int]] = field(default_factory=dict)
    before_clipping: dict[int, tuple[Norms, int]] = field(default_factory=dict)
    overflow_ends: list[tuple[HostCopy, int]] = field(default_factory=list)
    parameter_norms: list[Norms] = field(default_factory=list)
    buffer_names: Sequence[str] = ()
    buffer_norms: Sequence[Norms] = ()
    scaler: ScalerReading | None = None
    notes: RankNotes = field(default_factory=RankNotes)
    laps: Laps | None = None
    updates: list[Updates] = field(default_factory=list)
    copies: dict[tuple[str, str | None], list[HostCopy]] = field(default_factory=dict)
    observations: Observations = field(init=False)

    def __post_init__(self) -> None:
        self.observations = Observations(self.failures)

    def copies_of(self, name: str, key: str | None = None) -> list[HostCopy]:
        """Return the list of the copies for a field of the record."""
        return self.copies.setdefault((name, key), [])

    def take_picture(self, name: str, key: str | None, samples: Iterator[Tensor | None]) -> None:
        """Copy the first of the samples for a field of pictures, unless it has one."""
        if (name, key) not in self.copies and (sample := next(samples, None)) is not None:
            self.copies_of(name, key).append(HostCopy(sample))

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.record.step

    @property
    def full(self) -> bool:
        """Whether tensors are measured, not only norms of gradients."""
        return self.record.full

    @property
    def is_urgent(self) -> bool:
        """Whether the step is full, or a norm is not finite."""
        return self.full or not math.isfinite(self.square)

    def stepped(self) -> set[int]:
        """Return the indices of all parameters whose gradients optimizers used."""
        return {index for norms, _ in self.norms for index in norms.indices}

    @property
    def nbytes(self) -> int:
        """Host memory held until :meth:`resolve`, about."""
        norms = sum([len(norms.indices) for norms, _ in self.norms]) * _NORM_BYTES
        copied = sum([copy.nbytes for some in self.copies.values() for copy in some])
        return _STEP_BYTES + norms + self.observations.nbytes + copied

    def without_tensors(self) -> PendingStep:
        """Return the step with its norms alone, to save memory."""
        whole, reduced = self.record, begun(self.record.step, phase=self.record.phase)
        reduced.wall_time, reduced.layout = whole.wall_time, whole.layout
        reduced.eval_mode = whole.eval_mode
        return replace(self, record=reduced, copies={}, updates=[], groups={})

    def resolve(self) -> StepRecord:
        """Fill the record with numbers and pixels, and return it; waits for an accelerator.

        To be called once for each step, in their order.
        """
        record = self.record
        names = [parameter.name for parameter in record.layout.parameters]
        record.learning_rates = tuple(
            [
                float(rate.wait()) if isinstance(rate, HostCopy) else rate
                for rates in self.learning_rates.values()
                for rate in rates
            ]
        )
        factor = self.scaler.factor if self.scaler is not None else 1.0
        factor = factor if factor > 0 and math.isfinite(factor) else 1.0
        self._read_norms(record, factor)
        overflown = self._overflown(record)
        for kind, tensors in self.observations.merge(first=overflown, factor=factor).items():
            setattr(record, kind, tensors)
        _correct_infinite(record, names)
        if self.scaler is not None:
            passes = self.passes - 1 if overflown else 0
            skipped_steps = self.totals.skipped_steps
            record.loss_scale, record.skipped = self.scaler.factor, self.scaler.skipped
            record.skipped_steps = skipped_steps.after(self.scaler, overflown_passes=passes)
        record.nan_buffers = tuple(self._nan_buffers())
        record.nonfinite_parameters = self._nonfinite_parameters(record, names)
        self.notes.moved = [one for update in self.updates for one in update.read()]
        record.update_ratios = {names[index]: ratio for index, _, _, ratio in self.notes.moved}
        if record.full:
            record.groups = self._groups(len(names))
        by_key: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for (name, key), copies in self.copies.items():
            with self.failures.contained(f"to read {name}"):
                value = self._converted(name, copies)
                if key is None:
                    setattr(record, name, value)
                else:
                    by_key[name][key] = value
        for name, values in by_key.items():
            setattr(record, name, values)
        record.usage, record.tokens = usage_of(self.laps)
        before = record.total_grad_norm_before_clipping
        after = float(np.linalg.norm(record.grad_norms))
        record.clipped_fraction = self.totals.clipped_fraction.after(before, after)
        return record

    @staticmethod
    def _converted(name: str, copies: Sequence[HostCopy]) -> Any:
        values = [copy.wait() for copy in copies]
        return _CONVERTED[name](values) if name in _CONVERTED else values[0].numpy()

    def _read_norms(self, record: StepRecord, factor: float) -> None:
        """Read the norms as used by optimizers, whether present, and whether finite."""
        count = len(record.layout.parameters)
        norms = np.zeros(count)
        present, finite = np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
        for group, scaled in self.norms:
            at = np.array(group.indices, dtype=np.intp)
            values, finite[at] = group.read()
            norms[at] = values / factor if scaled else values
            present[at] = True
        record.grad_norms, record.grad_present, record.grad_finite = norms, present, finite
        if not self.before_clipping:
            return
        # Of used gradients, or else of all. One that no pass has reached has its norm as used.
        before, none = norms.copy(), not present.any()
        read = {group: group.read()[0] for group, _ in self.before_clipping.values()}
        for index, (group, place) in self.before_clipping.items():
            if none or present[index]:
                before[index] = read[group][place] / factor
        self.notes.before_clipping = before
        record.total_grad_norm_before_clipping = float(np.linalg.norm(before))

    def _groups(self, count: int) -> NDArray[np.int64]:
        """Return the index of each parameter's learning rate; -1: unknown."""
        groups = np.full(count, -1)
        before = 0
        for optimizer, rates in self.learning_rates.items():
            places = self.groups.get(optimizer, {})
            groups[list(places)] = before + np.array(list(places.values()), np.int64)
            before += len(rates)
        return groups

    def _nan_buffers(self) -> Iterator[str]:
        for group in self.buffer_norms:
            for index, norm in zip(group.indices, group.read()[0], strict=True):
                name = self.buffer_names[index]
                if math.isnan(norm) or (math.isinf(norm) and name.endswith(RUNNING_STATISTICS)):
                    yield name

    def _nonfinite_parameters(self, record: StepRecord, names: Sequence[str]) -> tuple[str, ...]:
        broken = {
            names[index]
            for group in self.parameter_norms
            for index, finite in zip(group.indices, group.read()[1], strict=True)
            if not finite
        }
        bad = nonfinite_of(Tensors.of(record.weights).rows)
        broken.update(compress(record.weights, bad))
        return tuple([name for name in names if name in broken])

    def _overflown(self, record: StepRecord) -> int:
        """Return how many of the first observations belong to steps that a scaler skipped."""
        if self.scaler is None or not record.grad_finite.all():
            return 0
        # A backward pass with a gradient that is not finite ended in a skipped step.
        return max((end for overflown, end in self.overflow_ends if overflown.wait()), default=0)


Pending: TypeAlias = PendingStep | PendingNorms
"""A step on its way to the worker, which resolves it."""


def _correct_infinite(record: StepRecord, names: Sequence[str]) -> None:
    """Replace the infinite norms of gradients that are finite, and beyond float32's squares."""
    for place in np.flatnonzero(np.isinf(record.grad_norms)).tolist():
        grad = record.grads.get(names[place])
        if grad is not None and not grad.sketch.nonfinite_count:
            record.grad_norms[place], record.grad_finite[place] = grad.sketch.norm, True

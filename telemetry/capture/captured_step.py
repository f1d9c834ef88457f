"""A step as the training thread hands it over, and its record, which the worker makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from telemetry.capture.observations import CHECKS, Observations
from telemetry.capture.parameters import Norms, Updates
from telemetry.capture.usage import Laps, usage_of
from telemetry.failures import Failures
from telemetry.measure import images
from telemetry.ranks.topology import RankNotes
from telemetry.records import AttentionHeads, Layout, StepRecord
from telemetry.records.moments import nonfinite_of
from telemetry.records.step import RUNNING_STATISTICS, ClippedFraction
from telemetry.records.tensor import Tensors
from telemetry.torch_private import initial_scale, scaler_state
from telemetry.torch_private.host_copy import HostCopy

_STEP_BYTES = 2560  # of all objects of a step
_NORM_BYTES = 16  # of a norm and the index of its parameter

_NO_LAYOUT = Layout(modules=(), parameters=())

# --- GradScaler: the factor of the gradients, and skipped steps -----------------------------------

# No hook runs for a skipped step. But the scaler then shrinks its factor, so the factors at two
# steps that were taken show how many were skipped in between.


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalerReading:
    """State of a scaler at one optimizer step; it may still be on its way to the host."""

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
        """Factor of the loss, and so of all gradients of the step's backward passes."""
        return float(self.scale.wait())

    @property
    def skipped(self) -> bool:
        """Whether the optimizer was called but left the parameters as they are."""
        return self.found_inf is not None and bool(self.found_inf.wait())


def read_scaler(scaler: GradScaler, optimizer: Optimizer, step: int) -> ScalerReading | None:
    """Read the scaler that is calling ``optimizer.step()``; None where it cannot be read."""
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
    """Counts over all steps of the run; the worker updates them in the order of the steps.

    Attributes:
        checks_left: Outputs of compiled graphs, and gradients of them, still to be checked. The
            training thread counts them.
    """

    def __init__(self) -> None:
        self.checks_left = {"outputs": CHECKS, "output_grads": CHECKS}
        self.clipped_fraction = ClippedFraction()
        self._skipped = 0
        self._expected: tuple[int, float] | None = None  # the next step, and its factor

    def skipped_steps(self, reading: ScalerReading, *, overflown_passes: int) -> int:
        """Return the number of steps skipped up to now.

        No step counts as skipped where the reading before is missing.

        Args:
            reading: State of the scaler at the step that was just taken.
            overflown_passes: Upper limit for the first reading: backward passes before it that
                did not lead to a step.
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
        # A step that a fused optimizer skips counts as a step, too: its hooks run.
        self._expected = reading.step + 1, after
        self._skipped += reading.skipped
        return self._skipped


def _times_shrunk(reading: ScalerReading, expected: float) -> int:
    """Return how often a scaler backed off between the expected factor and its own."""
    shrunk = expected / reading.factor if reading.factor > 0 else math.inf
    if not 1 < shrunk < math.inf:
        return 0
    return round(math.log(shrunk, 1 / reading.backoff_factor))


# --- steps ----------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Detail:
    """Values that only full steps have; parameters are given by their indices."""

    observations: Observations
    # As in :class:`StepRecord`.
    trainable: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    # For each optimizer, as in ``learning_rates``: the group of each parameter.
    groups: dict[int, Mapping[int, int]] = field(default_factory=dict)
    fingerprints: list[HostCopy] = field(default_factory=list)
    examples: int = 0
    expert_loads: dict[str, HostCopy] = field(default_factory=dict)
    updates: list[Updates] = field(default_factory=list)
    # By module: the figures of each call, see :func:`attention_figures`.
    attention: dict[str, list[HostCopy]] = field(default_factory=dict)
    feature_maps: dict[str, HostCopy] = field(default_factory=dict)
    filters: dict[str, HostCopy] = field(default_factory=dict)
    input: HostCopy | None = None
    random_states: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class CapturedStep:
    """One step: gathered on the training thread, reduced on the worker by :meth:`record`.

    Attributes:
        totals: Shared by all steps of the run.
        full: Whether tensors are measured, not only norms of gradients.
        phase: Name of a part of the run that is not training; empty for a step.
        passes: Number of backward passes of training that have ended.
        norms: Norms of the gradients that each optimizer used at its first step, and whether they
            have a scaler's factor that the optimizer takes off.
        square: Square of the norm of all gradients whose norms are known without waiting.
        learning_rates: For every optimizer known by then, the rate of each parameter group.
        before_clipping: For each parameter that a backward pass has reached: the norms at the end
            of the last pass, and its place among them.
        overflow_ends: For each backward pass: whether a gradient was not finite, bool ``[]``, and
            the number of observations at its end.
        ranks: Relation of the tensors to those of all ranks together.
        laps: Times of this step, and of steps before it that had no record.
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
    laps: Laps | None = None
    detail: Detail = field(init=False)

    def __post_init__(self) -> None:
        self.detail = Detail(observations=Observations(self.failures))

    def without_detail(self) -> CapturedStep:
        """Return the step with its norms alone, to save memory."""
        return replace(self, full=False)

    @property
    def is_urgent(self) -> bool:
        """Whether the step is full, or a norm is not finite."""
        return self.full or not math.isfinite(self.square)

    def stepped(self) -> set[int]:
        """Return the indices of all parameters whose gradients optimizers used."""
        return {index for norms, _ in self.norms for index in norms.indices}

    @cached_property
    def nbytes(self) -> int:
        """Host memory held until :meth:`record`, about."""
        detail = self.detail
        pictures = [*detail.feature_maps.values(), *detail.filters.values()]
        norms = sum([len(norms.indices) for norms, _ in self.norms]) * _NORM_BYTES
        tensors = detail.observations.nbytes
        return _STEP_BYTES + norms + tensors + sum([p.nbytes for p in pictures])

    def record(self, scalars: Mapping[str, float], loss_tag: str | None = None) -> StepRecord:
        """Reduce the step to numbers and pixels; waits for an accelerator.

        To be called once for each step, in their order. ``loss_tag``: tag of the loss in
        ``scalars``.
        """
        detail = self.detail
        norms, present, finite = self._grad_norms()
        each_before = self.norms_before_clipping(norms, present)
        before = None if each_before is None else float(np.linalg.norm(each_before))
        overflown = self._overflown(bool(finite.all()))
        tensors: dict[str, Any] = detail.observations.merge(first=overflown, factor=self._factor)
        names = [parameter.name for parameter in self.layout.parameters]
        _correct_infinite(norms, finite, names, tensors["grads"])
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
            expert_loads={n: load.wait().numpy() for n, load in detail.expert_loads.items()},
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
                    or (math.isinf(norm) and self.buffer_names[index].endswith(RUNNING_STATISTICS))
                ]
            ),
            nonfinite_parameters=self._nonfinite_parameters(names, tensors["weights"]),
            update_ratios={
                names[index]: ratio
                for update in detail.updates
                for index, _, _, ratio in update.read()
            },
            attention={
                name: AttentionHeads.merged(
                    [AttentionHeads(*call.wait().double().numpy()) for call in calls]
                )
                for name, calls in detail.attention.items()
                if calls
            },
            random_states=detail.random_states,
            feature_maps=self._pictures(images.feature_map_grid, detail.feature_maps),
            filters=self._pictures(images.filter_grid, detail.filters),
            input=self._pictures(images.input_grid, {"": detail.input}).get(""),
            **usage_of(self.laps),
            **tensors,
            **scaler,
        )

    def _pictures(
        self, draw: Callable[[Tensor], NDArray[np.uint8]], samples: Mapping[str, HostCopy | None]
    ) -> dict[str, NDArray[np.uint8]]:
        """Draw the samples; a failure loses a picture, not the step."""
        pictures: dict[str, NDArray[np.uint8]] = {}
        for name, sample in samples.items():
            if sample is not None:
                with self.failures.contained("to draw a picture"):
                    pictures[name] = draw(sample.wait())
        return pictures

    @cached_property
    def _factor(self) -> float:
        """Divisor of scaled gradients."""
        factor = self.scaler.factor if self.scaler is not None else 1.0
        return factor if factor > 0 and math.isfinite(factor) else 1.0

    def _grad_norms(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the norms as used by optimizers, whether present, and whether finite."""
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
        """Return the norms after the last backward pass, of used gradients or else of all.

        A gradient that no backward pass has reached has its norm in ``norms``.
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
        """Return a mask of the parameters; empty if the step is not full."""
        marked = np.zeros(len(self.layout.parameters) if self.full else 0, dtype=bool)
        marked[list(indices)] = True
        return marked

    def _groups(self) -> NDArray[np.int64]:
        """Return the index of each parameter's learning rate; -1: unknown."""
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
        """Return how many of the first observations belong to steps that a scaler skipped."""
        if self.scaler is None or not finite:
            return 0
        # A backward pass with a gradient that is not finite ended in a skipped step.
        return max((end for found, end in self.overflow_ends if found.wait()), default=0)


def _correct_infinite(
    norms: NDArray[np.float64],
    finite: NDArray[np.bool_],
    names: Sequence[str],
    grads: Tensors[str],
) -> None:
    """Replace the infinite norms of gradients that are finite, and beyond float32's squares."""
    for place in np.flatnonzero(np.isinf(norms)).tolist():
        grad = grads.get(names[place])
        if grad is not None and not grad.sketch.nonfinite_count:
            norms[place], finite[place] = grad.sketch.norm, True

"""A step as it left the training thread, and the record that the background thread makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from telemetry import images
from telemetry.capture.parameters import NormReading, UpdateReading
from telemetry.capture.scaler import ScalerReading, SkippedSteps
from telemetry.host_copy import HostCopy
from telemetry.measure import Measurements
from telemetry.records import Layout, StepRecord, TensorRecord
from telemetry.torch_private import NO_TASK

Kind = Literal["activations", "activation_grads", "grads", "weights"]

_OBSERVATION_BYTES = 4096
"""A sketch with its usual number of buckets, and what leads to it."""

_CLIPPED = 1 - 1e-3
"""Clipping scales by at most 1, so a ratio of norms below this is no rounding."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured tensor: whose it is, its number in the measurer, the backward pass it is of."""

    kind: Kind
    name: str
    measurement: int
    task: int


class RunTotals:
    """What is counted over the whole run, in the order of the steps."""

    def __init__(self) -> None:
        self.count_skipped = SkippedSteps()
        self._full = 0
        self._clipped = 0

    def clipped_fraction(self, before: float, after: float) -> float:
        """Share of the steps told so far whose gradient norm was clipped, this one included."""
        self._full += 1
        self._clipped += after < before * _CLIPPED
        return self._clipped / self._full


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedStep:
    """What one step left behind: cheap to make, reduced later by :meth:`record`."""

    step: int
    wall_time: float
    layout: Layout
    phase: str
    totals: RunTotals
    norms: Sequence[NormReading]
    norms_before_clipping: Sequence[NormReading]
    parameter_norms: Sequence[NormReading]
    buffer_names: Sequence[str]
    buffer_norms: Sequence[NormReading]
    updates: Sequence[UpdateReading]
    learning_rates: Sequence[float | HostCopy]
    scaler: ScalerReading | None
    measurements: Measurements | None
    observations: Sequence[Observation]
    committed: frozenset[int]
    feature_maps: Mapping[str, HostCopy]
    filters: Mapping[str, HostCopy]
    input: HostCopy | None

    @property
    def nbytes(self) -> int:
        """Host memory held until :meth:`record`, about; the measurer bounds its own."""
        pictures = [*self.feature_maps.values(), *self.filters.values()]
        return len(self.observations) * _OBSERVATION_BYTES + sum(p.nbytes for p in pictures)

    def record(self, scalars: Mapping[str, float]) -> StepRecord:
        """Reduce to numbers and pixels; waits for an accelerator, so not for the training thread.

        Called once for each step, in their order.

        Args:
            scalars: What the user logged for this step.
        """
        norms, present, finite = _assemble(self.norms, len(self.layout.parameters))
        if self.scaler is not None and self.scaler.in_gradients:
            norms = norms / self.scaler.factor
        before = self._total_before_clipping()
        tensors = self._tensors(bool(finite.all()))
        return StepRecord(
            step=self.step,
            wall_time=self.wall_time,
            layout=self.layout,
            grad_norms=norms,
            grad_present=present,
            grad_finite=finite,
            phase=self.phase,
            learning_rates=tuple(
                float(r.wait()) if isinstance(r, HostCopy) else r for r in self.learning_rates
            ),
            scalars=scalars,
            loss_scale=self.scaler.factor if self.scaler is not None else None,
            skipped_steps=self.totals.count_skipped(self.scaler) if self.scaler is not None else 0,
            skipped=self.scaler is not None and self.scaler.skipped,
            full=self.measurements is not None,
            total_grad_norm_before_clipping=before,
            clipped_fraction=(
                self.totals.clipped_fraction(before, float(np.linalg.norm(norms)))
                if before is not None
                else None
            ),
            nan_buffers=self._nan_buffers(),
            nonfinite_parameters=self._nonfinite_parameters(),
            activations=tensors["activations"],
            activation_grads=tensors["activation_grads"],
            grads=tensors["grads"],
            weights=tensors["weights"],
            update_ratios=self._update_ratios(),
            feature_maps={
                name: images.feature_map_grid(copy.wait())
                for name, copy in self.feature_maps.items()
            },
            filters={name: images.filter_grid(copy.wait()) for name, copy in self.filters.items()},
            input=images.input_grid(self.input.wait()) if self.input is not None else None,
        )

    def _total_before_clipping(self) -> float | None:
        if not self.norms_before_clipping:
            return None
        norms, _, _ = _assemble(self.norms_before_clipping, len(self.layout.parameters))
        factor = self.scaler.factor if self.scaler is not None else 1.0
        return float(np.linalg.norm(norms)) / factor

    def _nan_buffers(self) -> tuple[str, ...]:
        norms, _, _ = _assemble(self.buffer_norms, len(self.buffer_names))
        return tuple(self.buffer_names[int(index)] for index in np.flatnonzero(np.isnan(norms)))

    def _nonfinite_parameters(self) -> tuple[str, ...]:
        parameters = self.layout.parameters
        _, _, finite = _assemble(self.parameter_norms, len(parameters))
        return tuple(parameters[index].name for index in np.flatnonzero(~finite))

    def _update_ratios(self) -> dict[str, float]:
        parameters = self.layout.parameters
        return {
            parameters[index].name: float(ratio)
            for reading in self.updates
            for index, ratio in zip(reading.indices, reading.read(), strict=True)
        }

    def _tensors(self, finite: bool) -> dict[Kind, dict[str, TensorRecord]]:
        """Observations of one name merged, in the order of first calls.

        Args:
            finite: Whether the step's gradients were. A backward pass with a non-finite gradient
                then belongs to a step that a scaler skipped.
        """
        reduced = self.measurements.reduce() if self.measurements is not None else []
        observations = [o for o in self.observations if o.task in self.committed]
        if self.scaler is not None:
            observations, reduced = self._without_scale(observations, reduced, finite)
        parts: dict[Kind, dict[str, list[TensorRecord]]]
        parts = {"activations": {}, "activation_grads": {}, "grads": {}, "weights": {}}
        for o in observations:
            parts[o.kind].setdefault(o.name, []).append(reduced[o.measurement])
        return {kind: _merged(named) for kind, named in parts.items()}

    def _without_scale(
        self, observations: list[Observation], reduced: list[TensorRecord], finite: bool
    ) -> tuple[list[Observation], list[TensorRecord]]:
        assert self.scaler is not None
        factor = self.scaler.factor
        reduced = list(reduced)
        overflown: set[int] = set()
        for o in observations:
            scaled = o.kind == "activation_grads" or (
                o.kind == "grads" and self.scaler.in_gradients
            )
            if not scaled:
                continue
            if finite and o.task != NO_TASK and reduced[o.measurement].sketch.nonfinite_count:
                overflown.add(o.task)
            if factor > 0 and math.isfinite(factor):
                reduced[o.measurement] = reduced[o.measurement].scaled(1 / factor)
        return [o for o in observations if o.task not in overflown], reduced


def _assemble(
    readings: Iterable[NormReading], count: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Norms, which of them were read, and whether all elements behind them are finite."""
    norms = np.zeros(count)
    present, finite = np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
    for reading in readings:
        at = np.array(reading.indices, dtype=np.intp)
        norms[at], finite[at] = reading.read()
        present[at] = True
    return norms, present, finite


def _merged(named: Mapping[str, Iterable[TensorRecord]]) -> dict[str, TensorRecord]:
    return {name: TensorRecord.merge_all(records) for name, records in named.items()}

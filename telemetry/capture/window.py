"""What was observed since the last optimizer step, and the record that it becomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from telemetry import images
from telemetry.capture.parameters import NormReading, UpdateReading
from telemetry.host_copy import HostCopy
from telemetry.measure import Measurements, Measurer
from telemetry.records import Layout, StepRecord, TensorRecord
from telemetry.torch_private import NO_TASK

Kind = Literal["activations", "activation_grads", "grads", "weights"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured tensor: whose it is, its number in the measurer, the backward pass it is of."""

    kind: Kind
    name: str
    measurement: int
    task: int


@dataclass(kw_only=True, eq=False)
class Window:
    """Gathers one step's observations on the training thread.

    Attributes:
        step: The step that they belong to.
        measurer: Takes the tensors of a fully measured step; None on other steps.
        order: Watched modules in the order of their first call.
        committed: Backward passes in which a parameter's gradient accumulated; observations of
            other passes are probes, and dropped.
    """

    step: int
    measurer: Measurer | None
    observations: list[Observation] = field(default_factory=list)
    order: dict[str, None] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    norms: list[NormReading] = field(default_factory=list)
    updates: list[UpdateReading] = field(default_factory=list)
    learning_rates: list[float | HostCopy] = field(default_factory=list)
    feature_maps: dict[str, HostCopy] = field(default_factory=dict)
    filters: dict[str, HostCopy] = field(default_factory=dict)
    input: HostCopy | None = None

    def observe(
        self,
        kind: Kind,
        name: str,
        tensor: Tensor,
        *,
        unit_axis: int | None = None,
        task: int = NO_TASK,
    ) -> None:
        """Measure ``tensor`` as it is now, if it can be."""
        if self.measurer is None:
            return
        measurement = self.measurer.add(tensor, unit_axis=unit_axis)
        if measurement is not None:
            self.observations.append(
                Observation(kind=kind, name=name, measurement=measurement, task=task)
            )

    def close(self, *, layout: Layout, wall_time: float) -> CapturedStep:
        """End the step; the window is not used again."""
        return CapturedStep(
            step=self.step,
            wall_time=wall_time,
            layout=layout,
            norms=tuple(self.norms),
            updates=tuple(self.updates),
            learning_rates=tuple(self.learning_rates),
            measurements=self.measurer.finish() if self.measurer is not None else None,
            observations=tuple(
                o for o in self.observations if o.task == NO_TASK or o.task in self.committed
            ),
            feature_maps=self.feature_maps,
            filters=self.filters,
            input=self.input,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedStep:
    """One step as it left the training thread: cheap to make, reduced later by :meth:`record`."""

    step: int
    wall_time: float
    layout: Layout
    norms: tuple[NormReading, ...]
    updates: tuple[UpdateReading, ...]
    learning_rates: tuple[float | HostCopy, ...]
    measurements: Measurements | None
    observations: tuple[Observation, ...]
    feature_maps: Mapping[str, HostCopy]
    filters: Mapping[str, HostCopy]
    input: HostCopy | None

    @property
    def full(self) -> bool:
        """Whether tensors were measured, not only gradient norms."""
        return self.measurements is not None

    def record(self, scalars: Mapping[str, float]) -> StepRecord:
        """Reduce to numbers and pixels; waits for an accelerator, so not for the training thread.

        Args:
            scalars: What the user logged for this step.
        """
        norms, present, finite = self._grad_norms()
        tensors = self._tensors()
        return StepRecord(
            step=self.step,
            wall_time=self.wall_time,
            layout=self.layout,
            grad_norms=norms,
            grad_present=present,
            grad_finite=finite,
            learning_rates=tuple(
                float(r.wait()) if isinstance(r, HostCopy) else r for r in self.learning_rates
            ),
            scalars=scalars,
            full=self.full,
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

    def _grad_norms(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        count = len(self.layout.parameters)
        norms = np.zeros(count)
        present, finite = np.zeros(count, dtype=bool), np.ones(count, dtype=bool)
        for reading in self.norms:
            at = np.array(reading.indices, dtype=np.intp)
            norms[at], finite[at] = reading.read()
            present[at] = True
        return norms, present, finite

    def _update_ratios(self) -> dict[str, float]:
        parameters = self.layout.parameters
        return {
            parameters[index].name: float(ratio)
            for reading in self.updates
            for index, ratio in zip(reading.indices, reading.read(), strict=True)
        }

    def _tensors(self) -> dict[Kind, dict[str, TensorRecord]]:
        reduced = self.measurements.reduce() if self.measurements is not None else []
        parts: dict[Kind, dict[str, list[TensorRecord]]]
        parts = {"activations": {}, "activation_grads": {}, "grads": {}, "weights": {}}
        for o in self.observations:
            parts[o.kind].setdefault(o.name, []).append(reduced[o.measurement])
        return {kind: _merged(named) for kind, named in parts.items()}


def _merged(named: Mapping[str, Iterable[TensorRecord]]) -> dict[str, TensorRecord]:
    return {name: TensorRecord.merge_all(records) for name, records in named.items()}

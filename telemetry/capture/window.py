"""What is observed between two optimizer steps, gathered on the training thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from telemetry.capture.captured import CapturedStep, Kind, Observation, RunTotals
from telemetry.capture.parameters import NormReading, UpdateReading
from telemetry.capture.scaler import ScalerReading
from telemetry.host_copy import HostCopy
from telemetry.measure import Measurer
from telemetry.records import Layout
from telemetry.torch_private import NO_TASK


@dataclass(kw_only=True, eq=False)
class Window:
    """Gathers one step's observations.

    Attributes:
        step: The step that they belong to.
        measurer: Takes the tensors of a fully measured step; None on other steps.
        phase: Name of a part of the run that is not training; empty for a step.
        order: Watched modules in the order of their first call.
        committed: Backward passes in which a parameter's gradient accumulated; observations of
            other passes are probes, and dropped.
    """

    step: int
    measurer: Measurer | None
    phase: str = ""
    observations: list[Observation] = field(default_factory=list)
    order: dict[str, None] = field(default_factory=dict)
    committed: set[int] = field(default_factory=lambda: {NO_TASK})
    norms: list[NormReading] = field(default_factory=list)
    norms_before_clipping: list[NormReading] = field(default_factory=list)
    parameter_norms: list[NormReading] = field(default_factory=list)
    buffer_names: list[str] = field(default_factory=list)
    buffer_norms: list[NormReading] = field(default_factory=list)
    updates: list[UpdateReading] = field(default_factory=list)
    learning_rates: list[float | HostCopy] = field(default_factory=list)
    scaler: ScalerReading | None = None
    feature_maps: dict[str, HostCopy] = field(default_factory=dict)
    filters: dict[str, HostCopy] = field(default_factory=dict)
    input: HostCopy | None = None

    @property
    def full(self) -> bool:
        """Whether tensors are measured, not only gradient norms."""
        return self.measurer is not None

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

    def close(self, *, layout: Layout, totals: RunTotals, wall_time: float) -> CapturedStep:
        """End the step; the window is not used again."""
        return CapturedStep(
            step=self.step,
            wall_time=wall_time,
            layout=layout,
            phase=self.phase,
            totals=totals,
            norms=self.norms,
            norms_before_clipping=self.norms_before_clipping,
            parameter_norms=self.parameter_norms,
            buffer_names=self.buffer_names,
            buffer_norms=self.buffer_norms,
            updates=self.updates,
            learning_rates=self.learning_rates,
            scaler=self.scaler,
            measurements=self.measurer.finish() if self.measurer is not None else None,
            observations=self.observations,
            committed=frozenset(self.committed),
            feature_maps=self.feature_maps,
            filters=self.filters,
            input=self.input,
        )

"""What is kept of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import LayerTable, table
from telemetry.records import Layout, LightSteps, Output, StepRecord, TensorRecord
from telemetry.records.step import loss_of
from telemetry.sketch import Sketch

Key = TypeVar("Key")

_STEP_BYTES = 500
_SKETCH_BYTES = 600  # without its arrays


@dataclass(frozen=True, kw_only=True, eq=False)
class Detail:
    """What only a full measurement has: the table of all layers, and sketches as in the record."""

    layers: LayerTable
    outputs: Mapping[Output, Sketch]
    output_grads: Mapping[Output, Sketch]
    grads: Mapping[str, Sketch]
    weights: Mapping[str, Sketch]
    random_states: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Approximate memory."""
        kinds = (self.outputs, self.output_grads, self.grads, self.weights)
        sketches = list(chain.from_iterable(kind.values() for kind in kinds))
        arrays = sum(s.buckets.nbytes + s.counts.nbytes for s in sketches)
        table = self.layers.values.nbytes + self.layers.known.nbytes
        states = sum(map(len, self.random_states.values()))
        return arrays + table + states + _SKETCH_BYTES * len(sketches)


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One step.

    Attributes:
        step: As in the record, as is everything that is not explained here.
        grad_norms: L2 norm of the gradients of each module's own parameters, float64, shape
            ``[modules]``; NaN if one of them is.
        grad_present: Whether any of them had a gradient, shape ``[modules]``.
        detail: The rest of a full measurement.
    """

    step: int
    wall_time: float
    layout: Layout
    loss: float | None
    total_grad_norm: float
    learning_rates: tuple[float, ...]
    loss_scale: float | None
    skipped: bool
    full: bool
    grad_norms: NDArray[np.float64]
    grad_present: NDArray[np.bool_]
    detail: Detail | None = None

    @cached_property
    def nbytes(self) -> int:
        """Approximate memory."""
        detail = self.detail.nbytes if self.detail is not None else 0
        rates = 8 * len(self.learning_rates)
        return self.grad_norms.nbytes + self.grad_present.nbytes + rates + detail + _STEP_BYTES


def snapshot(record: StepRecord) -> Snapshot:
    """What is kept of a step, without :attr:`Snapshot.detail`."""
    layout = record.layout
    present = np.bincount(layout.owners, record.grad_present, minlength=len(layout.modules))
    return Snapshot(
        step=record.step,
        wall_time=record.wall_time,
        layout=layout,
        loss=record.loss,
        total_grad_norm=record.total_grad_norm,
        learning_rates=record.learning_rates,
        loss_scale=record.loss_scale,
        skipped=record.skipped,
        full=record.full,
        grad_norms=record.module_grad_norms,
        grad_present=present > 0,
    )


def light_snapshots(steps: LightSteps) -> Iterator[Snapshot]:
    """The same of each of several steps that were not measured in full."""
    norms = steps.module_grad_norms
    present = np.zeros(norms.shape, np.bool_)
    rows, parameters = np.nonzero(steps.grad_present)
    present[rows, steps.layout.owners[parameters]] = True
    totals, rates = steps.total_grad_norms.tolist(), steps.learning_rates.tolist()
    for index, step in enumerate(steps.steps):
        yield Snapshot(
            step=step,
            wall_time=float(steps.wall_times[index]),
            layout=steps.layout,
            loss=loss_of(steps.scalars[index], steps.loss_tag),
            total_grad_norm=totals[index],
            learning_rates=tuple(rates[index]),
            loss_scale=steps.loss_scale,
            skipped=steps.skipped,
            full=False,
            grad_norms=norms[index],
            grad_present=present[index],
        )


def detail(record: StepRecord) -> Detail:
    """What is kept of a full measurement in addition."""
    return Detail(
        layers=table(record),
        outputs=_kept(record.outputs),
        output_grads=_kept(record.output_grads),
        grads=_kept(record.grads),
        weights=_kept(record.weights),
        random_states=record.random_states,
    )


def _kept(tensors: Mapping[Key, TensorRecord]) -> Mapping[Key, Sketch]:
    return {key: tensor.sketch for key, tensor in tensors.items()}

"""What is kept of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from telemetry.records import Layout, Output, StepRecord, TensorRecord
from telemetry.sketch import Sketch

Key = TypeVar("Key")

_STEP_BYTES = 500
_TENSOR_BYTES = 600


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensor:
    """What is kept of a :class:`TensorRecord`: without its units."""

    sketch: Sketch
    dead_fraction: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Detail:
    """What only a full measurement has: as in the record."""

    outputs: Mapping[Output, Tensor]
    output_grads: Mapping[Output, Tensor]
    grads: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    update_ratios: Mapping[str, float]
    random_states: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Memory taken, about."""
        kinds = (self.outputs, self.output_grads, self.grads, self.weights)
        sketches = [t.sketch for t in chain.from_iterable(kind.values() for kind in kinds)]
        arrays = sum(s.buckets.nbytes + s.counts.nbytes for s in sketches)
        states = sum(map(len, self.random_states.values()))
        return arrays + states + _TENSOR_BYTES * len(sketches) + 100 * len(self.update_ratios)


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """One step.

    Attributes:
        step: As in the record, likewise what is not explained here.
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
        """Memory taken, about."""
        detail = self.detail.nbytes if self.detail is not None else 0
        rates = 8 * len(self.learning_rates)
        return self.grad_norms.nbytes + self.grad_present.nbytes + rates + detail + _STEP_BYTES


def snapshot(record: StepRecord) -> Snapshot:
    """What is kept of a step's record, but for :attr:`Snapshot.detail`."""
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


def detail(record: StepRecord) -> Detail:
    """What is kept of a full measurement beyond that."""
    return Detail(
        outputs=_kept(record.outputs),
        output_grads=_kept(record.output_grads),
        grads=_kept(record.grads),
        weights=_kept(record.weights),
        update_ratios=record.update_ratios,
        random_states=record.random_states,
    )


def _kept(tensors: Mapping[Key, TensorRecord]) -> Mapping[Key, Tensor]:
    return {
        key: Tensor(sketch=t.sketch, dead_fraction=t.dead_fraction) for key, t in tensors.items()
    }

"""The steps that were not measured in full: the norms of many of them as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from telemetry.records.layout import Layout, norms_by_module
from telemetry.records.ranks import RankFacts
from telemetry.records.step import StepRecord, loss_of


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
        loss_tag: The same at all of them, as are ``loss_scale``, ``skipped`` and ``eval_mode``.
    """

    layout: Layout
    steps: Sequence[int]
    wall_times: NDArray[np.float64]
    grad_norms: NDArray[np.float64]
    grad_present: NDArray[np.bool_]
    learning_rates: NDArray[np.float64]
    scalars: Sequence[Mapping[str, float]]
    ranks: Sequence[RankFacts] = ()
    loss_tag: str | None = None
    loss_scale: float | None = None
    skipped: bool = False
    eval_mode: bool = False

    @staticmethod
    def fit(first: StepRecord, other: StepRecord) -> bool:
        """Whether two records may be among the same steps."""
        return (
            first.layout is other.layout
            and len(first.learning_rates) == len(other.learning_rates)
            and first.loss_tag == other.loss_tag
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
            loss_tag=records[0].loss_tag,
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
        return norms_by_module(self.grad_norms, self.layout)

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
        """The losses that were logged, shape ``[n]``; NaN where none was."""
        return np.array([loss_of(scalars, self.loss_tag) for scalars in self.scalars], np.float64)

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
            loss_tag=self.loss_tag,
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

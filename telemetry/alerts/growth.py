"""Growth of activations in the forward pass and of gradients in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.baseline import Figures, Marks
from telemetry.layers import table
from telemetry.layers.module_types import LOOKUPS
from telemetry.plain_text import called
from telemetry.records import Layout, StepRecord, once
from telemetry.records.moments import rms_of


class Stretch(NamedTuple):
    """Modules over which a pass grows, from the first to the last; often a single one."""

    first: str
    last: str

    def __str__(self) -> str:
        if self.first == self.last:
            return called(self.first)
        return f"{called(self.first)} to {called(self.last)}"

    @property
    def growth(self) -> str:
        """Sentence about the module or modules that grow."""
        where = "is in" if self.first == self.last else "is spread over"
        return f"The growth {where} {self}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Growth:
    """Growth of a pass from its beginning to its largest value."""

    names: Sequence[str]  # modules in the order of the pass
    levels: Figures  # log10 of their sizes

    @cached_property
    def decades(self) -> float:
        """log10 of the ratio of the largest to the first; 0 if there are fewer than two."""
        return float(self.levels.max() - self.levels[0]) if len(self.levels) > 1 else 0.0

    @property
    def stretch(self) -> Stretch | None:
        """The module that has half of the growth, or those that have most of it."""
        if self.decades <= 0:
            return None
        top = int(self.levels.argmax())
        share = (self.levels[: top + 1] - self.levels[0]) / self.decades
        steepest = int(np.diff(share).argmax()) + 1
        if share[steepest] - share[steepest - 1] >= _MOST:
            return Stretch(self.names[steepest], self.names[steepest])
        begin = int(np.flatnonzero(share <= _ENDS)[-1])
        end = begin + int(np.flatnonzero(share[begin:] >= 1 - _ENDS)[0])
        return Stretch(self.names[begin + 1], self.names[end])


_MOST = 0.5  # of the growth: no other module has more
# Of the growth, at either end: about 13 of 16 equally scaled residual blocks (residual_x3) lie
# between.
_ENDS = 0.1


@once
def forward_growth(record: StepRecord) -> Growth:
    """Return the growth of outputs, from the RMS of the first to the variation of the others.

    A large constant does not count. Neither does growth in a normalization, which returns numbers
    around 1 for all inputs, as behind embeddings of 0.02.
    """
    layout, activations = record.layout, record.activations
    ran = [layout.position[name] for name in activations]
    sizes, variation = np.full((2, len(layout.modules)), math.nan)
    sizes[ran], variation[ran] = rms_of(activations.rows), activations.rows.variation
    modules = _with_scale(layout, sizes)
    variation[modules[:1]] = sizes[modules[:1]]
    return _growth(layout, modules, variation, free=_normalizations(layout)[modules])


@once
def backward_growth(record: StepRecord) -> Growth:
    """Return the growth of the gradients of these outputs, from the last module back.

    Growth in a normalization does not count: it divides gradients and inputs alike.
    """
    modules, sizes = _gradients(record)
    free = np.concatenate([[False], _normalizations(record.layout)[modules[:0:-1]]])
    return _growth(record.layout, modules[::-1], sizes, free=free)


def gain(record: StepRecord, norm: float | None = None) -> float:
    """Return the amplification of the loss's gradient by the network.

    It does not depend on the unit or weight of the loss or the scale of the targets.

    Args:
        norm: Norm of all parameter gradients; None: as the optimizer used them.

    Returns:
        log10 of the norm of all parameter gradients over the RMS of the gradient of the last
        module's output; NaN where that is zero or was not measured.
    """
    if not record.output_grads:  # as at most steps
        return math.nan
    total, (modules, sizes) = norm or record.total_grad_norm, _gradients(record)
    is_known = len(modules) > 0 and 0 < total < math.inf
    return math.log10(total / sizes[modules[-1]]) if is_known else math.nan


@once
def _gradients(record: StepRecord) -> tuple[NDArray[np.intp], Figures]:
    """Return modules with a scale, and the RMS of the gradients of all modules' outputs."""
    sizes = table(record).column("activation_grad_rms")
    return _with_scale(record.layout, sizes), sizes


def _with_scale(layout: Layout, sizes: Figures) -> NDArray[np.intp]:
    """Return the indices of modules whose size, ``[modules]``, is positive and finite.

    Embeddings are omitted, because their scale is arbitrary.
    """
    return ((sizes > 0) & (sizes < math.inf) & ~_lookups(layout)).nonzero()[0]


def _growth(layout: Layout, modules: NDArray[np.intp], sizes: Figures, *, free: Marks) -> Growth:
    """Return the growth over modules with these sizes, ``[all modules]``, without ``free`` ones."""
    values = sizes[modules]
    known = ((values > 0) & (values < math.inf)).nonzero()[0]
    levels = np.array([math.log10(size) for size in values[known].tolist()])
    steps = levels[1:] - levels[:-1]
    levels[1:] -= np.where(free[known[1:]] & (steps > 0), steps, 0.0).cumsum()
    return Growth(names=[layout.modules[index].name for index in modules[known]], levels=levels)


@once
def _lookups(layout: Layout) -> Marks:
    return np.array([module.type_name in LOOKUPS for module in layout.modules], bool)


@once
def _normalizations(layout: Layout) -> Marks:
    return np.array(["Norm" in module.type_name for module in layout.modules], bool)

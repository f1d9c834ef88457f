"""Growth of activations in the forward pass and of gradients in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from telemetry.layers import table
from telemetry.layers.module_types import LOOKUPS
from telemetry.plain_text import called
from telemetry.records import Module, StepRecord, once
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of


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


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Growth of a pass from its beginning to its largest value."""

    names: Sequence[str]  # modules in the order of the pass
    levels: Sequence[float]  # log10 of their sizes

    @property
    def decades(self) -> float:
        """log10 of the ratio of the largest to the first; 0 if there are fewer than two."""
        return max(self.levels) - self.levels[0] if len(self.levels) > 1 else 0.0

    @property
    def stretch(self) -> Stretch | None:
        """The module that has half of the growth, or those that have most of it."""
        if self.decades <= 0:
            return None
        levels = np.array(self.levels)
        top = int(levels.argmax())
        share = (levels[: top + 1] - levels[0]) / self.decades
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
    sizes = figures_of(record.activations, rms_of)
    variation = figures_of(record.activations, attrgetter("variation"))
    ran = [
        module
        for module in record.layout.modules
        if 0 < sizes.get(module.name, 0.0) < math.inf and module.type_name not in LOOKUPS
    ]
    values = [sizes[module.name] for module in ran[:1]]
    values += [variation[module.name] for module in ran[1:]]
    return _growth(ran, values, [_normalizes(module) for module in ran])


def backward_growth(record: StepRecord) -> Growth:
    """Return the growth of the gradients of these outputs, from the last module back.

    Growth in a normalization does not count: it divides gradients and inputs alike.
    """
    layers = _gradients(record)[::-1]
    modules = [module for module, _ in layers]
    return _growth(modules, [rms for _, rms in layers], [False, *map(_normalizes, modules)])


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
    total, last = norm or record.total_grad_norm, _gradients(record)[-1:]
    return math.log10(total / last[0][1]) if last and 0 < total < math.inf else math.nan


@once
def _gradients(record: StepRecord) -> list[tuple[Module, float]]:
    """Return layers and the RMS of the gradients of their outputs, in forward order.

    Layers with a zero or non-finite RMS are omitted, and embeddings, whose scale is arbitrary.
    """
    layers = zip(record.layout.modules, table(record).column("activation_grad_rms"), strict=True)
    return [
        (module, rms)
        for module, rms in layers
        if 0 < rms < math.inf and module.type_name not in LOOKUPS
    ]


def _growth(modules: Sequence[Module], values: Sequence[float], free: Sequence[bool]) -> Growth:
    """Return the growth over modules, without that of ``free`` modules."""
    names, levels, allowance = [], [], 0.0
    last = math.nan
    for module, value, is_free in zip(modules, values, free, strict=False):
        if not 0 < value < math.inf:
            continue
        level = math.log10(value)
        if is_free and level > last:
            allowance += level - last
        names.append(module.name)
        levels.append(level - allowance)
        last = level
    return Growth(names=names, levels=levels)


def _normalizes(module: Module) -> bool:
    return "Norm" in module.type_name

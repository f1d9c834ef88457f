"""How activations grow forward and gradients backward, and which layers are to blame for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts.history import carried
from telemetry.layers import table
from telemetry.layers.module_types import LOOKUPS
from telemetry.records import StepRecord, once
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of
from telemetry.shared.plain_text import called


class Stretch(NamedTuple):
    """The modules over which something grows: often one, which is the first and the last."""

    first: str
    last: str

    def __str__(self) -> str:
        if self.first == self.last:
            return called(self.first)
        return f"{called(self.first)} to {called(self.last)}"

    @property
    def shared(self) -> str:
        """Of what is divided among them."""
        return str(self) if self.first == self.last else f"{self}, each with a part of it"


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How much a pass grows from its beginning to its largest value.

    Attributes:
        names: The modules, in the order of the pass.
        levels: log10 of what each returned; the first is what the others are compared with.
    """

    names: Sequence[str]
    levels: Sequence[float]

    @property
    def decades(self) -> float:
        """log10 of the ratio of the largest to the first; 0 if there are fewer than two."""
        return max(self.levels) - self.levels[0] if len(self.levels) > 1 else 0.0

    @property
    def stretch(self) -> Stretch | None:
        """Where it grows: the module that has half of the growth, or those that have most of it."""
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
# Of the growth, at either end: of 16 residual blocks that are scaled alike (residual_x3) about 13
# lie between.
_ENDS = 0.1


@once
def forward_growth(record: StepRecord) -> Growth:
    """Growth of the modules' outputs: from the RMS of the first to the variation of others.

    So a constant is no growth, however large it is.
    """
    sizes = figures_of(record.activations, rms_of)
    names = [
        module.name
        for module in record.layout.modules
        if 0 < sizes.get(module.name, 0.0) < math.inf and module.type_name not in LOOKUPS
    ]
    variation = figures_of(record.activations, attrgetter("variation"))
    first = [(name, sizes[name]) for name in names[:1]]
    return _growth(first + [(name, variation[name]) for name in names[1:]])


def backward_growth(record: StepRecord) -> Growth:
    """Growth of the gradients with respect to these outputs, from the last module back."""
    return _growth(_gradients(record)[::-1])


def gain(record: StepRecord) -> float:
    """How much the network amplifies the gradient that comes from the loss.

    It does not change with the unit or weight of the loss or the scale of the targets.

    Returns:
        log10 of the norm of all parameter gradients over the RMS of the gradient of the last
        module's output; NaN where that is zero or was not measured.
    """
    if not record.output_grads:  # as at most steps
        return math.nan
    total, last = record.total_grad_norm, _gradients(record)[-1:]
    return math.log10(total / last[0][1]) if last and 0 < total < math.inf else math.nan


@once
def _gradients(record: StepRecord) -> list[tuple[str, float]]:
    """Names of layers and the RMS of the gradients of their outputs, in forward order.

    Leaves out layers where it is zero or not finite, and embeddings, which have a scale of their
    own.
    """
    layers = zip(record.layout.modules, table(record).column("activation_grad_rms"), strict=True)
    return [
        (module.name, rms)
        for module, rms in layers
        if 0 < rms < math.inf and module.type_name not in LOOKUPS
    ]


def _growth(values: Iterable[tuple[str, float]]) -> Growth:
    known = [(name, math.log10(value)) for name, value in values if 0 < value < math.inf]
    return Growth(names=[name for name, _ in known], levels=[level for _, level in known])


class Blame:
    """Which modules caused a sudden growth of the gradients; the first evidence counts.

    If a module's weights grew, so do its outputs and those of all behind it, which a full
    measurement shows: to blame is where most of the growth comes about, be it in one module, in
    several that grew alike, or in the batch already. The norms alone show a single one, too: in a
    network of ReLUs all gradients grow except its own, which does not contain its weight. If none
    stands out among several, and it is not known what the outputs were, it is the batch or all of
    them. A step or two later everything has changed.

    Attributes:
        stretch: The culprits; None while nothing grows or they are not known.
        batch: How many times as large as before the values are that the model was given, if it is
            they; else 0.
        is_alike: Whether all gradients grew alike, and nothing else is known.
    """

    stretch: Stretch | None = None
    batch: float = 0.0
    is_alike: bool = False
    _names: tuple[str, ...] = ()
    _usual: NDArray[np.float64]
    _outputs: dict[str, float]
    _input: float = math.nan

    def __init__(self) -> None:
        self._usual = np.zeros(0)  # log10 of each layer's norm
        self._outputs = {}

    def add(self, record: StepRecord) -> None:
        """Add a step whose gradients are finite."""
        names = record.layout.owner_names
        if names is not self._names:
            self._usual = carried(self._usual, self._names, names, np.nan)
            self._names = names
        outputs = self._grown_outputs(record) if record.inputs or record.outputs else None
        growth = self._growth(record)
        if growth is None and outputs is None:
            self._forget()
        elif self.stretch is None and not self.batch and not self.is_alike:
            by_norm = None if growth is None else self._all_but_one(growth)
            by_outputs = None if outputs is None else outputs.stretch
            self.stretch = Stretch(by_norm, by_norm) if by_norm is not None else by_outputs
            if outputs is not None and outputs.levels[0] > max(outputs.levels) / 2:
                self.stretch, self.batch = None, 10 ** outputs.levels[0]
            several = len(names) > _FEWEST
            self.is_alike = self.stretch is None and not record.full and several

    def _forget(self) -> None:
        self.stretch, self.batch, self.is_alike = None, 0.0, False

    def confined(self, record: StepRecord, usual: float) -> Stretch | None:
        """Where gradients have grown if few have: without those, the norm is nearly as it was.

        On its way back through the network such a gradient begins at the last of the modules.

        Args:
            record: A step whose gradients are finite and have grown.
            usual: Their norm before.
        """
        norms = record.owner_grad_norms
        order = norms.argsort()
        others = np.sqrt(np.cumsum(norms[order] ** 2))
        grown = order[others > 10**_ALL_GROWN * usual]
        if not 0 < len(grown) <= max(1, _FEW * len(norms)) or len(norms) < _FEWEST:
            return None
        name = self._names[int(grown.max())]
        return Stretch(name, name)

    def _growth(self, record: StepRecord) -> NDArray[np.float64] | None:
        """log10 of how far each norm is above its usual, if most have grown tenfold.

        Else it adds to what is usual: of a converged run, a batch may have a gradient of nearly 0.
        """
        levels = record.owner_grad_levels
        growth: NDArray[np.float64] = levels - self._usual
        high = np.count_nonzero(growth > _ALL_GROWN)
        if high:
            known = growth[np.isfinite(growth)]
            if 2 * high >= len(known) >= _FEWEST and np.median(known) > _ALL_GROWN:
                return growth
        used = levels > -np.inf
        np.add(self._usual, _FADING, out=self._usual, where=used)
        np.fmax(self._usual, levels, out=self._usual, where=used)
        return None

    def _all_but_one(self, growth: NDArray[np.float64]) -> str | None:
        """The layer whose gradient grew far less than all others."""
        known = np.isfinite(growth)
        least, next_least = np.sort(growth[known])[:2]
        if next_least - least <= _FAR_LESS:
            return None
        return self._names[int(np.where(known, growth, np.inf).argmin())]

    def _grown_outputs(self, record: StepRecord) -> Growth | None:
        """How far the batch and then each output are above what they were; None if none is."""
        names, levels = [""], [0.0]
        given = record.inputs.get("")
        if given is not None:
            level, self._input = _above(given.variation, given.sketch.rms, self._input)
            levels = [level]
        sizes = figures_of(record.activations, rms_of)
        for name, now in figures_of(record.activations, attrgetter("variation")).items():
            usual = self._outputs.get(name, math.nan)
            level, self._outputs[name] = _above(now, sizes[name], usual)
            names.append(name)
            levels.append(level)
        return Growth(names=names, levels=levels) if max(levels) > _ALL_GROWN else None


def _above(now: float, rms: float, usual: float) -> tuple[float, float]:
    """log10 of how far a variation is above a usual RMS, 0 if not known; and what is usual now."""
    level = math.log10(now / usual) if 0 < now < math.inf and usual > 0 else 0.0
    return level, rms if level <= _ALL_GROWN and 0 < rms < math.inf else usual


_FEW = 0.1  # of all modules, by eye
_FEWEST = 3  # fewer modules have no majority; tried 1 and 6
_ALL_GROWN = 1.0  # ten times, gradients as well as outputs; by eye; tried 0.5 and 2
_FAR_LESS = 1.0  # by eye; tried 0.5 and 2
_FADING = math.log10(0.9)  # a step: what was ten steps ago counts as a third of it

"""Growth of activations and gradients, over depth and over time, and the modules that cause it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline, Figures, Marks
from telemetry.layers import table
from telemetry.layers.module_types import LOOKUPS
from telemetry.plain_text import called
from telemetry.records import Layout, StepRecord, once
from telemetry.records.moments import rms_of
from telemetry.records.tensor import figures_of


class Stretch(NamedTuple):
    """Modules over which a pass grows, from the first to the last; often a single one."""

    first: str
    last: str

    @classmethod
    def of(cls, name: str) -> Stretch:
        return cls(name, name)

    def __str__(self) -> str:
        if self.first == self.last:
            return called(self.first)
        return f"{called(self.first)} to {called(self.last)}"

    @property
    def growth(self) -> str:
        """Sentence about the module or modules that grow."""
        return f"The growth is {'in' if self.first == self.last else 'spread over'} {self}"


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
        if share[steepest] - share[steepest - 1] >= shared.HALF:
            return Stretch.of(self.names[steepest])
        begin = int(np.flatnonzero(share <= shared.FEW)[-1])
        end = begin + int(np.flatnonzero(share[begin:] >= 1 - shared.FEW)[0])
        return Stretch(self.names[begin + 1], self.names[end])


@once
def forward_growth(record: StepRecord) -> Growth:
    """Return the growth of outputs, from the RMS of the first to the variation of the others.

    A large constant does not count. Neither does growth in a normalization, which returns numbers
    around 1 for all inputs, as behind embeddings of 0.02, nor after the last parameters.
    """
    layout, activations = record.layout, record.activations
    ran = [layout.position[name] for name in activations]
    sizes, variation = np.full((2, len(layout.modules)), math.nan)
    sizes[ran], variation[ran] = rms_of(activations.rows), activations.rows.variation
    modules = _to_last_owner(layout, _with_scale(layout, sizes))
    variation[modules[:1]] = sizes[modules[:1]]
    return _growth(layout, modules, variation, free=_normalizations(layout)[modules])


@once
def backward_growth(record: StepRecord) -> Growth:
    """Return the growth of the gradients of these outputs, from the last module back.

    Growth in a normalization does not count: it divides gradients and inputs alike.
    """
    modules, sizes = _gradients(record)
    modules = _to_last_owner(record.layout, modules)
    free = np.concatenate([[False], _normalizations(record.layout)[modules[:0:-1]]])
    return _growth(record.layout, modules[::-1], sizes, free=free)


def gain(record: StepRecord, norm: float | None = None) -> float:
    """Return the amplification of the loss's gradient by the network, whatever the loss's unit.

    That is log10 of the norm of all parameter gradients (None: as the optimizer used them) over the
    RMS of the gradient of the last module's output; NaN where that is zero or was not measured.
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
    """Return the modules with a positive, finite size, but no embeddings: any scale suits them."""
    return ((sizes > 0) & (sizes < math.inf) & ~_lookups(layout)).nonzero()[0]


def _to_last_owner(layout: Layout, modules: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the modules up to the last with parameters: later ones choose a unit, or a range."""
    until: NDArray[np.intp] = modules[modules <= layout.owning.max(initial=-1)]
    return until


def _growth(layout: Layout, modules: NDArray[np.intp], sizes: Figures, *, free: Marks) -> Growth:
    """Return the growth over modules with these sizes, ``[all modules]``, without ``free`` ones."""
    values = sizes[modules]
    known = (values > 0).nonzero()[0]
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


# --- over time ------------------------------------------------------------------------------------


class Blame:
    """Modules that caused a sudden growth of the gradients; the first evidence counts.

    If a module's weights grew, so did its outputs and all later ones, which a full step shows. The
    culprit has most of this growth: one module, several that grew alike, or the batch. The norms
    alone can show a single culprit, too: in a network of ReLUs all gradients grow except its own,
    which does not contain its weight. A step or two later everything has changed.
    """

    stretch: Stretch | None = None  # the culprits; None if nothing grows or they are unknown
    batch: float = 0.0  # growth of the batch's values, if the batch is the culprit
    is_alike: bool = False  # all gradients grew alike, and nothing else is known
    by_norms: bool = False  # the norms alone show the culprit
    is_corrected: bool = False  # a full step has just shown another culprit
    _outputs: dict[str, float]
    _gradients: dict[str, float]

    def __init__(self) -> None:
        self._outputs, self._gradients = {}, {}

    def add(self, record: StepRecord, baseline: Baseline) -> None:
        """Add a step whose gradients are finite."""
        outputs = self._grown_outputs(record) if record.inputs or record.outputs else None
        growth, entered = _common_growth(baseline), _entered(baseline)
        first = self._first_grown(record) if record.full else None
        if growth is None and outputs is None and entered is None:
            self.stretch, self.batch, self.is_alike = None, 0.0, False
        elif self.by_norms and record.full and outputs is None and first is not None:
            # No output has grown, so no weight has: the growth came from later layers, and the
            # layer that did not grow is on another branch.
            self.stretch, self.by_norms, self.is_corrected = Stretch.of(first), False, True
        elif self.stretch is None and not self.batch and not self.is_alike:
            self.stretch = entered
            if growth is not None:
                self.stretch = _all_but_one(baseline.layers.names, growth)
            if self.stretch is None and outputs is not None:
                self.stretch = outputs.stretch
            if outputs is not None and outputs.levels[0] > outputs.levels.max() / 2:
                self.stretch, self.batch = None, 10 ** outputs.levels[0]
            several = len(baseline.layers.names) > shared.SEVERAL
            self.by_norms = self.stretch is not None and entered is None and not record.full
            self.is_alike = self.stretch is None and not record.full and several

    def _grown_outputs(self, record: StepRecord) -> Growth | None:
        """Return the growth of the batch and then of each output; None if none has grown."""
        given, rows = record.inputs.get(""), record.activations.rows
        batch, batch_size = math.nan, math.nan
        if given is not None:
            batch, batch_size = given.variation, rms_of(given.rows)[given.row]
        names = [_BATCH_KEY, *record.activations]
        now = np.concatenate([[batch], rows.variation])
        sizes = np.concatenate([[batch_size], rms_of(rows)])
        usual = np.array([self._outputs.get(name, math.nan) for name in names])
        with np.errstate(all="ignore"):
            levels = np.where((now > 0) & (now < math.inf) & (usual > 0), np.log10(now / usual), 0)
        for place in ((levels <= shared.TENFOLD) & (sizes > 0) & (sizes < math.inf)).nonzero()[0]:
            self._outputs[names[place]] = float(sizes[place])
        return (
            Growth(names=["", *names[1:]], levels=levels) if levels.max() > shared.TENFOLD else None
        )

    def _first_grown(self, record: StepRecord) -> str | None:
        """Return the module whose output's gradient grew tenfold first in the backward pass."""
        grown, usual = [], self._gradients
        for name, now in figures_of(record.activation_grads, rms_of).items():
            if name in usual and now > 10**shared.TENFOLD * usual[name]:
                grown.append(name)
            elif 0 < now < math.inf:
                usual[name] = now
        return max(grown, key=record.layout.position.__getitem__, default=None)


def _common_growth(baseline: Baseline) -> Figures | None:
    """Return log10 of each norm over its usual one, if most have grown tenfold."""
    growth = baseline.layers.growth
    known = growth[np.isfinite(growth)]
    is_grown = 2 * np.count_nonzero(known > shared.TENFOLD) > len(known) >= shared.SEVERAL
    return growth if is_grown else None


def _entered(baseline: Baseline) -> Stretch | None:
    """Return the layer at which a hundredfold growth of a few gradients entered.

    That is the last of them, which passes it to earlier layers.
    """
    growth = baseline.layers.growth
    known, (grown,) = np.isfinite(growth), (growth > 2 * shared.TENFOLD).nonzero()
    are_apart = not (known & (growth > shared.TENFOLD / 2) & (growth <= 2 * shared.TENFOLD)).any()
    if not 0 < 2 * len(grown) <= np.count_nonzero(known) or not are_apart:
        return None
    return Stretch.of(baseline.layers.names[grown[-1]])


def _all_but_one(names: Sequence[str], growth: Figures) -> Stretch | None:
    """Return the layer whose gradient grew far less than all others."""
    known = np.isfinite(growth)
    least, next_least = np.sort(growth[known])[:2]
    if next_least - least <= shared.TENFOLD:
        return None
    return Stretch.of(names[int(np.where(known, growth, np.inf).argmin())])


def confined_growth(record: StepRecord, usual: float, scale: float = 1.0) -> Stretch | None:
    """Return the layer at which growth entered, if the norm is ``usual`` without few layers.

    That is the last of them, where the backward pass starts. Clipping divided norms by ``scale``.
    """
    norms = record.owner_grad_norms * scale
    order = norms.argsort()
    others = np.sqrt(np.cumsum(norms[order] ** 2))
    grown = order[others > 10**shared.TENFOLD * usual]
    if not 0 < len(grown) <= max(1, shared.FEW * len(norms)) or len(norms) < shared.SEVERAL:
        return None
    return Stretch.of(record.layout.owner_names[int(grown.max())])


_BATCH_KEY = "(batch)"

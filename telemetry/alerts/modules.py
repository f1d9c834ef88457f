"""The modules of a step: outputs of those that ran, gradients of those that own parameters."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import table
from telemetry.layers.module_types import (
    CONVOLUTIONS,
    DROPOUTS,
    NORMALIZATIONS,
    POOLING,
    RESHAPING,
    UNBOUNDED,
)
from telemetry.movers import LOOK_BACK, Mover, movers
from telemetry.plain_text import called
from telemetry.records import Layout, Output, StepRecord, TensorRecord, once


@dataclass(eq=False)
class Modules:
    """The modules of one layout that own parameters, in forward order.

    A weight and its bias count together, because a bias alone misleads: before a normalization its
    gradient is rounding noise, and in a deep linear network it is the only large one.

    Attributes:
        names: Their names.
        layout: The layout; an empty one if only the names are known.
    """

    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.layout = _NO_LAYOUT
        self._positions = np.zeros(0, np.intp)

    @staticmethod
    def of(layout: Layout) -> Modules:
        """The modules of a layout."""
        positions = layout.owning
        modules = Modules(tuple(layout.modules[position].name for position in positions))
        modules.layout, modules._positions = layout, positions
        return modules

    def update_ratios(self, record: StepRecord) -> NDArray[np.float64]:
        """The layers' ``update_ratio``, float64 ``[len(names)]``; NaN where it is not known."""
        return table(record).column("update_ratio")[self._positions]

    def any_of(self, parameters: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """For each whether it holds for any of its parameters, bool ``[len(names)]``.

        Args:
            parameters: Whether it holds, in the order of ``layout.parameters``.
        """
        return np.isin(self.layout.owning, self.layout.owners[parameters])

    def sizes(self) -> NDArray[np.float64]:
        """Number of elements of the parameters of each, float64 ``[len(names)]``."""
        sizes = [float(parameter.size) for parameter in self.layout.parameters]
        by_module: NDArray[np.float64] = np.bincount(self.layout.owners, sizes).astype(float)
        return by_module[self._positions]

    def carry(
        self, values: NDArray[np.float64], names: tuple[str, ...], fill: float
    ) -> NDArray[np.float64]:
        """Values that belong to ``names`` in the order of :attr:`names`; ``fill`` for new ones."""
        known = dict(zip(names, values, strict=True))
        return np.array([known.get(name, fill) for name in self.names])


_NO_LAYOUT = Layout(modules=(), parameters=())


@dataclass(kw_only=True)
class Shares:
    """What the rule remembers of each module; all arrays float64 ``[modules]``.

    A module's share is log10 of its gradient norm over the largest.

    Attributes:
        faint_steps: Number of steps in a row at which its share was small and its norm not zero.
        since_zero: Steps since its norm was zero.
        zero_steps: Number of steps in a row at which it was, and that of others was not.
        first_share: Its share when it was first not zero.
        largest_share: Its largest share so far.
        last_mark: Its share when ``faint_steps`` was last a power of two.
        mark_before: Its share at the power of two before.
        was_lost: 1 if it was small from the first, or the loss rose when it became so.
        update_share: log10 of its update ratio over the largest; NaN if unknown.
    """

    faint_steps: NDArray[np.float64]
    since_zero: NDArray[np.float64]
    zero_steps: NDArray[np.float64]
    first_share: NDArray[np.float64]
    largest_share: NDArray[np.float64]
    last_mark: NDArray[np.float64]
    mark_before: NDArray[np.float64]
    was_lost: NDArray[np.float64]
    update_share: NDArray[np.float64]

    @staticmethod
    def of(count: int) -> Shares:
        """The state of modules that were not seen before."""
        return Shares(**{f.name: np.full(count, _FILLS[f.name]) for f in fields(Shares)})

    def carried(self, before: Modules, after: Modules) -> Shares:
        """The state for the modules of another layout."""
        return Shares(
            **{
                f.name: after.carry(getattr(self, f.name), before.names, _FILLS[f.name])
                for f in fields(Shares)
            }
        )

    def add(self, share: NDArray[np.float64], limit: float, loss_is_worse: bool) -> None:
        """Add the shares of one step; ``-inf`` where the norm is zero."""
        zero = share == -np.inf
        self.since_zero = np.where(zero, 0.0, self.since_zero + 1)
        self.zero_steps = np.where(zero, self.zero_steps + 1, 0.0)
        self.first_share = np.where(zero | ~np.isnan(self.first_share), self.first_share, share)
        self.largest_share = np.fmax(self.largest_share, share)
        faint = ~zero & (share < limit)
        self.update_share = np.where(faint, self.update_share, np.nan)
        if not (faint.any() or self.faint_steps.any()):
            # The usual case, in short: what follows would do the same.
            self.mark_before, self.last_mark = self.last_mark, share
            return
        self.faint_steps = np.where(faint, self.faint_steps + 1, 0.0)
        lost = (self.first_share < limit) | loss_is_worse | (self.was_lost > 0)
        self.was_lost = np.where(faint & lost, 1.0, 0.0)
        marked = np.log2(np.maximum(self.faint_steps, 1)) % 1 == 0
        self.mark_before = np.where(marked, self.last_mark, self.mark_before)
        self.last_mark = np.where(marked, share, self.last_mark)


_FILLS = {
    "faint_steps": 0.0,
    "since_zero": np.inf,
    "zero_steps": 0.0,
    "first_share": np.nan,
    "largest_share": -np.inf,
    "last_mark": np.nan,
    "mark_before": np.nan,
    "was_lost": 0.0,
    "update_share": np.nan,
}


LATER = 20
"""Steps after which it may still be asked about one."""

FEW = 0.1
"""Of all layers; by eye, so that one noisy layer is no reason."""


class _Row(NamedTuple):
    step: int
    norms: NDArray[np.float64]


class NormRing:
    """The gradient norms of all modules at the last steps."""

    _names: tuple[str, ...]
    _rows: deque[_Row]

    def __init__(self) -> None:
        self._modules = Modules()
        self._names = ()
        self._rows = deque(maxlen=LOOK_BACK + LATER)

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self._follow(record.layout)
        self._rows.append(_Row(record.step, record.owner_grad_norms))

    def _follow(self, layout: Layout) -> None:
        if self._modules.layout is not layout:
            self._modules = Modules.of(layout)
            if self._names != self._modules.names:
                self._names = self._modules.names
                self._rows.clear()

    def movers(self, since: int) -> Sequence[Mover]:
        """The layers whose norm had left its past by step ``since``, earliest first.

        As the page finds them: of what came later it says nothing.
        """
        rows = [row for row in self._rows if since - LOOK_BACK < row.step <= since]
        steps, norms = [row.step for row in rows], [row.norms for row in rows]
        return movers(self._names, steps, norms, since) or ()

    def count(self) -> int:
        """Number of layers."""
        return len(self._names)

    def in_words(self, since: int) -> str:
        """The same for a message: at most five layers; nothing if there are none."""
        movers, count = self.movers(since), self.count()
        if not movers:
            return ""
        first = [mover for mover in movers if mover.step == movers[0].step]
        if len(first) > FEW * count and len(first) > _NAMED:
            return f" {len(first)} of {count} layers moved first, together at step {first[0].step}."
        named = ", ".join(
            f"{called(mover.name)} ({mover.factor:.3g} times at step {mover.step})"
            for mover in movers[:_NAMED]
        )
        return f" First to move: {named}."


_NAMED = 5


_KEEP_POSITIONS = CONVOLUTIONS | {"Linear"} | NORMALIZATIONS | UNBOUNDED | DROPOUTS
"""Modules that return as many positions as they are given, or fewer."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The outputs in forward order, and the type of module that returned each.

    Attributes:
        outputs: The outputs.
        types: Names of the classes of their modules, in the same order.
        owned: Whether their modules own parameters, in the same order.
        positions: How many elements each unit has, samples and pixels together, in the same order;
            NaN where units are not told apart.
    """

    outputs: Sequence[Output]
    types: Sequence[str]
    owned: Sequence[bool]
    positions: Sequence[float]

    @staticmethod
    @once
    def of(record: StepRecord) -> Forward:
        """The outputs measured at this step."""
        layout = record.layout
        place = {output: layout.position[output.module_name] for output in record.outputs}
        outputs = sorted(place, key=place.__getitem__)
        owning = set(layout.owning.tolist())
        return Forward(
            outputs=outputs,
            types=[layout.modules[place[output]].type_name for output in outputs],
            owned=[place[output] in owning for output in outputs],
            positions=[_positions(record.outputs[output]) for output in outputs],
        )

    @property
    def hidden(self) -> range:
        """Indices of the outputs that are followed by another module with parameters."""
        last_owner = max((i for i, owned in enumerate(self.owned) if owned), default=0)
        return range(last_owner)

    def is_gate(self, index: int) -> bool:
        """Whether a hidden output only scales what flows past it, as in squeeze and excitation.

        It was pooled, and what follows is a feature map all the same.
        """
        after = index + 1
        if self.types[after] not in _KEEP_POSITIONS:
            return False
        if self.positions[after] > self.positions[index]:
            return True
        # The last maps of a network may have no more than one position.
        before = [self.types[i] for i in range(index - 1, -1, -1)]
        since_pooling = next((i for i, kind in enumerate(before) if kind in POOLING), None)
        return (
            since_pooling is not None
            and self.types[after] in CONVOLUTIONS
            and all(kind in _KEEP_POSITIONS | RESHAPING for kind in before[:since_pooling])
        )


def _positions(output: TensorRecord) -> float:
    if output.unit_min is None or output.unit_min.size == 0:
        return math.nan
    return output.sketch.count / output.unit_min.size

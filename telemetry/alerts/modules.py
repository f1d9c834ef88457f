"""The layers of a step: outputs of those that ran, gradients of those that own parameters.

A weight and its bias count together, because a bias alone misleads: before a normalization its
gradient is rounding noise, and in a deep linear network it is the only large one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from telemetry.records import Output, StepRecord, TensorRecord, once


def carried(
    values: NDArray[np.float64], before: Sequence[str], names: Sequence[str], fill: float
) -> NDArray[np.float64]:
    """Values of the layers ``before``, for those of ``names``; ``fill`` for new ones."""
    known = dict(zip(before, values.tolist(), strict=False))
    return np.array([known.get(name, fill) for name in names], np.float64)


LATER = 20
"""Steps after which it may still be asked about one."""

FEW = 0.1
"""Of all layers; by eye, so that one noisy layer is no reason."""


class _Row(NamedTuple):
    step: int
    norms: NDArray[np.float64]


class NormRing:
    """The gradient norms of all modules at the last steps."""

    _names: tuple[str, ...] = ()
    _rows: deque[_Row]

    def __init__(self) -> None:
        self._rows = deque(maxlen=LOOK_BACK + LATER)

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        names = record.layout.owner_names
        if names is not self._names:
            if names != self._names:
                self._rows.clear()
            self._names = names
        self._rows.append(_Row(record.step, record.owner_grad_norms))

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
        """For a message: at most five layers; nothing if there are none."""
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

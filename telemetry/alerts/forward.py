"""The measured outputs of one step, in the order in which the modules ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from telemetry.layers.module_types import (
    CONVOLUTIONS,
    DROPOUTS,
    NORMALIZATIONS,
    POOLING,
    RESHAPING,
    UNBOUNDED,
)
from telemetry.records import Output, StepRecord, TensorRecord, once

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

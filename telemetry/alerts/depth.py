"""How activations grow on their way forward through the network, and gradients backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from telemetry.alerts.module_types import LOOKUPS
from telemetry.records import Layout, Output, StepRecord, TensorRecord


@dataclass(frozen=True, kw_only=True)
class Growth:
    """From where a pass begins to where it is largest.

    Attributes:
        decades: Decimal logarithm of the ratio of the two RMS; 0 if the largest is the first.
        module_name: Where the pass grew most from one module to the next.
    """

    decades: float
    module_name: str | None


def forward_growth(record: StepRecord) -> Growth:
    """Of the modules' outputs, beginning at the first module."""
    return _growth(_profile(record.layout, record.outputs))


def backward_growth(record: StepRecord) -> Growth:
    """Of the gradients with respect to them, beginning at the last module."""
    return _growth(_profile(record.layout, record.output_grads)[::-1])


def gain(record: StepRecord) -> float:
    """What the network makes of the gradient that the loss gives it.

    Another unit or weight of the loss, or another scale of the targets, changes both alike.

    Returns:
        Decimal logarithm of the norm of all gradients over the RMS of that of the last module's
        output; NaN where it is not measured or zero.
    """
    total, profile = record.total_grad_norm, _profile(record.layout, record.output_grads)
    return math.log10(total) - profile[-1][1] if profile and 0 < total < math.inf else math.nan


def _profile(layout: Layout, tensors: Mapping[Output, TensorRecord]) -> list[tuple[str, float]]:
    """Module names and decimal logarithms of RMS, in forward order.

    Left out are outputs that are all zero, and lookups, whose scale is their own.
    """
    position = layout.position
    profile: list[tuple[int, str, float]] = []
    for (name, _), tensor in tensors.items():
        place, rms = position[name], tensor.sketch.rms
        if 0 < rms < math.inf and layout.modules[place].type_name not in LOOKUPS:
            profile.append((place, name, math.log10(rms)))
    return [(name, level) for _, name, level in sorted(profile, key=lambda item: item[0])]


def _growth(profile: list[tuple[str, float]]) -> Growth:
    if len(profile) < 2:
        return Growth(decades=0.0, module_name=None)
    levels = [level for _, level in profile]
    jumps = np.diff(levels)
    steepest = int(np.argmax(jumps)) + 1
    return Growth(decades=max(levels) - levels[0], module_name=profile[steepest][0])

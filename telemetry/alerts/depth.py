"""How activations grow on their way forward through the network, and gradients backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from telemetry.layers import table
from telemetry.layers.module_types import LOOKUPS
from telemetry.records import StepRecord


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
    return _growth(_profile(record, "activation_rms"))


def backward_growth(record: StepRecord) -> Growth:
    """Of the gradients with respect to them, beginning at the last module."""
    return _growth(_profile(record, "activation_grad_rms")[::-1])


def gain(record: StepRecord) -> float:
    """What the network makes of the gradient that the loss gives it.

    Another unit or weight of the loss, or another scale of the targets, changes both alike.

    Returns:
        Decimal logarithm of the norm of all gradients over the RMS of that of the last module's
        output; NaN where it is not measured or zero.
    """
    total, profile = record.total_grad_norm, _profile(record, "activation_grad_rms")
    return math.log10(total) - profile[-1][1] if profile and 0 < total < math.inf else math.nan


def _profile(record: StepRecord, statistic: str) -> list[tuple[str, float]]:
    """Names of layers and decimal logarithms of an RMS, in forward order.

    Left out are layers where it is zero or not finite, and lookups, whose scale is their own.
    """
    layers = zip(record.layout.modules, table(record).column(statistic), strict=True)
    return [
        (module.name, math.log10(rms))
        for module, rms in layers
        if 0 < rms < math.inf and module.type_name not in LOOKUPS
    ]


def _growth(profile: list[tuple[str, float]]) -> Growth:
    if len(profile) < 2:
        return Growth(decades=0.0, module_name=None)
    levels = [level for _, level in profile]
    jumps = np.diff(levels)
    steepest = int(np.argmax(jumps)) + 1
    return Growth(decades=max(levels) - levels[0], module_name=profile[steepest][0])

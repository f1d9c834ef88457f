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
    """How much a pass grows from its beginning to its largest value.

    Attributes:
        decades: log10 of the ratio of the two RMS; 0 if the first is the largest.
        module_name: The module at which the pass grows most from one module to the next.
    """

    decades: float
    module_name: str | None


def forward_growth(record: StepRecord) -> Growth:
    """Growth of the modules' outputs, from the first module on."""
    return _growth(_profile(record, "activation_rms"))


def backward_growth(record: StepRecord) -> Growth:
    """Growth of the gradients with respect to these outputs, from the last module back."""
    return _growth(_profile(record, "activation_grad_rms")[::-1])


def gain(record: StepRecord) -> float:
    """How much the network amplifies the gradient that comes from the loss.

    It does not change with the unit or weight of the loss or the scale of the targets.

    Returns:
        log10 of the norm of all parameter gradients over the RMS of the gradient of the last
        module's output; NaN where that is zero or was not measured.
    """
    total, profile = record.total_grad_norm, _profile(record, "activation_grad_rms")
    return math.log10(total) - profile[-1][1] if profile and 0 < total < math.inf else math.nan


def _profile(record: StepRecord, statistic: str) -> list[tuple[str, float]]:
    """Names of layers and log10 of an RMS, in forward order.

    Leaves out layers where it is zero or not finite, and embeddings, which have a scale of their
    own.
    """
    if not record.outputs and not record.output_grads:
        return []  # as at most steps, which need no table then
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

"""Gradients of former steps that are still there, because nobody has set them to zero."""

from __future__ import annotations

import math

from telemetry.layers.module_types import AFFINE
from telemetry.records import StepRecord


def excess(record: StepRecord) -> float:
    """How many times larger a gradient is than the backward passes of this step can make it.

    The gradient of the bias of a linear or convolutional layer is the sum of the gradients of its
    outputs over all ``n`` samples and positions, so its norm is at most ``sqrt(n)`` times the norm
    of those together (Cauchy and Schwarz).

    Returns:
        The largest of all layers: up to 1, unless gradients were added otherwise; 0 if not known.
    """
    kinds = {module.name: module.type_name for module in record.layout.modules}
    found = 0.0
    for parameter in record.layout.parameters:
        bias, name = record.grads.get(parameter.name), parameter.module_name
        given = record.activation_grads.get(name)
        if bias is None or given is None or len(parameter.shape) != 1 or kinds[name] not in AFFINE:
            continue
        if given.calls > _ALL_MEASURED or given.sketch.nonfinite_count or not bias.sketch.norm:
            continue
        most = math.sqrt(given.sketch.count / parameter.size) * given.sketch.norm
        found = max(found, bias.sketch.norm / most if most else math.inf)
    return found


_ALL_MEASURED = 4  # calls of a module; of more, perhaps only these are (telemetry.capture.window)

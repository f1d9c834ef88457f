"""Full records of a small model, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from telemetry.records import Output, StepRecord, TensorRecord
from telemetry.records.sketch import sketch_array
from tests.helpers.known_runs import layout_of

LAYOUT = layout_of([f"layer{i}" for i in range(4)])


def tensor(scale: float) -> TensorRecord:
    """A hundred values around 0, and units of which one of four is dead."""
    values = np.linspace(-scale, scale, 100)
    high = np.array([0, scale, scale, scale], np.float32)
    return TensorRecord(sketch=sketch_array(values), unit_min=-high, unit_max=high)


def full_record(step: int, **changes: Any) -> StepRecord:
    """Gradient norms 1, 10, 100, 1000, and everything else by layer."""
    modules = [module.name for module in LAYOUT.modules]
    names = [parameter.name for parameter in LAYOUT.parameters]
    values: dict[str, Any] = {
        "step": step,
        "wall_time": 1e9 + step,
        "layout": LAYOUT,
        "grad_norms": 10.0 ** np.arange(4),
        "grad_present": np.ones(4, dtype=bool),
        "grad_finite": np.ones(4, dtype=bool),
        "full": True,
        "learning_rates": (0.1,),
        "outputs": {Output(name): tensor(i + 1) for i, name in enumerate(modules)},
        "grads": {name: tensor(0.1**i) for i, name in enumerate(names)},
        "weights": {name: tensor(1) for name in names},
        "update_ratios": dict.fromkeys(names, 0.001),
    }
    return StepRecord(**{**values, **changes})

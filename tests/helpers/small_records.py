"""Full records of a small model, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from telemetry import Output, StepRecord, TensorRecord
from telemetry.records import AttentionHeads
from telemetry.records.sketch import sketch_array
from tests.helpers.known_runs import layout_of

LAYOUT = layout_of([f"layer{i}" for i in range(4)])


def tensor(scale: float) -> TensorRecord:
    """A hundred values around 0, and units of which one of four is dead."""
    values = np.linspace(-scale, scale, 100)
    high = np.array([0, scale, scale, scale], np.float32)
    return TensorRecord(sketch=sketch_array(values), unit_min=-high, unit_max=high)


def units(values: np.ndarray[Any, Any]) -> TensorRecord:
    """Return the record of values [samples, units]."""
    low, high = values.min(axis=0).astype(np.float32), values.max(axis=0).astype(np.float32)
    return TensorRecord(sketch=sketch_array(values), unit_min=low, unit_max=high)


def heads(logits: Sequence[float], entropies: Sequence[float]) -> AttentionHeads:
    """Return the largest logit and the share of entropy of each head of a module."""
    return AttentionHeads(np.array(logits), np.array(entropies))


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
